use super::*;
use crate::message::message;
use paravane_export::Handover;
use paravane_spec::vhost_user::flags;
use proptest::prelude::*;
use std::os::fd::AsFd;

/// Sections as an export writes them, each with its number of descriptors.
#[derive(Default)]
struct Written(Vec<Section<()>>);

impl Sections for Written {
    fn push(&mut self, tag: u32, value: Vec<u8>, fds: &[BorrowedFd<'_>]) -> Result<(), HandoverError> {
        self.0.push(Section { tag, value, fds: vec![(); fds.len()] });
        Ok(())
    }
}

fn facts() -> Facts {
    Facts {
        region_times: vec![1, 2],
        failed: vec![(3, "descriptor loop".into())],
        config: vec![7; 60],
        pairs: 2,
        identity: Some(vec![4; 20]),
    }
}

fn inflight() -> Inflight {
    Inflight { size: 4096, queues: 2, queue_size: 64, ..Inflight::default() }
}

fn messages() -> [Vec<u8>; 2] {
    let say = |request, payload: &[u8]| message(request, flags::VERSION, payload);
    [say(request::SET_FEATURES, &[1; 8]), say(request::SET_VRING_KICK, &[0; 8])]
}

fn sections() -> Vec<Section<()>> {
    let file = std::fs::File::open("/dev/null").unwrap();
    let (mut written, [features, kick]) = (Written::default(), messages());
    write_message(&mut written, features, None).unwrap();
    write_message(&mut written, kick, Some(file.as_fd())).unwrap();
    facts().write(&mut written).unwrap();
    write_own_inflight(&mut written, inflight(), file.as_fd()).unwrap();
    written.0
}

fn section(tag: u32, fds: u32, value: &[u8]) -> Vec<u8> {
    [&[tag, fds, value.len() as u32].map(u32::to_le_bytes).concat(), value].concat()
}

/// A record with these bytes of sections.
fn record(body: &[u8]) -> Vec<u8> {
    let length = (16 + body.len() + 4) as u32;
    let mut record = [b"PRVHAND\n\x01\0\0\0", &length.to_le_bytes()[..], body].concat();
    record.extend(crc32fast::hash(&record).to_le_bytes());
    record
}

fn known(record: Vec<u8>) -> Result<Option<KnownToDriver>, HandoverError> {
    KnownToDriver::recorded(&Handover { record, fds: Vec::new() })
}

/// Earlier versions read these bytes, and later ones have to.
#[test]
fn the_bytes_of_a_session_stay() {
    let bytes = |section_: &Section<()>| section(section_.tag, section_.fds.len() as u32, &section_.value);
    let written: Vec<u8> = sections().iter().flat_map(bytes).collect();
    let wanted = [
        section(3, 0, &[&[2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0][..], &[1; 8]].concat()),
        section(3, 1, &[&[12, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0][..], &[0; 8]].concat()),
        section(4, 0, &[1, 0, 0, 0, 2, 0, 0, 0]),
        section(5, 0, b"\x03\0\0\0descriptor loop"),
        section(6, 0, &[7; 60]),
        section(7, 0, &[2, 0, 0, 0]),
        section(8, 0, &[4; 20]),
        section(0x4000_0001, 1, inflight().as_bytes()),
    ];
    assert_eq!(written, wanted.concat());
}

#[test]
fn a_session_is_read_as_it_was_written() {
    let read = SavedSession::read(sections()).unwrap();
    let [features, kick] = messages();
    assert_eq!(read.messages, [(features, vec![]), (kick, vec![()])]);
    assert_eq!(read.facts, facts());
    assert_eq!(read.own_inflight.map(|(layout, ())| layout), Some(inflight()));
}

#[test]
fn what_the_driver_knows_is_read_without_its_descriptors() {
    let body = [
        section(1, 0, &[0; 28]),
        section(2, 1, &[]),
        section(3, 0, &messages()[0]),
        section(6, 0, &[7; 60]),
        section(0x4000_0001, 1, inflight().as_bytes()),
    ]
    .concat();
    let whole = record(&body);
    let wanted = KnownToDriver { config: vec![7; 60], features: u64::from_le_bytes([1; 8]) };
    assert_eq!(known(whole.clone()).unwrap(), Some(wanted));
    assert_eq!(known(record(&section(1, 0, &[0; 28]))).unwrap(), None);
    // Cut off, and changed, at any place.
    for at in 0..whole.len() {
        known(whole[..at].to_vec()).unwrap_err();
        let mut changed = whole.clone();
        changed[at] ^= 0xff;
        known(changed).unwrap_err();
    }
    for at in 0..body.len() {
        let mut changed = body.clone();
        changed[at] ^= 0xff;
        let _ = known(record(&changed));
    }
}

#[test]
fn a_repeated_or_unknown_section_is_refused() {
    for repeated in [4, 6, 7, 8, 0x4000_0001] {
        let twice = sections().into_iter().chain(sections().into_iter().filter(|one| one.tag == repeated));
        let refused = SavedSession::read(twice).unwrap_err();
        assert!(matches!(refused, HandoverError::Record(_)), "{repeated:#x}: {refused}");
    }
    let later = |tag| sections().into_iter().chain([Section { tag, value: vec![1], fds: vec![()] }]);
    assert!(SavedSession::read(later(99)).is_ok());
    let refused = SavedSession::read(later(REQUIRED | 77)).unwrap_err();
    assert!(matches!(refused, HandoverError::Section(found) if found == REQUIRED | 77), "{refused}");
}

#[test]
fn every_wrong_number_of_descriptors_is_detected() {
    for at in 0..sections().len() {
        let mut changed = sections();
        let is_message = changed[at].tag == tag::MESSAGE;
        let more = if is_message { MAX_FDS + 1 } else { 1 };
        changed[at].fds.extend(std::iter::repeat_n((), more));
        let refused = SavedSession::read(changed).unwrap_err();
        assert!(matches!(refused, HandoverError::Record(_)), "section {at}: {refused}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_sections_panic(
        sections in prop::collection::vec(
            (prop_oneof![0_u32..10, REQUIRED..REQUIRED + 4], 0_usize..12, prop::collection::vec(any::<u8>(), 0..64)),
            0..12,
        ),
    ) {
        let section = |(tag, fds, value)| Section { tag, value, fds: vec![(); fds] };
        let _ = SavedSession::read(sections.into_iter().map(section));
    }
}
