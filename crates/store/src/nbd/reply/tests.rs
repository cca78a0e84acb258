//! Valid streams, cut anywhere; bytes of all kinds.
use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Default)]
struct Table(BTreeMap<u64, Expected>);

impl Owed for Table {
    fn owed(&mut self, cookie: u64) -> Option<&mut Expected> {
        self.0.get_mut(&cookie)
    }
}

fn chunk(style: ReplyStyle, cookie: u64, offset: u64, done: bool, kind: u16, body: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    let extended = style == ReplyStyle::Extended;
    let magic = if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
    message.extend(magic.to_be_bytes());
    message.extend(u16::from(done).to_be_bytes());
    message.extend(kind.to_be_bytes());
    message.extend(cookie.to_be_bytes());
    if extended {
        message.extend(offset.to_be_bytes());
        message.extend((body.len() as u64).to_be_bytes());
    } else {
        message.extend((body.len() as u32).to_be_bytes());
    }
    message.extend(body);
    message
}

/// Data of reads, and results, by cookie.
type Decoded = (BTreeMap<u64, Vec<u8>>, BTreeMap<u64, u32>);

/// Decodes a stream that comes in parts. Returns the data of reads, and results.
fn decode(
    style: ReplyStyle,
    table: &mut Table,
    stream: &[u8],
    parts: &[usize],
) -> Result<Decoded, ReplyError> {
    let (mut data, mut results) = (BTreeMap::new(), BTreeMap::new());
    let mut decoder = ReplyDecoder::new(style);
    let (mut start, mut end) = (0, 0);
    let mut parts = parts.iter().cycle();
    loop {
        let (used, event) = decoder.next(&stream[start..end], table)?;
        start += used;
        match event {
            Event::More if end == stream.len() => return Ok((data, results)),
            Event::More => end = (end + parts.next().unwrap()).min(stream.len()),
            Event::Payload { cookie, at, len } => {
                let have = (end - start).min(len as usize);
                if have == 0 {
                    if end == stream.len() {
                        return Ok((data, results));
                    }
                    end = (end + parts.next().unwrap()).min(stream.len());
                    continue;
                }
                let whole = table.0[&cookie].len as usize;
                let read = data.entry(cookie).or_insert_with(|| vec![0xee; whole]);
                read[at as usize..at as usize + have].copy_from_slice(&stream[start..start + have]);
                start += have;
                decoder.took(have as u64);
            }
            Event::Zeroes { cookie, at, len } => {
                let whole = table.0[&cookie].len as usize;
                let read = data.entry(cookie).or_insert_with(|| vec![0xee; whole]);
                read[at as usize..(at + len) as usize].fill(0);
            }
            Event::Extent { cookie, len, flags } => {
                data.entry(cookie).or_default().extend([len as u8, flags as u8]);
            }
            Event::Message { start: from, len, .. } => assert!(from + len <= used),
            Event::End { cookie, error } => {
                table.0.remove(&cookie);
                assert_eq!(results.insert(cookie, error), None, "answered twice");
            }
        }
    }
}

fn styles() -> impl Strategy<Value = ReplyStyle> {
    prop_oneof![Just(ReplyStyle::Simple), Just(ReplyStyle::Structured), Just(ReplyStyle::Extended)]
}

proptest! {
    #[test]
    fn a_valid_stream_is_decoded_however_it_comes(
        style in styles(),
        reads in prop::collection::vec((1_usize..200, 1_usize..50, any::<bool>()), 1..12),
        parts in prop::collection::vec(1_usize..120, 1..10),
        order in any::<u64>(),
    ) {
        let (mut table, mut stream) = (Table::default(), Vec::new());
        let mut queues = Vec::new();
        for (number, &(len, part, has_hole)) in reads.iter().enumerate() {
            let (cookie, offset) = (number as u64 * 7 + 1, number as u64 * 1000);
            table.0.insert(cookie, Expected::new(Asked::Bytes, offset, len as u64));
            let byte = |at: usize| (at * 3 + number) as u8;
            if style == ReplyStyle::Simple {
                let mut message = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
                message.extend(0_u32.to_be_bytes());
                message.extend(cookie.to_be_bytes());
                message.extend((0..len).map(byte));
                queues.push(vec![message]);
                continue;
            }
            let mut list: Vec<Vec<u8>> = (0..len).step_by(part).map(|start| {
                let end = (start + part).min(len);
                let at = (offset + start as u64).to_be_bytes();
                if has_hole && start == 0 {
                    let body = [&at[..], &(end as u32).to_be_bytes()].concat();
                    return chunk(style, cookie, offset, false, REPLY_OFFSET_HOLE, &body);
                }
                let body: Vec<u8> = at.into_iter().chain((start..end).map(byte)).collect();
                chunk(style, cookie, offset, false, REPLY_OFFSET_DATA, &body)
            }).collect();
            // In another order.
            let middle = (order % list.len() as u64) as usize;
            list.rotate_left(middle);
            list.push(chunk(style, cookie, offset, true, REPLY_NONE, &[]));
            list.reverse();
            queues.push(list);
        }
        // Chunks of all requests are mixed.
        let mut turn = order;
        while queues.iter().any(|queue| !queue.is_empty()) {
            turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let place = (turn >> 33) as usize % queues.len();
            stream.extend(queues[place].pop().unwrap_or_default());
        }
        let (data, results) = decode(style, &mut table, &stream, &parts).unwrap();
        prop_assert_eq!(results.len(), reads.len());
        for (number, &(len, part, has_hole)) in reads.iter().enumerate() {
            let cookie = number as u64 * 7 + 1;
            let mut expected: Vec<u8> = (0..len).map(|at| (at * 3 + number) as u8).collect();
            if has_hole && style != ReplyStyle::Simple {
                expected[..part.min(len)].fill(0);
            }
            prop_assert_eq!(&data[&cookie], &expected);
            prop_assert_eq!(results[&cookie], 0);
        }
    }

    #[test]
    fn any_bytes_are_an_error_or_need_more(
        style in styles(),
        mut bytes in prop::collection::vec(any::<u8>(), 0..400),
        has_magic in any::<bool>(),
        parts in prop::collection::vec(1_usize..60, 1..4),
    ) {
        let magic = match style {
            ReplyStyle::Simple => SIMPLE_REPLY_MAGIC,
            ReplyStyle::Structured => STRUCTURED_REPLY_MAGIC,
            ReplyStyle::Extended => EXTENDED_REPLY_MAGIC,
        };
        if has_magic && bytes.len() > 16 {
            bytes[..4].copy_from_slice(&magic.to_be_bytes());
            bytes[6] &= 0x81;
            bytes[7] &= 7;
            bytes[8..16].copy_from_slice(&1_u64.to_be_bytes());
        }
        let mut table = Table::default();
        table.0.insert(1, Expected::new(Asked::Bytes, 0, 100));
        table.0.insert(2, Expected::new(Asked::Done, 0, 100));
        table.0.insert(3, Expected::new(Asked::Extents { context: 0 }, 0, 100));
        let _ = decode(style, &mut table, &bytes, &parts);
    }
}

#[test]
fn extents_are_listed() {
    for (style, kind) in
        [(ReplyStyle::Structured, REPLY_BLOCK_STATUS), (ReplyStyle::Extended, REPLY_BLOCK_STATUS_EXT)]
    {
        let list = |context: u32, extents: &[(u64, u64)]| -> Vec<u8> {
            let mut body = context.to_be_bytes().to_vec();
            if style == ReplyStyle::Extended {
                body.extend((extents.len() as u32).to_be_bytes());
                body.extend(
                    extents.iter().flat_map(|(len, flags)| [len.to_be_bytes(), flags.to_be_bytes()].concat()),
                );
            } else {
                let narrow = |(len, flags): &(u64, u64)| {
                    [(*len as u32).to_be_bytes(), (*flags as u32).to_be_bytes()].concat()
                };
                body.extend(extents.iter().flat_map(narrow));
            }
            body
        };
        let run = |body: &[u8], extra: &[u8]| {
            let mut table = Table::default();
            table.0.insert(9, Expected::new(Asked::Extents { context: 4 }, 512, 100));
            let stream = [&chunk(style, 9, 512, extra.is_empty(), kind, body)[..], extra].concat();
            decode(style, &mut table, &stream, &[5])
        };
        let (data, results) = run(&list(4, &[(60, 0), (50, 3)]), &[]).unwrap();
        assert_eq!((data[&9].as_slice(), results[&9]), (&[60, 0, 50, 3][..], 0));
        assert!(matches!(run(&list(5, &[(1, 0)]), &[]), Err(ReplyError::Kind { .. })));
        assert!(matches!(run(&list(4, &[(0, 0)]), &[]), Err(ReplyError::Length { .. })));
        assert!(matches!(run(&list(4, &[]), &[]), Err(ReplyError::Length { .. })));
        assert!(matches!(run(&list(4, &[(1, 0)])[..9], &[]), Err(ReplyError::Length { .. })));
        let again = chunk(style, 9, 512, true, kind, &list(4, &[(1, 0)]));
        assert!(matches!(run(&list(4, &[(1, 0)]), &again), Err(ReplyError::Kind { .. })));
        let none = chunk(style, 9, 512, true, REPLY_NONE, &[]);
        let mut table = Table::default();
        table.0.insert(9, Expected::new(Asked::Extents { context: 4 }, 512, 100));
        assert_eq!(decode(style, &mut table, &none, &[7]), Err(ReplyError::Short(9)));
    }
}
