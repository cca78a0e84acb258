//! Replies of a hostile NBD server.
//!
//! Input: layout, bytes that come at a time, then what the server sends.
use paravane_store::nbd::{Asked, Event, Expected, Owed, ReplyDecoder, ReplyStyle};
use std::collections::BTreeMap;

/// Requests in flight: cookie, what is asked for, offset, length.
const REQUESTS: [(u64, Asked, u64, u64); 4] = [
    (1, Asked::Bytes, 4096, 64),
    (2, Asked::Done, 0, 512),
    (3, Asked::Extents { context: 5 }, 0, 65536),
    (4, Asked::Bytes, 0, 9000),
];

/// Requests in flight, and the bytes of each that have come.
struct Table {
    requests: BTreeMap<u64, Expected>,
    bytes: BTreeMap<u64, Vec<bool>>,
}

impl Owed for Table {
    fn owed(&mut self, cookie: u64) -> Option<&mut Expected> {
        self.requests.get_mut(&cookie)
    }
}

impl Table {
    /// Bytes of a read come.
    fn cover(&mut self, cookie: u64, at: u64, len: u64) {
        let bytes = self.bytes.get_mut(&cookie).expect("a read in flight");
        for byte in &mut bytes[at as usize..(at + len) as usize] {
            assert!(!*byte, "a byte comes twice");
            *byte = true;
        }
    }
}

/// Runs one input.
pub fn nbd_reply(data: &[u8]) {
    let [style, part, stream @ ..] = data else { return };
    let style = match style % 3 {
        0 => ReplyStyle::Simple,
        1 => ReplyStyle::Structured,
        _ => ReplyStyle::Extended,
    };
    let part = usize::from(*part) + 1;
    let mut table = Table { requests: BTreeMap::new(), bytes: BTreeMap::new() };
    for (cookie, asked, offset, len) in REQUESTS {
        table.requests.insert(cookie, Expected::new(asked, offset, len));
        if asked == Asked::Bytes {
            table.bytes.insert(cookie, vec![false; len as usize]);
        }
    }
    let mut decoder = ReplyDecoder::new(style);
    let (mut start, mut end) = (0, 0);
    // Each step uses a byte, gets some, or ends a request.
    for _ in 0..2 * stream.len() + 16 {
        assert!(end - start < ReplyDecoder::WINDOW + part, "it waits for more than a window");
        let Ok((used, event)) = decoder.next(&stream[start..end], &mut table) else { return };
        assert!(used <= end - start);
        start += used;
        let more = match event {
            Event::More => true,
            Event::Payload { cookie, at, len } => {
                let have = len.min((end - start) as u64);
                table.cover(cookie, at, have);
                decoder.took(have);
                start += have as usize;
                have == 0
            }
            Event::Zeroes { cookie, at, len } => {
                table.cover(cookie, at, len);
                false
            }
            Event::Extent { cookie, len, .. } => {
                assert!(cookie == 3 && len > 0);
                false
            }
            Event::Message { start: from, len, .. } => {
                assert!(from + len <= used);
                false
            }
            Event::End { cookie, error } => {
                table.requests.remove(&cookie).expect("a request in flight");
                let bytes = table.bytes.remove(&cookie).unwrap_or_default();
                assert!(error != 0 || bytes.iter().all(|byte| *byte), "bytes are missing");
                false
            }
        };
        if more {
            if end == stream.len() {
                return;
            }
            end = (end + part).min(stream.len());
        }
    }
    panic!("it does not come to rest");
}
