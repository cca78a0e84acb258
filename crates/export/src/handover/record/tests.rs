use super::*;
use crate::handover::frame::SECTION;
use crate::protocol::tests::{FRAMING, Letters};
use proptest::prelude::*;
use std::fs::File;

fn fd() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

fn state() -> ExportState {
    let section = |tag, value: &[u8], fds| Section { tag, value: value.to_vec(), fds };
    let session = vec![
        section(3, &[1; 20], vec![]),
        section(3, &[2; 20], vec![fd()]),
        section(6, &[7; 60], vec![]),
        section(REQUIRED | 1, &[4; 24], vec![fd()]),
    ];
    let answer = PendingAnswer::Bytes(vec![9; 20]);
    ExportState {
        protocol: Letters::NUMBER,
        endpoint: EndpointState {
            kind: Kind::Listen,
            path: b"/run/x.sock".to_vec(),
            file: (1, u64::MAX),
            listener: Some(fd()),
        },
        sessions: 9,
        connection: Some(ConnectionState {
            socket: fd(),
            partial: (vec![5; 14], vec![fd()]),
            session,
            pending: Some(Pending::Done { len: 12, answer, at_once: true }),
        }),
        note: b"image".to_vec(),
    }
}

/// Decodes bytes with as many descriptors.
fn decode(record: Vec<u8>, fds: usize) -> Result<ExportState, HandoverError> {
    let fds = std::iter::repeat_with(fd).take(fds).collect();
    ExportState::decode(Handover { record, fds }, &Letters)
}

/// Sets the length and the checksum of a record that was changed.
fn seal(mut record: Vec<u8>) -> Vec<u8> {
    record.truncate(record.len() - CHECKSUM);
    let length = ((record.len() + CHECKSUM) as u32).to_le_bytes();
    record[12..HEADER].copy_from_slice(&length);
    record.extend(checksum(&record).to_le_bytes());
    record
}

/// Number of descriptors of [`state`].
const FDS: usize = 5;

/// The bytes of [`state`], which names five descriptors.
fn bytes() -> Vec<u8> {
    let handover = state().encode().unwrap();
    assert_eq!(handover.fds.len(), FDS);
    handover.record
}

#[test]
fn a_record_is_read_as_it_was_written() {
    let read = ExportState::decode(state().encode().unwrap(), &Letters).unwrap();
    let wanted = state();
    assert_eq!((read.sessions, read.endpoint.kind), (9, Kind::Listen));
    assert_eq!((read.endpoint.path, read.endpoint.file), (wanted.endpoint.path, wanted.endpoint.file));
    assert!(read.endpoint.listener.is_some());
    let (read, wanted) = (read.connection.unwrap(), wanted.connection.unwrap());
    assert_eq!((read.partial.0, read.partial.1.len()), (wanted.partial.0, 1));
    let sections = |session: &[Section]| -> Vec<(u32, Vec<u8>, usize)> {
        session.iter().map(|Section { tag, value, fds }| (*tag, value.clone(), fds.len())).collect()
    };
    assert_eq!(sections(&read.session), sections(&wanted.session));
    assert_eq!(read.pending, wanted.pending);
}

#[test]
fn the_note_of_an_owner_is_read_without_descriptors() {
    let record = bytes();
    assert_eq!(note_of(&record).unwrap(), b"image");
    let without = ExportState { note: Vec::new(), ..state() }.encode().unwrap().record;
    assert_eq!(note_of(&without).unwrap(), b"");
    let long = ExportState { note: vec![1; MAX_NOTE + 1], ..state() }.encode().unwrap().record;
    assert_eq!(note_of(&long).unwrap().len(), MAX_NOTE);
    for at in 0..record.len() {
        note_of(&record[..at]).unwrap_err();
        let mut changed = record.clone();
        changed[at] ^= 0xff;
        let _ = note_of(&seal(changed));
    }
}

#[test]
fn what_is_pending_is_read_as_it_was_written() {
    let answers = [PendingAnswer::None, PendingAnswer::Bytes(vec![1; 20]), PendingAnswer::Again];
    let done = answers.into_iter().flat_map(|answer| {
        [true, false].map(|at_once| Pending::Done { len: 12, answer: answer.clone(), at_once })
    });
    for pending in std::iter::once(Pending::Begun).chain(done) {
        let bytes = pending.encode();
        assert_eq!(Pending::decode(&bytes, &FRAMING).as_ref(), Some(&pending));
        assert_eq!(Pending::decode(&bytes[..7], &FRAMING), None);
    }
    for bytes in [
        [0, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 12, 0, 0, 0],
        [1, 2, 0, 0, 12, 0, 0, 0],
        [1, 0, 0, 0, 11, 0, 0, 0],
        [1, 0, 1, 0, 12, 0, 0, 0],
        [4, 0, 0, 0, 12, 0, 0, 0],
        [3, 0, 0, 0, 0, 0, 1, 0],
    ] {
        assert_eq!(Pending::decode(&bytes, &FRAMING), None, "{bytes:?}");
    }
}

#[test]
fn a_section_that_must_be_known_is_not_skipped() {
    let mut record = bytes();
    let end = record.len() - CHECKSUM;
    let head = [REQUIRED | 77, 0, 0].map(u32::to_le_bytes).concat();
    record.splice(end..end, head);
    let refused = decode(seal(record), FDS).unwrap_err();
    assert!(matches!(refused, HandoverError::Section(found) if found == REQUIRED | 77), "{refused}");
}

#[test]
fn sections_of_a_later_version_are_skipped_with_their_descriptors() {
    let mut record = bytes();
    let end = record.len() - CHECKSUM;
    let first = SECTION + 28 + b"/run/x.sock".len();
    for at in [end, HEADER + first, HEADER] {
        let head = [0x8000_0001_u32, 1, 5].map(u32::to_le_bytes).concat();
        record.splice(at..at, head.into_iter().chain(*b"later"));
    }
    let read = decode(seal(record), FDS + 3).unwrap();
    assert_eq!(read.sessions, 9);
    assert_eq!(read.connection.unwrap().session.len(), 4);
}

#[test]
fn a_record_of_another_version_is_refused() {
    for version in [0, 2, u32::MAX] {
        let mut record = bytes();
        record[8..12].copy_from_slice(&version.to_le_bytes());
        let refused = decode(seal(record), FDS).unwrap_err();
        assert!(matches!(refused, HandoverError::Version(found) if found == version), "{refused}");
    }
}

#[test]
fn every_flipped_bit_is_detected() {
    let good = bytes();
    assert!(decode(good.clone(), FDS).is_ok());
    for bit in 0..good.len() * 8 {
        let mut record = good.clone();
        record[bit / 8] ^= 1 << (bit % 8);
        assert!(decode(record, FDS).is_err(), "bit {bit}");
    }
}

#[test]
fn every_truncation_and_wrong_number_of_descriptors_is_detected() {
    let good = bytes();
    for length in 0..good.len() {
        assert!(decode(good[..length].to_vec(), FDS).is_err(), "{length} bytes");
    }
    for fds in [0, 1, 2, 3, 4, 6] {
        let refused = decode(good.clone(), fds).unwrap_err();
        assert!(matches!(refused, HandoverError::Record(_)), "{fds} descriptors: {refused}");
    }
    // The checksum fits, so that the sections themselves are checked.
    let sections = HEADER..good.len() - CHECKSUM;
    let mut lengths = Vec::new();
    for end in sections.clone() {
        let mut record = good[..end].to_vec();
        record.extend([0; CHECKSUM]);
        if decode(seal(record), FDS).is_ok() {
            lengths.push(end);
        }
    }
    // Sections without descriptors at the end can be missing: they are whole.
    assert!(lengths.len() <= 5, "{lengths:?}");
}

#[test]
fn a_repeated_or_misplaced_section_is_refused() {
    let good = bytes();
    let export = SECTION + 28 + b"/run/x.sock".len();
    let copy = good[HEADER..HEADER + export].to_vec();
    let mut record = good.clone();
    record.splice(HEADER..HEADER, copy);
    assert!(decode(seal(record), FDS + 1).is_err(), "two endpoints");
    let mut record = good;
    let connection = SECTION + 14;
    let at = HEADER + export + SECTION + 4 + SECTION + b"image".len();
    record.drain(at..at + connection);
    assert!(decode(seal(record), FDS - 2).is_err(), "messages without a connection");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_sealed_record_panics(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        fds in 0_usize..8,
    ) {
        let mut record = bytes();
        let body = HEADER..record.len() - CHECKSUM;
        for (at, value) in changes {
            record[body.start + at.index(body.len())] = value;
        }
        let _ = decode(seal(record), fds);
    }

    #[test]
    fn no_sections_panic(
        sections in prop::collection::vec(
            (prop_oneof![0_u32..10, REQUIRED..REQUIRED + 4], 0_u32..3, prop::collection::vec(any::<u8>(), 0..64)),
            0..12,
        ),
    ) {
        let mut writer = Writer { record: bytes()[..HEADER].to_vec(), fds: Vec::new() };
        for (tag, fds, value) in sections {
            writer.section(tag, &value, std::iter::repeat_with(fd).take(fds as usize));
        }
        let Writer { mut record, fds } = writer;
        record.extend([0; CHECKSUM]);
        let _ = ExportState::decode(Handover { record: seal(record), fds }, &Letters);
    }
}
