//! Numbers of the protocol, and the layout of requests.
//!
//! Source: `doc/proto.md` of <https://github.com/NetworkBlockDevice/nbd>; extended headers: its
//! branch `extension-ext-header`. All numbers are big-endian.
use std::io;

/// First 8 bytes of a server: `NBDMAGIC`.
pub(super) const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Next 8 bytes of a newstyle server, and start of each option: `IHAVEOPT`.
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Next 8 bytes of an oldstyle server.
pub(super) const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Start of a reply to an option.
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake and client flag: options may be refused.
pub(super) const FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake and client flag: no zeroes after the reply to [`OPT_EXPORT_NAME`].
pub(super) const NO_ZEROES: u16 = 1 << 1;

pub(super) const OPT_EXPORT_NAME: u32 = 1;
pub(super) const OPT_ABORT: u32 = 2;
pub(super) const OPT_STARTTLS: u32 = 5;
pub(super) const OPT_INFO: u32 = 6;
pub(super) const OPT_GO: u32 = 7;
pub(super) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(super) const OPT_SET_META_CONTEXT: u32 = 10;
pub(super) const OPT_EXTENDED_HEADERS: u32 = 11;

pub(super) const REP_ACK: u32 = 1;
pub(super) const REP_INFO: u32 = 3;
pub(super) const REP_META_CONTEXT: u32 = 4;
/// Set in replies that refuse.
pub(super) const REP_ERROR: u32 = 1 << 31;

pub(super) const INFO_EXPORT: u16 = 0;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;

/// Context of [`CMD_BLOCK_STATUS`]: holes and zeroes.
pub(super) const ALLOCATION: &str = "base:allocation";

pub(super) const CMD_READ: u16 = 0;
pub(super) const CMD_WRITE: u16 = 1;
pub(super) const CMD_DISC: u16 = 2;
pub(super) const CMD_FLUSH: u16 = 3;
pub(super) const CMD_TRIM: u16 = 4;
pub(super) const CMD_CACHE: u16 = 5;
pub(super) const CMD_WRITE_ZEROES: u16 = 6;
pub(super) const CMD_BLOCK_STATUS: u16 = 7;

/// Command flag: the reply means that the data is durable.
pub(super) const CMD_FUA: u16 = 1 << 0;
/// Command flag: zeroes stay allocated.
pub(super) const CMD_NO_HOLE: u16 = 1 << 1;
/// Command flag: a payload follows. With extended headers only.
pub(super) const CMD_PAYLOAD_LEN: u16 = 1 << 5;

pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
pub(super) const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Flag of a chunk: the last one of its request.
pub(super) const REPLY_DONE: u16 = 1 << 0;
pub(super) const REPLY_NONE: u16 = 0;
pub(super) const REPLY_OFFSET_DATA: u16 = 1;
pub(super) const REPLY_OFFSET_HOLE: u16 = 2;
pub(super) const REPLY_BLOCK_STATUS: u16 = 5;
pub(super) const REPLY_BLOCK_STATUS_EXT: u16 = 6;
/// Set in the types of error chunks.
pub(super) const REPLY_ERROR_BIT: u16 = 1 << 15;
pub(super) const REPLY_ERROR_OFFSET: u16 = REPLY_ERROR_BIT + 2;

/// Longest text of the protocol in bytes.
pub(super) const STRING_LIMIT: usize = 4096;

/// Error number of a server that ends.
pub(super) const ESHUTDOWN: u32 = 108;

/// The error number of Linux for one of the protocol, negative.
pub(super) fn errno(error: u32) -> i32 {
    -match error {
        1 => libc::EPERM,
        5 => libc::EIO,
        12 => libc::ENOMEM,
        28 => libc::ENOSPC,
        75 => libc::EOVERFLOW,
        95 => libc::EOPNOTSUPP,
        108 => libc::ESHUTDOWN,
        _ => libc::EINVAL,
    }
}

/// Longest header of a request in bytes.
pub(super) const REQUEST_LIMIT: usize = 32;

/// A request without its payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NbdRequest {
    pub(super) command: u16,
    pub(super) flags: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    /// At most `u32::MAX` without extended headers.
    pub(super) len: u64,
}

impl NbdRequest {
    /// Bytes of a header.
    pub(super) fn size(extended: bool) -> usize {
        if extended { 32 } else { 28 }
    }

    /// Writes the header, and returns its length.
    pub(super) fn encode(&self, extended: bool, out: &mut [u8; REQUEST_LIMIT]) -> usize {
        let mut flags = self.flags;
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        if extended && self.command == CMD_WRITE {
            flags |= CMD_PAYLOAD_LEN;
        }
        out[..4].copy_from_slice(&magic.to_be_bytes());
        out[4..6].copy_from_slice(&flags.to_be_bytes());
        out[6..8].copy_from_slice(&self.command.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
        if extended {
            out[24..32].copy_from_slice(&self.len.to_be_bytes());
        } else {
            debug_assert!(u32::try_from(self.len).is_ok());
            out[24..28].copy_from_slice(&(self.len as u32).to_be_bytes());
        }
        Self::size(extended)
    }
}

/// Two bytes at `at`, which must be there.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    let mut word = [0; 2];
    word.copy_from_slice(&bytes[at..at + 2]);
    u16::from_be_bytes(word)
}

/// Four bytes at `at`, which must be there.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(word)
}

/// Eight bytes at `at`, which must be there.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(word)
}

/// A text of the server, fit for a log line.
pub(super) fn shown(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// The request that ends a session; the server does not answer.
pub(super) fn goodbye(extended: bool) -> ([u8; REQUEST_LIMIT], usize) {
    let request = NbdRequest { command: CMD_DISC, ..NbdRequest::default() };
    let mut out = [0; REQUEST_LIMIT];
    let len = request.encode(extended, &mut out);
    (out, len)
}

/// The text of a system call's error without its number.
pub(super) fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_layout_of_the_protocol() {
        let request =
            NbdRequest { command: CMD_WRITE, flags: CMD_FUA, cookie: 0x0102, offset: 0x1000, len: 512 };
        let mut out = [0xee; REQUEST_LIMIT];
        assert_eq!(request.encode(false, &mut out), 28);
        assert_eq!(
            out[..28],
            [
                0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0,
                2, 0
            ]
        );
        assert_eq!(request.encode(true, &mut out), 32);
        assert_eq!(u32_at(&out, 0), EXTENDED_REQUEST_MAGIC);
        assert_eq!((u16_at(&out, 4), u16_at(&out, 6)), (CMD_FUA | CMD_PAYLOAD_LEN, CMD_WRITE));
        assert_eq!(u64_at(&out, 24), 512);
    }

    #[test]
    fn errors_are_numbers_of_linux() {
        for (error, number) in [(1, 1), (5, 5), (28, 28), (95, 95), (22, 22), (7777, 22), (0x8000_0005, 22)] {
            assert_eq!(errno(error), -number);
        }
    }

    #[test]
    fn texts_of_a_server_are_short_and_printable() {
        assert_eq!(shown(b"disk \x1b[31mfull\n"), "disk [31mfull");
        assert_eq!(shown(&[b'a'; 1000]).len(), 200);
        assert_eq!(shown(&[0xff, b'a']), "\u{fffd}a");
    }
}
