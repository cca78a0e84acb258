//! Keys from a terminal.
use rustix::io::Errno;
use std::os::fd::AsFd;

/// A key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    /// Ctrl-Z.
    Suspend,
    /// Ctrl-L.
    Redraw,
}

/// Escape sequences of keys, behind the escape character.
const SEQUENCES: [(&str, Key); 12] = [
    ("[A", Key::Up),
    ("[B", Key::Down),
    ("OA", Key::Up),
    ("OB", Key::Down),
    ("[5~", Key::PageUp),
    ("[6~", Key::PageDown),
    ("[H", Key::Home),
    ("[F", Key::End),
    ("[1~", Key::Home),
    ("[4~", Key::End),
    ("OH", Key::Home),
    ("OF", Key::End),
];

/// Bytes of a terminal, as keys. A sequence may arrive in parts.
#[derive(Debug, Default)]
pub(super) struct Input {
    pending: Vec<u8>,
    /// There will be no more keys: stdin is closed.
    pub(super) ended: bool,
}

impl Input {
    /// Reads what has arrived.
    pub(super) fn read(&mut self, from: impl AsFd) -> Vec<Key> {
        let mut bytes = [0; 64];
        match rustix::io::read(from, &mut bytes) {
            Ok(0) => self.ended = true,
            Ok(len) => return self.decode(&bytes[..len]),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(_) => self.ended = true,
        }
        Vec::new()
    }

    fn decode(&mut self, bytes: &[u8]) -> Vec<Key> {
        self.pending.extend_from_slice(bytes);
        let mut keys = Vec::new();
        while let Some((key, len)) = next(&self.pending) {
            self.pending.drain(..len);
            keys.extend(key);
        }
        keys
    }
}

/// The first key and its length in bytes; no key: bytes without meaning.
///
/// `None`: more must arrive.
fn next(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    match bytes {
        [] | [0x1b] => None,
        [0x1b, rest @ ..] => {
            for (sequence, key) in SEQUENCES {
                if rest.starts_with(sequence.as_bytes()) {
                    return Some((Some(key), 1 + sequence.len()));
                }
            }
            // A sequence ends with a letter or a tilde; parameters come before.
            let end = rest.iter().skip(1).position(|byte| byte.is_ascii_alphabetic() || *byte == b'~');
            match end {
                Some(end) => Some((None, end + 3)),
                None if bytes.len() < 16 && matches!(rest[0], b'[' | b'O') => None,
                None => Some((None, 1)),
            }
        }
        [0x1a, ..] => Some((Some(Key::Suspend), 1)),
        [0x0c, ..] => Some((Some(Key::Redraw), 1)),
        [byte, ..] if byte.is_ascii_graphic() || *byte == b' ' => Some((Some(Key::Char((*byte).into())), 1)),
        _ => Some((None, 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_may_arrive_in_parts() {
        let mut input = Input::default();
        assert_eq!(input.decode(b"s\x1b[A\x1b[5"), [Key::Char('s'), Key::Up]);
        assert_eq!(input.decode(b"~q"), [Key::PageUp, Key::Char('q')]);
        assert_eq!(input.decode(b"\x1bOB\x1a\x0c"), [Key::Down, Key::Suspend, Key::Redraw]);
    }

    #[test]
    fn unknown_bytes_are_skipped_and_keep_nothing() {
        let mut input = Input::default();
        assert_eq!(input.decode(b"\x1b[1;5Cq"), [Key::Char('q')]);
        assert_eq!(input.decode(b"\xff\x01\x80q"), [Key::Char('q')]);
        for _ in 0..1000 {
            input.decode(b"\x1b[");
            input.decode(b"0000000000000000");
        }
        assert!(input.pending.len() < 64, "{}", input.pending.len());
    }
}
