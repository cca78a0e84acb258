use super::*;
use crate::message::message;
use paravane_spec::vhost_user::{flags, request};
use proptest::prelude::*;
use std::fs::File;

fn fd() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

fn state() -> ExportState {
    let say = |request, payload: &[u8]| message(request, flags::VERSION, payload);
    let session = SessionState {
        messages: vec![
            (say(request::SET_FEATURES, &[1; 8]), vec![]),
            (say(request::SET_VRING_KICK, &[0; 8]), vec![fd()]),
        ],
        region_times: vec![1, 2],
        failed: vec![(3, "descriptor loop".into())],
        config: vec![7; 60],
        pairs: 2,
        identity: Some(vec![4; 20]),
        own_inflight: Some((Inflight { size: 4096, queues: 2, queue_size: 64, ..Inflight::default() }, fd())),
    };
    let answer = PendingAnswer::Bytes(vec![9; 20]);
    ExportState {
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
    ExportState::decode(Handover { record, fds: std::iter::repeat_with(fd).take(fds).collect() })
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
    let read = ExportState::decode(state().encode().unwrap()).unwrap();
    let wanted = state();
    assert_eq!((read.sessions, read.endpoint.kind), (9, Kind::Listen));
    assert_eq!((read.endpoint.path, read.endpoint.file), (wanted.endpoint.path, wanted.endpoint.file));
    assert!(read.endpoint.listener.is_some());
    let (read, wanted) = (read.connection.unwrap(), wanted.connection.unwrap());
    assert_eq!((read.partial.0, read.partial.1.len()), (wanted.partial.0, 1));
    let messages = |session: &SessionState| -> Vec<(Vec<u8>, usize)> {
        session.messages.iter().map(|(bytes, fds)| (bytes.clone(), fds.len())).collect()
    };
    assert_eq!(messages(&read.session), messages(&wanted.session));
    assert_eq!(read.session.region_times, wanted.session.region_times);
    assert_eq!(read.session.failed, wanted.session.failed);
    assert_eq!(read.session.config, wanted.session.config);
    assert_eq!(read.session.pairs, 2);
    assert_eq!(read.session.identity.as_ref(), wanted.session.identity.as_ref());
    let layout = |session: &SessionState| session.own_inflight.as_ref().map(|(layout, _)| *layout);
    assert!(layout(&read.session).is_some());
    assert_eq!((layout(&read.session), read.pending), (layout(&wanted.session), wanted.pending));
}

/// Earlier versions read these bytes, and later ones have to.
#[test]
fn the_bytes_of_a_record_stay() {
    let section = |tag: u32, fds: u32, value: &[u8]| -> Vec<u8> {
        [&[tag, fds, value.len() as u32].map(u32::to_le_bytes).concat(), value].concat()
    };
    let endpoint =
        [&[0; 4][..], &9_u64.to_le_bytes(), &1_u64.to_le_bytes(), &[0xff; 8], b"/run/x.sock"].concat();
    let inflight = Inflight { size: 4096, queues: 2, queue_size: 64, ..Inflight::default() };
    let body = [
        section(1, 1, &endpoint),
        section(9, 0, b"image"),
        section(2, 2, &[5; 14]),
        section(3, 0, &[&[2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0][..], &[1; 8]].concat()),
        section(3, 1, &[&[12, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0][..], &[0; 8]].concat()),
        section(4, 0, &[1, 0, 0, 0, 2, 0, 0, 0]),
        section(5, 0, b"\x03\0\0\0descriptor loop"),
        section(6, 0, &[7; 60]),
        section(7, 0, &[2, 0, 0, 0]),
        section(8, 0, &[4; 20]),
        section(0x4000_0001, 1, inflight.as_bytes()),
        section(0x4000_0002, 0, &[&[2, 1, 0, 0, 12, 0, 0, 0][..], &[9; 20]].concat()),
    ]
    .concat();
    let length = (HEADER + body.len() + CHECKSUM) as u32;
    let mut record = [b"PRVHAND\n\x01\0\0\0", &length.to_le_bytes()[..], &body].concat();
    record.extend(checksum(&record).to_le_bytes());
    assert_eq!(bytes(), record);
}

#[test]
fn what_the_driver_knows_is_read_without_its_descriptors() {
    let record = bytes();
    let known = known_to_driver(&record).unwrap().unwrap();
    assert_eq!(known, KnownToDriver { config: vec![7; 60], features: u64::from_le_bytes([1; 8]) });
    let waiting = ExportState { connection: None, ..state() }.encode().unwrap();
    assert_eq!(waiting.known_to_driver().unwrap(), None);
    // Cut off, and changed, at any place.
    for at in 0..record.len() {
        known_to_driver(&record[..at]).unwrap_err();
        let mut changed = record.clone();
        changed[at] ^= 0xff;
        known_to_driver(&changed).unwrap_err();
        let _ = known_to_driver(&seal(changed));
    }
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
        assert_eq!(Pending::decode(&bytes).as_ref(), Some(&pending));
        assert_eq!(Pending::decode(&bytes[..7]), None);
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
        assert_eq!(Pending::decode(&bytes), None, "{bytes:?}");
    }
}

#[test]
fn a_section_that_must_be_known_is_not_skipped() {
    let mut record = bytes();
    let end = record.len() - CHECKSUM;
    let head = [tag::REQUIRED | 77, 0, 0].map(u32::to_le_bytes).concat();
    record.splice(end..end, head);
    let refused = decode(seal(record), FDS).unwrap_err();
    assert!(matches!(refused, HandoverError::Section(found) if found == tag::REQUIRED | 77), "{refused}");
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
    assert_eq!(read.connection.unwrap().session.messages.len(), 2);
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
    record.drain(HEADER + export..HEADER + export + connection);
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
            (prop_oneof![0_u32..10, tag::REQUIRED..tag::REQUIRED + 4], 0_u32..3, prop::collection::vec(any::<u8>(), 0..64)),
            0..12,
        ),
    ) {
        let mut writer = Writer { record: bytes()[..HEADER].to_vec(), fds: Vec::new() };
        for (tag, fds, value) in sections {
            writer.section(tag, &value, std::iter::repeat_with(fd).take(fds as usize));
        }
        let Writer { mut record, fds } = writer;
        record.extend([0; CHECKSUM]);
        let _ = ExportState::decode(Handover { record: seal(record), fds });
    }
}
