//! Clients that break the protocol are disconnected; the next one is served.
//!
//! [`crate::rings`] lists all cases.
use crate::driver::Random;
use crate::raw::{Ask, GPA, MEMORY, Machine, Raw, USER};
use crate::rig::{DISK, Rig};
use paravane_spec::feature;
use paravane_spec::vhost_user::{
    ConfigAccess, F_LOG_ALL, F_PROTOCOL_FEATURES, Header, INFLIGHT_SIZE, Inflight, LogArea, MemoryRegion,
    MemoryTable, SingleRegion, StateTransfer, VRING_NO_FD, VringAddr, VringState, flags, request,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use zerocopy::IntoBytes;

/// Steps that a client takes before it breaks the protocol.
#[derive(Clone, Copy, PartialEq)]
enum Stage {
    /// None.
    Fresh,
    /// Features accepted.
    Agreed,
    /// Its queue is live.
    Live,
}
use Stage::{Agreed, Fresh, Live};

/// One violation, and the text of its error.
struct Case {
    stage: Stage,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// Whether it closes its end then.
    hangs_up: bool,
    error: &'static str,
}

fn header(request: u32, flags: u32, size: u32) -> Vec<u8> {
    Header { request, flags, size }.as_bytes().to_vec()
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn memfd(size: u64) -> OwnedFd {
    named("malformed", size)
}

fn named(name: &str, size: u64) -> OwnedFd {
    let file = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, size).unwrap();
    file
}

fn events(count: usize) -> Vec<OwnedFd> {
    std::iter::repeat_with(event).take(count).collect()
}

fn bytes_then_hang_up(bytes: Vec<u8>, error: &'static str) -> Case {
    Case { stage: Fresh, bytes, fds: Vec::new(), hangs_up: true, error }
}

fn raw(stage: Stage, bytes: Vec<u8>, fds: Vec<OwnedFd>, error: &'static str) -> Case {
    Case { stage, bytes, fds, hangs_up: false, error }
}

fn say(stage: Stage, request: u32, payload: &[u8], fds: Vec<OwnedFd>, error: &'static str) -> Case {
    raw(stage, paravane_vhost::message::message(request, flags::VERSION, payload), fds, error)
}

/// Messages that are invalid in any state.
fn headers() -> Vec<Case> {
    let mut cases = vec![
        raw(Fresh, header(request::GET_FEATURES, 0, 0), vec![], "unsupported message version 0"),
        raw(Fresh, header(request::GET_FEATURES, 2, 0), vec![], "unsupported message version 2"),
        raw(Fresh, header(request::GET_FEATURES, 1 | 1 << 4, 0), vec![], "reserved bits"),
        raw(Fresh, header(request::GET_FEATURES, 1 | 1 << 31, 0), vec![], "reserved bits"),
        raw(Fresh, header(request::GET_FEATURES, 1 | flags::REPLY, 0), vec![], "unexpected reply"),
        raw(Fresh, header(request::GET_CONFIG, 1, 4097), vec![], "payload of 4097 bytes"),
        raw(Fresh, header(request::GET_CONFIG, 1, u32::MAX), vec![], "payload of 4294967295 bytes"),
        bytes_then_hang_up(header(request::SET_OWNER, 1, 0)[..5].to_vec(), "in the middle of a message"),
        bytes_then_hang_up(header(request::SET_FEATURES, 1, 8), "in the middle of a message"),
        bytes_then_hang_up([header(request::SET_FEATURES, 1, 8), vec![0; 7]].concat(), "in the middle"),
    ];
    for postcopy in [request::POSTCOPY_ADVISE, request::POSTCOPY_LISTEN, request::POSTCOPY_END] {
        cases.push(say(Agreed, postcopy, &[], vec![], "postcopy is not offered"));
    }
    for unknown in [0, 20, 23, 26, 27, 33, 35, 41, 44, 1000, u32::MAX] {
        cases.push(say(Agreed, unknown, &[], vec![], "unknown request"));
    }
    cases
}

/// Each request with one byte, or one descriptor, too few or too many.
fn shapes() -> Vec<Case> {
    let vring = size_of::<VringState>();
    let of: [(u32, usize, usize); 31] = [
        (request::GET_FEATURES, 0, 0),
        (request::SET_FEATURES, 8, 0),
        (request::SET_OWNER, 0, 0),
        (request::RESET_OWNER, 0, 0),
        (request::SET_LOG_BASE, size_of::<LogArea>(), 1),
        (request::SET_LOG_FD, 0, 1),
        (request::SET_VRING_NUM, vring, 0),
        (request::SET_VRING_ADDR, size_of::<VringAddr>(), 0),
        (request::SET_VRING_BASE, vring, 0),
        (request::GET_VRING_BASE, vring, 0),
        (request::SET_VRING_KICK, 8, 1),
        (request::SET_VRING_CALL, 8, 1),
        (request::SET_VRING_ERR, 8, 1),
        (request::GET_PROTOCOL_FEATURES, 0, 0),
        (request::SET_PROTOCOL_FEATURES, 8, 0),
        (request::GET_QUEUE_NUM, 0, 0),
        (request::SET_VRING_ENABLE, vring, 0),
        (request::SET_BACKEND_REQ_FD, 0, 1),
        (request::GET_CONFIG, size_of::<ConfigAccess>(), 0),
        (request::SET_CONFIG, size_of::<ConfigAccess>(), 0),
        (request::GET_INFLIGHT_FD, size_of::<Inflight>(), 0),
        (request::SET_INFLIGHT_FD, size_of::<Inflight>(), 1),
        (request::RESET_DEVICE, 0, 0),
        (request::GET_MAX_MEM_SLOTS, 0, 0),
        (request::ADD_MEM_REG, size_of::<SingleRegion>(), 1),
        (request::REM_MEM_REG, size_of::<SingleRegion>(), 0),
        (request::SET_STATUS, 8, 0),
        (request::GET_STATUS, 0, 0),
        (request::SET_DEVICE_STATE_FD, size_of::<StateTransfer>(), 1),
        (request::CHECK_DEVICE_STATE, 0, 0),
        (request::SET_MEM_TABLE, size_of::<MemoryTable>(), 0),
    ];
    let mut cases = Vec::new();
    for (request, size, fds) in of {
        let sized = |size: usize| say(Agreed, request, &vec![0; size], events(fds), "invalid payload");
        cases.push(sized(size + 1));
        if size > 0 {
            cases.push(sized(size - 1));
        }
        let with = |fds| say(Agreed, request, &vec![0; size], events(fds), "file descriptors, need");
        // Some clients send one with REM_MEM_REG, which is accepted.
        cases.push(with(if request == request::REM_MEM_REG { 2 } else { fds + 1 }));
        if fds > 0 {
            cases.push(with(fds - 1));
        }
    }
    cases.push(say(Agreed, request::SET_FEATURES, &[0; 8], events(9), "more than 8 file descriptors"));
    cases.push(say(Fresh, request::SET_MEM_TABLE, &[0; 264], events(60), "more than 8 file descriptors"));
    let nothing = VRING_NO_FD.as_bytes();
    cases.push(say(Agreed, request::SET_VRING_KICK, nothing, events(1), "file descriptors, need 0"));
    cases.push(say(Agreed, request::SET_VRING_KICK, (1_u64 << 9).as_bytes(), vec![], "invalid value"));
    cases.push(say(Agreed, request::SET_INFLIGHT_FD, &[0; INFLIGHT_SIZE + 1], events(1), "invalid payload"));
    cases
}

fn table(regions: &[MemoryRegion]) -> Vec<u8> {
    let table = MemoryTable { regions: regions.len() as u32, padding: 0 };
    [table.as_bytes(), regions.as_bytes()].concat()
}

fn memory() -> Vec<Case> {
    let good = MemoryRegion { gpa: GPA, size: MEMORY, user: USER, offset: 0 };
    let one = |region: MemoryRegion, file: OwnedFd, error| {
        say(Agreed, request::SET_MEM_TABLE, &table(&[region]), vec![file], error)
    };
    let two = |other: MemoryRegion, error| {
        let files = vec![memfd(MEMORY), memfd(MEMORY)];
        say(Agreed, request::SET_MEM_TABLE, &table(&[good, other]), files, error)
    };
    let slot = |request, region: MemoryRegion, files, error| {
        say(Live, request, SingleRegion { padding: 0, region }.as_bytes(), files, error)
    };
    let (file, pipe) = (|| memfd(MEMORY), || OwnedFd::from(std::io::pipe().unwrap().0));
    let counted = |count: u32, room: usize| [&count.to_ne_bytes()[..], &[0; 4], &vec![0; room * 32]].concat();
    let size = MEMORY;
    vec![
        one(MemoryRegion { size: 0, ..good }, file(), "is empty"),
        one(MemoryRegion { gpa: u64::MAX - 4095, ..good }, file(), "wraps around"),
        one(MemoryRegion { user: u64::MAX - 4095, ..good }, file(), "wraps around"),
        one(MemoryRegion { offset: u64::MAX - 4095, ..good }, file(), "wraps around"),
        one(MemoryRegion { size: u64::MAX, gpa: 0, user: 0, offset: 0 }, file(), "guest memory"),
        one(MemoryRegion { gpa: GPA + 1, ..good }, file(), "multiples of 4096"),
        one(MemoryRegion { offset: 100, size: 4096, ..good }, file(), "multiples of 4096"),
        one(MemoryRegion { size: size + 1, ..good }, file(), "its file has"),
        one(MemoryRegion { offset: size, ..good }, file(), "its file has"),
        one(good, memfd(0), "its file has"),
        one(good, pipe(), "guest memory"),
        one(good, event(), "guest memory"),
        one(good, std::fs::File::open("/dev/zero").unwrap().into(), "tmpfs or hugetlbfs"),
        two(MemoryRegion { gpa: 0, ..good }, "overlap"),
        two(MemoryRegion { gpa: 0, user: USER + size - 1, ..good }, "overlap"),
        two(MemoryRegion { gpa: GPA + size - 4096, user: 0, ..good }, "overlap"),
        say(Agreed, request::SET_MEM_TABLE, &counted(9, 8), events(8), "invalid value"),
        say(Agreed, request::SET_MEM_TABLE, &counted(u32::MAX, 1), events(1), "invalid value"),
        say(Agreed, request::SET_MEM_TABLE, &counted(2, 1), events(2), "invalid payload"),
        say(Agreed, request::SET_MEM_TABLE, &counted(2, 2), events(1), "file descriptors, need 2"),
        say(Agreed, request::SET_MEM_TABLE, &counted(8, 9), events(8), "invalid payload"),
        slot(request::ADD_MEM_REG, good, vec![file()], "overlap"),
        slot(request::REM_MEM_REG, MemoryRegion { size: 4096, ..good }, vec![], "no region"),
        slot(request::REM_MEM_REG, MemoryRegion { gpa: 0, ..good }, vec![], "no region"),
    ]
}

fn queues() -> Vec<Case> {
    let mut cases = Vec::new();
    let state = |index: u32, num: u32| VringState { index, num };
    let vring =
        |stage, request, state: VringState, error| say(stage, request, state.as_bytes(), vec![], error);
    for index in [1, 255, 256, 65536, u32::MAX] {
        for request in [
            request::SET_VRING_NUM,
            request::SET_VRING_BASE,
            request::GET_VRING_BASE,
            request::SET_VRING_ENABLE,
        ] {
            cases.push(vring(Agreed, request, state(index, 1), "does not exist"));
        }
        let addr = VringAddr { index, ..VringAddr::default() };
        cases.push(say(Agreed, request::SET_VRING_ADDR, addr.as_bytes(), vec![], "does not exist"));
    }
    for request in [request::SET_VRING_KICK, request::SET_VRING_CALL, request::SET_VRING_ERR] {
        for index in [1_u64, 255] {
            cases.push(say(Agreed, request, index.as_bytes(), events(1), "does not exist"));
        }
        // Waiting for it, or writing to it, could block forever.
        cases.push(say(Agreed, request, 0_u64.as_bytes(), vec![memfd(4096)], "unusable file descriptor"));
    }
    for size in [0, 32769, 65536, 65792, u32::MAX] {
        cases.push(vring(Agreed, request::SET_VRING_NUM, state(0, size), "invalid size"));
    }
    cases.push(vring(Agreed, request::SET_VRING_ENABLE, state(0, 2), "invalid value 2"));
    let live = "while queue 0 is live";
    cases.push(vring(Live, request::SET_VRING_NUM, state(0, 128), live));
    cases.push(vring(Live, request::SET_VRING_BASE, state(0, 1), live));
    let moved =
        VringAddr { desc: USER, device: USER + 0x2000, driver: USER + 0x1000, ..VringAddr::default() };
    cases.push(say(Live, request::SET_VRING_ADDR, moved.as_bytes(), vec![], live));
    cases.push(say(Live, request::SET_FEATURES, F_PROTOCOL_FEATURES.as_bytes(), vec![], live));
    let inflight = Inflight { size: 4096, queues: 1, queue_size: 64, ..Inflight::default() };
    cases.push(say(Live, request::SET_INFLIGHT_FD, inflight.as_bytes(), vec![memfd(4096)], live));
    cases
}

fn others() -> Vec<Case> {
    let log = |size, offset, file| {
        let area = LogArea { size, offset };
        say(Agreed, request::SET_LOG_BASE, area.as_bytes(), vec![memfd(file)], "dirty log")
    };
    let inflight = |inflight: Inflight, file, error| {
        say(Agreed, request::SET_INFLIGHT_FD, inflight.as_bytes(), vec![memfd(file)], error)
    };
    let good = Inflight { size: 4096, queues: 1, queue_size: 64, ..Inflight::default() };
    let get = |wanted: Inflight| {
        say(Agreed, request::GET_INFLIGHT_FD, wanted.as_bytes(), vec![], "invalid number of queues")
    };
    let pipe = || OwnedFd::from(std::io::pipe().unwrap().1);
    vec![
        say(Fresh, request::SET_FEATURES, u64::MAX.as_bytes(), vec![], "not offered"),
        say(Fresh, request::SET_FEATURES, (1_u64 << 63).as_bytes(), vec![], "not offered"),
        // Features from 64 on do not fit in this message, and no other exists for them.
        say(Fresh, request::SET_FEATURES, &[0; 16], vec![], "request 2: invalid payload of 16 bytes"),
        say(Fresh, request::SET_FEATURES, feature::NOTIFICATION_DATA.as_bytes(), vec![], "not offered"),
        say(Fresh, request::SET_PROTOCOL_FEATURES, u64::MAX.as_bytes(), vec![], "not offered"),
        say(Fresh, request::SET_PROTOCOL_FEATURES, (1_u64 << 14).as_bytes(), vec![], "not offered"),
        say(Fresh, request::SET_DEVICE_STATE_FD, &[0; 8], events(1), "did not accept"),
        say(Agreed, request::SET_DEVICE_STATE_FD, 2_u64.as_bytes(), vec![pipe()], "direction 2"),
        say(Agreed, request::SET_DEVICE_STATE_FD, &[0; 8], events(1), "not a pipe"),
        say(Agreed, request::SET_BACKEND_REQ_FD, &[], events(1), "not an end of a pair"),
        say(Agreed, request::SET_VRING_CALL, &[0; 8], vec![memfd(8)], "neither an eventfd nor a pipe"),
        say(Live, request::SET_DEVICE_STATE_FD, &[0; 8], events(1), "while queue 0 is live"),
        say(Fresh, request::IOTLB_MSG, &[0; 32], vec![], "did not accept"),
        say(Fresh, request::RESET_DEVICE, &[], vec![], "did not accept"),
        // A disk has no MAC address to announce.
        say(Agreed, request::SEND_RARP, &[0; 8], vec![], "did not accept"),
        say(Agreed, request::SEND_RARP, &[0; 6], vec![], "request 19: invalid payload of 6 bytes"),
        say(Fresh, request::SET_STATUS, &[0; 8], vec![], "did not accept"),
        say(Fresh, request::SET_BACKEND_REQ_FD, &[], events(1), "did not accept"),
        say(Fresh, request::SET_LOG_BASE, &[0; 16], events(1), "did not accept"),
        say(Fresh, request::GET_INFLIGHT_FD, &[0; 24], vec![], "did not accept"),
        say(Fresh, request::SET_INFLIGHT_FD, &[0; 24], events(1), "did not accept"),
        say(Agreed, request::SET_STATUS, 256_u64.as_bytes(), vec![], "invalid device status"),
        log(4096, 0, 4095),
        log(4096, 4096, 4096),
        log(8, 4, 4096),
        log(u64::MAX, 0, 4096),
        log(4096, u64::MAX - 7, 4096),
        inflight(Inflight { size: 0, ..good }, 4096, "guest memory"),
        inflight(Inflight { size: 8192, ..good }, 4096, "guest memory"),
        inflight(Inflight { size: u64::MAX, ..good }, 4096, "guest memory"),
        inflight(Inflight { offset: 8, ..good }, 8192, "guest memory"),
        get(Inflight { queues: 0, ..good }),
        get(Inflight { queues: 257, ..good }),
        get(Inflight { queue_size: 0, ..good }),
        get(Inflight { queue_size: 32769, ..good }),
    ]
}

/// A valid client, to check that the server still works.
fn a_good_one_works(rig: &Rig, model: &mut [u8]) {
    let mut machine = Machine::new(0, 64, 4);
    let raw = Raw::connect(&rig.socket());
    machine.attach(&raw, 0, false);
    machine.fill(DISK, &mut Random::new(3));
    machine.finish(model);
}

#[test]
fn a_client_that_breaks_the_protocol_is_disconnected() {
    let rig = Rig::new(1);
    let mut model = vec![0; DISK];
    let mut sessions = 0;
    let mut errors = 0;
    for Case { stage, bytes, fds, hangs_up, error } in
        [headers(), shapes(), memory(), queues(), others()].into_iter().flatten()
    {
        let mut machine = Machine::new(0, 64, 4);
        let raw = Raw::connect(&rig.socket());
        match stage {
            // Descriptors are accepted once a client is served.
            Fresh => drop(raw.ask_number(request::GET_FEATURES)),
            Agreed => {
                raw.begin(machine.features);
            }
            Live => machine.attach(&raw, 0, false),
        }
        let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        raw.send_bytes(&bytes, &borrowed).unwrap();
        if hangs_up {
            raw.socket.shutdown(Shutdown::Write).unwrap();
        }
        assert!(raw.is_closed(), "{error}: {bytes:x?}");
        sessions += 1;
        errors += 1;
        let status = rig.wait_for(|status| status.protocol_errors == errors);
        let said = status.last_error.unwrap();
        assert!(said.contains(error), "{bytes:x?} with {} descriptors: {said}", fds.len());
        assert_eq!(status.sessions, sessions);
        if errors % 32 == 0 {
            a_good_one_works(&rig, &mut model);
            sessions += 1;
        }
    }
    a_good_one_works(&rig, &mut model);
    assert!(errors > 150, "{errors}");
    // Nothing of this is left.
    rig.wait_for(|status| !status.connected);
    assert_eq!(rig.open_files("malformed"), 0);
}

/// A queue with one invalid setting at a time.
#[test]
fn a_queue_that_cannot_be_ends_the_session() {
    let rig = Rig::new(1);
    type Change = fn(&mut Machine, &mut VringAddr, &mut u32, &mut u32);
    // Ring indices; the used index means that the queue has been in use.
    fn indices(machine: &Machine, avail: u16, used: u16) {
        machine.set_bytes(machine.addresses.driver - GPA + 2, avail.to_le_bytes());
        machine.set_bytes(machine.addresses.device - GPA + 2, used.to_le_bytes());
    }
    let cases: [(u64, Change, &str); 20] = [
        (0, |_, addr, _, _| addr.desc += 8, "is not aligned"),
        (0, |_, addr, _, _| addr.driver += 1, "is not aligned"),
        (0, |_, addr, _, _| addr.device += 2, "is not aligned"),
        (feature::RING_PACKED, |_, addr, _, _| addr.device += 2, "is not aligned"),
        (0, |_, addr, _, _| addr.desc = 0, "is not in the client's memory"),
        (0, |_, addr, _, _| addr.driver = GPA, "is not in the client's memory"),
        (0, |_, addr, _, _| addr.device = u64::MAX - 3, "is not in the client's memory"),
        (0, |_, addr, _, _| addr.desc = USER + MEMORY - 16, "the descriptor area"),
        (0, |_, addr, _, _| addr.driver = USER + MEMORY - 2, "the driver area"),
        (0, |_, addr, _, _| addr.device = USER + MEMORY - 4, "the device area"),
        (0, |_, _, size, _| *size = 12, "not a power of two"),
        (0, |_, _, size, _| *size = 512, "not a power of two from 1 to 256"),
        (feature::RING_PACKED, |_, _, size, _| *size = 257, "is not from 1 to 256"),
        (0, |_, _, _, base| *base = 0x1_0000, "more than 16 bits"),
        (0, |_, _, _, base| *base = 7, "cannot resume the queue"),
        (0, |machine, _, _, _| indices(machine, 68, 3), "the driver's available index 68 is not within 64"),
        (
            0,
            |machine, _, _, _| {
                // A new in-flight region does not know what was in flight in a used ring.
                indices(machine, 5, 3);
                let said = Inflight { size: 4096, queues: 1, queue_size: 64, ..Inflight::default() };
                machine.inflight = Some((said, named("of a queue", 4096)));
            },
            "used position 0x3 and available position 0x0",
        ),
        (feature::RING_PACKED, |_, _, _, base| *base = 0x8000_8040, "outside a ring of 64"),
        (feature::RING_PACKED, |_, _, _, base| *base = 0x8000_8001, "do not fit 0 chains in flight"),
        (
            0,
            |machine, _, _, _| {
                let file = named("of a queue", 4096);
                // A region of a later version.
                rustix::io::pwrite(&file, &[9], 8).unwrap();
                let said = Inflight { size: 4096, queues: 1, queue_size: 64, ..Inflight::default() };
                machine.inflight = Some((said, file));
            },
            "the tracking region is corrupt",
        ),
    ];
    for (errors, (features, change, error)) in (1..).zip(cases) {
        let mut machine = Machine::new(features, 64, 4);
        let (mut addr, mut size, mut base) = (machine.vring_addr(), 64, machine.first_base());
        change(&mut machine, &mut addr, &mut size, &mut base);
        let raw = Raw::connect(&rig.socket());
        raw.begin(machine.features);
        if let Some((said, file)) = &machine.inflight {
            raw.say(request::SET_INFLIGHT_FD, said, &[file.as_fd()]);
        }
        raw.say(request::SET_MEM_TABLE, &*table(&[machine.region()]), &[machine.memory.fd().unwrap()]);
        let state = |num| VringState { index: 0, num };
        raw.say(request::SET_VRING_NUM, &state(size), &[]);
        raw.say(request::SET_VRING_BASE, &state(base), &[]);
        // Kicks before addresses are no error: there is nothing to serve yet.
        raw.say(request::SET_VRING_KICK, &0_u64, &[machine.kick.as_fd()]);
        raw.say(request::SET_VRING_ENABLE, &state(1), &[]);
        raw.send(request::SET_VRING_ADDR, addr.as_bytes(), &[]).unwrap();
        // It waits for an acknowledgement, and gets a negative one.
        let (_, reply, _) = raw.receive().unwrap();
        assert_eq!(reply, 1_u64.as_bytes(), "{error}");
        assert!(raw.is_closed());
        let status = rig.wait_for(|status| status.protocol_errors == errors);
        assert!(status.last_error.as_ref().unwrap().contains(error), "{status:?}, not {error}");
    }
    a_good_one_works(&rig, &mut vec![0; DISK]);
}

/// A ring must be contiguous.
#[test]
fn a_ring_over_two_regions_ends_the_session() {
    let rig = Rig::new(1);
    let machine = Machine::new(0, 64, 4);
    let raw = Raw::connect(&rig.socket());
    raw.begin(machine.features);
    let first = MemoryRegion { size: 4096, ..machine.region() };
    let MemoryRegion { gpa, user, size, .. } = machine.region();
    let second = MemoryRegion { gpa: gpa + 4096, user: user + 4096, size: size - 4096, offset: 4096 };
    let fds = [machine.memory.fd().unwrap(), machine.memory.fd().unwrap()];
    raw.say(request::SET_MEM_TABLE, &*table(&[first, second]), &fds);
    let state = |num| VringState { index: 0, num };
    raw.say(request::SET_VRING_NUM, &state(64), &[]);
    raw.say(request::SET_VRING_KICK, &0_u64, &[machine.kick.as_fd()]);
    raw.say(request::SET_VRING_ENABLE, &state(1), &[]);
    let addr = VringAddr { desc: USER + 4096 - 512, ..machine.vring_addr() };
    raw.send(request::SET_VRING_ADDR, addr.as_bytes(), &[]).unwrap();
    assert!(raw.is_closed());
    let status = rig.wait_for(|status| status.protocol_errors == 1);
    assert!(status.last_error.as_ref().unwrap().contains("the descriptor area"), "{status:?}");
    a_good_one_works(&rig, &mut vec![0; DISK]);
}

/// Files that shrink while a queue uses them fail that session and nothing else.
#[test]
fn memory_that_is_taken_away_ends_the_session() {
    let rig = Rig::new(1);
    // The memory of a request's data; of the ring; the in-flight region; the log.
    for (errors, part) in (1..).zip(["data", "ring", "inflight", "log"]) {
        let mut machine = Machine::new(0, 64, 4);
        let raw = Raw::connect(&rig.socket());
        let file = named("of a queue", MEMORY);
        match part {
            "ring" => {
                raw.begin(machine.features);
                machine.share_as(&raw, file.as_fd());
                machine.start(&raw, 0);
            }
            "inflight" => {
                let said = Inflight { size: 8192, queues: 1, queue_size: 64, ..Inflight::default() };
                machine.inflight = Some((said, file.try_clone().unwrap()));
                machine.attach(&raw, 0, true);
            }
            _ => machine.attach(&raw, 0, false),
        }
        let region = MemoryRegion { gpa: 0x10_0000, size: MEMORY, user: 0x1000, offset: 0 };
        if part == "data" {
            raw.say(request::ADD_MEM_REG, &SingleRegion { padding: 0, region }, &[file.as_fd()]);
        } else if part == "log" {
            let area = LogArea { size: MEMORY, offset: 0 };
            raw.send(request::SET_LOG_BASE, area.as_bytes(), &[file.as_fd()]).unwrap();
            assert_eq!(raw.receive().unwrap().0.request, request::SET_LOG_BASE);
            let logged = machine.features | F_PROTOCOL_FEATURES | F_LOG_ALL;
            raw.say(request::SET_FEATURES, &logged, &[]);
        }
        ftruncate(&file, 0).unwrap();
        if part == "data" {
            // A request with a readable header.
            let segment = |addr, len| paravane_ring::Segment { addr, len };
            machine.queue.add(&[segment(0x10_0000, 16)], &[segment(GPA + Machine::slot(0), 513)]).unwrap();
        } else {
            machine.ask(0, Ask::Read, 0, 512);
        }
        machine.kick();
        assert!(raw.is_closed(), "{part}");
        let status = rig.wait_for(|status| status.protocol_errors == errors);
        assert!(status.last_error.unwrap().contains("is lost"), "{part}");
        a_good_one_works(&rig, &mut vec![0; DISK]);
        rig.wait_for(|status| !status.connected);
    }
}

/// The in-flight region has arbitrary contents: a queue accepts or refuses it.
#[test]
fn in_flight_memory_may_hold_anything() {
    let rig = Rig::new(1);
    let mut random = Random::new(71);
    let (mut refused, mut taken) = (0, 0);
    for round in 0..120 {
        let features = if round % 2 == 0 { 0 } else { feature::RING_PACKED };
        let mut machine = Machine::new(features, 64, 4);
        let file = named("of a queue", 8192);
        let mut bytes: Vec<u8> = (0..8192).map(|_| random.below(256) as u8).collect();
        // No features, version 1, of a queue of 64; then random bytes, mostly zeroes, or almost
        // only zeroes.
        bytes[..12].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 64, 0]);
        let noise = [1, 64, 4096][round / 2 % 3];
        bytes[12..].iter_mut().filter(|_| random.below(noise) != 0).for_each(|byte| *byte = 0);
        rustix::io::pwrite(&file, &bytes, 0).unwrap();
        let said = Inflight { size: 8192, queues: 1, queue_size: 64, ..Inflight::default() };
        machine.inflight = Some((said, file));
        let raw = Raw::connect(&rig.socket());
        let errors = rig.status().protocol_errors;
        let base = machine.first_base();
        raw.begin(machine.features);
        let (said, file) = machine.inflight.as_ref().unwrap();
        raw.say(request::SET_INFLIGHT_FD, said, &[file.as_fd()]);
        machine.share(&raw);
        let state = |num| VringState { index: 0, num };
        raw.say(request::SET_VRING_NUM, &state(64), &[]);
        raw.say(request::SET_VRING_BASE, &state(base), &[]);
        raw.say(request::SET_VRING_ADDR, &machine.vring_addr(), &[]);
        raw.say(request::SET_VRING_KICK, &0_u64, &[machine.kick.as_fd()]);
        raw.send(request::SET_VRING_ENABLE, state(1).as_bytes(), &[]).unwrap();
        let (_, reply, _) = raw.receive().unwrap();
        if reply == 0_u64.as_bytes() {
            // The chains that it marks as in flight are examined; none of them is a request.
            taken += 1;
            raw.ask(request::GET_VRING_BASE, state(0).as_bytes());
            drop(raw);
            rig.wait_for(|status| !status.connected);
            assert_eq!(rig.status().protocol_errors, errors);
        } else {
            refused += 1;
            assert!(raw.is_closed());
            let status = rig.wait_for(|status| status.protocol_errors == errors + 1);
            let said = status.last_error.unwrap();
            assert!(
                said.contains("corrupt") || said.contains("in flight") || said.contains("position"),
                "{said}"
            );
        }
    }
    assert!(refused > 20 && taken > 5, "{refused} refused, {taken} taken");
    a_good_one_works(&rig, &mut vec![0; DISK]);
    // A queue for which it is too small.
    for (said, size) in
        [(Inflight { queues: 1, queue_size: 1, ..Inflight::default() }, 256), (Inflight::default(), 256)]
    {
        let said = Inflight { size: 4096, ..said };
        let errors = rig.status().protocol_errors;
        let machine = Machine::new(0, size, 4);
        let raw = Raw::connect(&rig.socket());
        raw.begin(machine.features);
        raw.say(request::SET_INFLIGHT_FD, &said, &[named("of a queue", 4096).as_fd()]);
        machine.share(&raw);
        raw.say(request::SET_VRING_NUM, &VringState { index: 0, num: size.into() }, &[]);
        raw.say(request::SET_VRING_ADDR, &machine.vring_addr(), &[]);
        raw.say(request::SET_VRING_KICK, &0_u64, &[machine.kick.as_fd()]);
        raw.send(request::SET_VRING_ENABLE, VringState { index: 0, num: 1 }.as_bytes(), &[]).unwrap();
        assert!(raw.is_closed());
        let status = rig.wait_for(|status| status.protocol_errors == errors + 1);
        assert!(status.last_error.unwrap().contains("too small for this queue"));
    }
    a_good_one_works(&rig, &mut vec![0; DISK]);
}

/// Replaced descriptors are closed, and unexpected ones refused.
#[test]
fn descriptors_in_floods_are_let_go() {
    const FLOOD: usize = 300;
    let rig = Rig::new(1);
    let mut machine = Machine::new(0, 64, 4);
    let raw = Raw::connect(&rig.socket());
    machine.attach(&raw, 0, false);
    let (reader, writer) = std::io::pipe().unwrap();
    let (_ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let inode = |fd: BorrowedFd<'_>| format!(":[{}]", rustix::fs::fstat(fd).unwrap().st_ino);
    let inodes = [inode(reader.as_fd()), inode(theirs.as_fd())];
    for _ in 0..FLOOD {
        raw.say(request::SET_VRING_KICK, &0_u64, &[reader.as_fd()]);
        raw.say(request::SET_VRING_CALL, &0_u64, &[writer.as_fd()]);
        raw.say(request::SET_VRING_ERR, &0_u64, &[writer.as_fd()]);
        raw.say(request::SET_LOG_FD, &[0_u8; 0], &[writer.as_fd()]);
        raw.say(request::SET_BACKEND_REQ_FD, &[0_u8; 0], &[theirs.as_fd()]);
    }
    drop((reader, writer, theirs));
    let open: usize = inodes.iter().map(|inode| rig.open_files(inode)).sum();
    assert!(open <= 8, "{open} of {FLOOD} are left");
    raw.say(request::SET_VRING_ENABLE, &VringState::default(), &[]);
    for _ in 0..FLOOD / 3 {
        let (log, inflight, memory) = (named("flood", MEMORY), named("flood", 8192), named("flood", MEMORY));
        let area = LogArea { size: MEMORY, offset: 0 };
        raw.send(request::SET_LOG_BASE, area.as_bytes(), &[log.as_fd()]).unwrap();
        raw.receive().unwrap();
        let said = Inflight { size: 8192, queues: 1, queue_size: 64, ..Inflight::default() };
        raw.say(request::SET_INFLIGHT_FD, &said, &[inflight.as_fd()]);
        let other = MemoryRegion { gpa: 0, size: MEMORY, user: 0x1000, offset: 0 };
        let regions = table(&[other, machine.region()]);
        raw.say(request::SET_MEM_TABLE, &*regions, &[memory.as_fd(), machine.memory.fd().unwrap()]);
    }
    let open = rig.open_files("flood");
    assert!(open <= 8, "{open} of {FLOOD} are left");
    machine.share(&raw);
    // A region in each slot, and one more.
    let mut regions = 1;
    let last = loop {
        let region = MemoryRegion { gpa: regions << 40, size: 4096, user: regions << 12, offset: 0 };
        let region = SingleRegion { padding: 0, region };
        raw.send(request::ADD_MEM_REG, region.as_bytes(), &[named("flood", 4096).as_fd()]).unwrap();
        let (_, reply, _) = raw.receive().unwrap();
        if reply != 0_u64.as_bytes() {
            break regions;
        }
        regions += 1;
    };
    assert_eq!(last, 64);
    assert!(raw.is_closed());
    rig.wait_for(|status| status.protocol_errors == 1 && !status.connected);
    assert_eq!(rig.open_files("flood"), 0);
    a_good_one_works(&rig, &mut vec![0; DISK]);
}

/// Memory that is removed while a queue's ring is in it, and returns.
#[test]
fn a_queue_rests_while_its_memory_is_away() {
    let rig = Rig::new(1);
    let mut model = vec![0; DISK];
    let mut random = Random::new(21);
    let mut machine = Machine::new(0, 64, 8);
    let raw = Raw::connect(&rig.socket());
    machine.attach(&raw, 0, false);
    for _ in 0..20 {
        machine.fill(DISK, &mut random);
        let region = SingleRegion { padding: 0, region: machine.region() };
        raw.say(request::REM_MEM_REG, &region, &[]);
        assert!(!rig.status().queues[0].live);
        raw.say(request::ADD_MEM_REG, &region, &[machine.memory.fd().unwrap()]);
        assert!(rig.status().queues[0].live);
        // A region that is added twice must be removed twice.
        raw.say(request::ADD_MEM_REG, &region, &[machine.memory.fd().unwrap()]);
        raw.say(request::REM_MEM_REG, &region, &[]);
        assert!(rig.status().queues[0].live);
        machine.finish(&mut model);
        // The same table again changes nothing, nor does a second region.
        raw.say(request::SET_MEM_TABLE, &*table(&[machine.region()]), &[machine.memory.fd().unwrap()]);
        let other = MemoryRegion { gpa: 0, size: MEMORY, user: 0x1000, offset: 0 };
        let regions = table(&[other, machine.region()]);
        raw.say(
            request::SET_MEM_TABLE,
            &*regions,
            &[named("of a queue", MEMORY).as_fd(), machine.memory.fd().unwrap()],
        );
        machine.fill(DISK, &mut random);
        // A table without the memory of the ring.
        raw.say(request::SET_MEM_TABLE, &*table(&[other]), &[named("of a queue", MEMORY).as_fd()]);
        assert!(!rig.status().queues[0].live);
        machine.share(&raw);
        machine.finish(&mut model);
    }
    assert_eq!(rig.status().protocol_errors, 0);
}
