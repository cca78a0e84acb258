//! A driver from before virtio 1.0: without MRG_RXBUF its header has 10 bytes.
use super::rig::{Card, DATA, frame};
use crate::net::LinkEnd;
use crate::rig::segment;
use paravane_spec::feature;
use paravane_spec::net::{F_MRG_RXBUF, HDR_F_NEEDS_CSUM};

const SHORT: usize = 10;
const ROOM: u64 = DATA + 0x10_0000;
const FRAME: u64 = DATA + 0x1000;

/// Sends frames to an echo, and checks what comes back behind a header of `header` bytes.
fn comes_back(refused: u64, header: usize) {
    let mut card = Card::without(LinkEnd::echo(1).unwrap(), refused);
    for in_pieces in [false, true] {
        let sent = frame(100, 3);
        // What lies behind the header is the frame.
        card.poke(DATA, &[vec![0; header], sent.clone()].concat());
        card.poke(FRAME, &sent);
        card.poke(ROOM, &[0xee; 300]);
        let (readable, writable) = match in_pieces {
            false => (vec![segment(DATA, header + 100)], vec![segment(ROOM, 300)]),
            // Legacy drivers give the header a descriptor of its own.
            true => (
                vec![segment(DATA, header), segment(FRAME, 100)],
                vec![segment(ROOM, header), segment(ROOM + header as u64, 200)],
            ),
        };
        card.add(0, &[], &writable);
        card.add(1, &readable, &[]);
        assert_eq!(card.settle(1).len(), 1);
        let used = card.settle(0);
        assert_eq!(used.iter().map(|used| used.len as usize).collect::<Vec<_>>(), [header + 100]);
        let got = card.peek(ROOM, header + 101);
        assert!(got[..SHORT].iter().all(|byte| *byte == 0), "{got:x?}");
        assert_eq!(got[header..header + 100], [&sent[6..12], &sent[..6], &sent[12..]].concat());
        assert_eq!(got[header + 100], 0xee);
    }
    assert_eq!((card.totals().transmitted, card.totals().received), (2, 2));
    // The header counts: it asks for a checksum beyond the frame.
    card.poke(DATA, &[HDR_F_NEEDS_CSUM, 0, 0, 0, 0, 0, 0xff, 0, 0, 0]);
    card.add(1, &[segment(DATA, header + 100)], &[]);
    assert_eq!(card.settle(1).len(), 1);
    assert_eq!(card.totals().malformed, 1);
    // Less than the shortest frame.
    card.add(1, &[segment(DATA, header + 13)], &[]);
    assert_eq!(card.settle(1).len(), 1);
    assert_eq!(card.totals().malformed, 2);
}

#[test]
fn its_header_is_short() {
    comes_back(feature::VERSION_1 | F_MRG_RXBUF, SHORT);
}

#[test]
fn its_header_is_whole_with_mergeable_buffers() {
    comes_back(feature::VERSION_1, 12);
    comes_back(F_MRG_RXBUF, 12);
}
