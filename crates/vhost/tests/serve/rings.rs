//! Rings and queues of hostile drivers: each stops at most its own queue.
//!
//! Together with `malformed` this is every input that a vhost-user device has to survive. Both run
//! against the library, in this process, and against `paravane serve` in its sandbox
//! (`crates/cli/tests/serve`):
//!
//! | input | test |
//! |---|---|
//! | a chain that loops, is too long, is chained outside its table | `a_split_ring_that_makes_no_sense_stops_its_queue`, `a_packed_...` |
//! | descriptors of length 0, of nearly 2^32 bytes, around the end of the address space, in holes, half in one | the same |
//! | a readable descriptor after a writable one; a request without header or status | the same |
//! | indirect tables: nested, chained, of no bytes, of half a descriptor, huge, outside memory, longer than the queue | the same |
//! | an available index that jumps, or goes back | the same |
//! | a head, or an identifier, that is in flight; identifiers beyond the queue | the same |
//! | flags of a packed descriptor that say it is used, or of another round | `descriptors_of_another_round_are_not_available` |
//! | a buffer over two regions, buffers that overlap, a header in pieces | `what_is_odd_and_allowed_is_served` |
//! | a buffer over the ring itself | `a_ring_may_be_overwritten_by_what_is_read` |
//! | all of it changed while it is read | `rings_that_change_while_they_are_read_end_at_most_their_session` |
//! | event indices one off, around the end of their range; event flags that mean nothing | `interrupts_come_where_they_were_asked_for` |
//! | a queue of 0 descriptors, of no power of two, too large; rings misaligned, unmapped, over two regions | `malformed::a_queue_that_cannot_be_ends_the_session` |
//! | a position that contradicts the ring, or none | `malformed::a_queue_that_cannot_be_ends_the_session`, `a_split_queue_goes_on_although_its_client_says_0` |
//! | size, base, addresses and features changed while a queue is live | `malformed::a_client_that_breaks_the_protocol_is_disconnected` |
//! | a reset, or a client's end, in the middle of requests; a queue enabled again after it broke | `requests_outlive_neither_a_reset_nor_their_client` |
//! | kicks without end, full eventfds, kicks before addresses | `a_storm_of_kicks_disturbs_no_other_queue`, `malformed::a_queue_that_cannot_be_ends_the_session` |
//! | writes to a disk that is only read | `a_disk_that_is_only_read_is_not_written` |
//! | messages of wrong size and version, with descriptors too many or missing, of queues that are not there | `malformed::a_client_that_breaks_the_protocol_is_disconnected` |
//! | descriptors in floods | `malformed::descriptors_in_floods_are_let_go` |
//! | in-flight memory, tables and logs of wrong sizes | `malformed::a_client_that_breaks_the_protocol_is_disconnected` |
//! | in-flight memory with anything in it | `malformed::in_flight_memory_may_hold_anything` |
//! | memory, in-flight memory and logs whose file is truncated | `malformed::memory_that_is_taken_away_ends_the_session`, `client::memory_that_is_taken_away_fails_one_device` |
//! | a table that takes away the memory of live queues, and regions removed while in use | `malformed::a_queue_rests_while_its_memory_is_away` |
//! | device state of another device | `frontend` |
//! | translations that mean nothing, of an IOMMU | `iotlb` |
//! | an image that names other files | `crates/cli/tests/serve/client.rs` |
//!
//! Ways in that a vhost-user device does not have: registers (DMA to them, queue selection), and
//! devices that lie to our drivers.
use crate::driver::Random;
use crate::raw::{Ask, DATA, GPA, MEMORY, Machine, Raw, STATUS, USER, put};
use crate::rig::{DISK, Rig};
use paravane_spec::blk;
use paravane_spec::feature::{EVENT_IDX, INDIRECT_DESC, RING_PACKED};
use paravane_spec::packed::{DESC_F_AVAIL, DESC_F_USED, EVENT_WRAP};
use paravane_spec::vhost_user::{MemoryRegion, SingleRegion, VringState, request};
use paravane_test_support::patience;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Descriptors of the queues here.
const SIZE: u16 = 64;

/// Address, length, flags; then next index (split) or identifier (packed).
type Desc = (u64, u32, u16, u16);

fn split_bytes(descs: &[Desc]) -> Vec<u8> {
    let bytes = |&(addr, len, flags, next): &Desc| {
        [&addr.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    };
    descs.iter().flat_map(bytes).collect()
}

fn packed_bytes(descs: &[Desc]) -> Vec<u8> {
    let bytes = |&(addr, len, flags, id): &Desc| {
        [&addr.to_le_bytes()[..], &len.to_le_bytes(), &id.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    descs.iter().flat_map(bytes).collect()
}

impl Machine {
    /// Offset of an area in the memory.
    fn desc(&self) -> u64 {
        self.addresses.desc - GPA
    }

    fn driver(&self) -> u64 {
        self.addresses.driver - GPA
    }

    fn device(&self) -> u64 {
        self.addresses.device - GPA
    }

    /// Two bytes at `offset`.
    fn word(&self, offset: u64) -> u16 {
        u16::from_le_bytes(self.bytes(offset, 2).try_into().unwrap())
    }

    /// Writes descriptors, available entries from `base` on, and the index.
    fn write_split(&self, descs: &[Desc], base: u16, avail: &[u16], idx: u16) {
        self.set_bytes(self.desc(), split_bytes(descs));
        for (entry, head) in (0..).zip(avail) {
            let place = u64::from(base.wrapping_add(entry) % SIZE);
            self.set_bytes(self.driver() + 4 + 2 * place, head.to_le_bytes());
        }
        self.set_bytes(self.driver() + 2, idx.to_le_bytes());
    }

    /// Writes descriptors from position `at` on, around the end; the first one last.
    fn write_packed(&self, at: u16, descs: &[Desc]) {
        for (index, desc) in descs.iter().enumerate().rev() {
            let place = u64::from((at + index as u16) % SIZE);
            self.set_bytes(self.desc() + 16 * place, packed_bytes(&[*desc]));
        }
    }

    /// Kicks, with any contents of the rings.
    fn signal_kick(&self) {
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// Number of interrupts since the last call.
    fn interrupts(&self) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(&self.call, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < patience(), "still not: {what}");
        std::thread::yield_now();
    }
}

fn stop(raw: &Raw) {
    raw.ask(request::GET_VRING_BASE, VringState::default().as_bytes());
}

/// Replaces the machine of a client.
fn replace(raw: &Raw, features: u64) -> Machine {
    let machine = Machine::new(features, SIZE, 4);
    machine.share(raw);
    machine.start(raw, machine.first_base());
    machine
}

/// Writes a header at `slot` that requests `kind` for the first sector.
fn header(machine: &Machine, slot: usize, kind: u32) -> u64 {
    machine.set_bytes(Machine::slot(slot), [&kind.to_le_bytes()[..], &[0; 12]].concat());
    GPA + Machine::slot(slot)
}

/// Contents of a queue, and the text of its error.
struct Broken {
    write: Box<dyn Fn(&Machine)>,
    error: &'static str,
}

/// Each case stops its queue, and the client can start over.
fn break_queues(features: u64, cases: Vec<Broken>) {
    let rig = Rig::new(1);
    let mut model = vec![0; DISK];
    let errors = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let raw = Raw::connect(&rig.socket());
    let mut machine = Machine::new(features, SIZE, 4);
    machine.attach(&raw, machine.first_base(), false);
    for (number, Broken { write, error }) in (1..).zip(cases) {
        raw.say(request::SET_VRING_ERR, &0_u64, &[errors.as_fd()]);
        // A read of the first sector, as far as the descriptors allow it.
        machine.set_bytes(Machine::slot(0), [0; 16]);
        write(&machine);
        machine.signal_kick();
        let status = rig.wait_for(|status| status.queues[0].error.is_some());
        assert!(status.queues[0].error.as_ref().unwrap().contains(error), "{status:?}, not {error}");
        assert!(status.connected && !status.queues[0].live);
        let mut count = [0; 8];
        assert_eq!(rustix::io::read(&errors, &mut count), Ok(8), "{error}");
        // Another request does not restart it; the client must start over.
        raw.say(request::SET_VRING_ENABLE, &VringState { index: 0, num: 1 }, &[]);
        assert!(rig.status().queues[0].error.is_some());
        if number % 2 == 0 {
            raw.say(request::RESET_DEVICE, &[0_u8; 0], &[]);
        } else {
            stop(&raw);
        }
        assert_eq!(rig.status().queues[0].error, None);
        machine = replace(&raw, features);
        machine.ask(0, Ask::Write(number), 0, 512);
        machine.kick();
        machine.finish(&mut model);
        stop(&raw);
        machine = replace(&raw, features);
    }
    assert_eq!(rig.status().protocol_errors, 0);
}

/// Chain, by the addresses, lengths and flags of its descriptors.
type Links = Vec<(u64, u32, u16)>;

/// Chains that are invalid in both layouts, with the text of the error.
///
/// They are used in the ring and, unless they have indirect descriptors, in a table.
fn chains() -> Vec<(Links, &'static str)> {
    let at = GPA + Machine::slot(0);
    let header = (at, 16, NEXT);
    vec![
        (vec![(at, 0, 0)], "has length 0"),
        (vec![header, (at + 512, 0, NEXT | WRITE), (at + 512, 1, WRITE)], "has length 0"),
        (vec![(u64::MAX - 8, 16, 0)], "wraps around"),
        (vec![header, (at, u32::MAX, NEXT | WRITE), (at, u32::MAX, WRITE)], "2^32"),
        (vec![header, (at, u32::MAX - 16, WRITE)], "the device cannot access"),
        (vec![(at, 1, NEXT | WRITE), (at, 16, 0)], "a readable descriptor after a writable"),
        (vec![(0, 16, NEXT), (at + 512, 513, WRITE)], "the device cannot access"),
        (vec![(GPA + MEMORY - 8, 16, NEXT), (at, 513, WRITE)], "the device cannot access"),
        (vec![header, (GPA + MEMORY - 8, 513, WRITE)], "the device cannot access"),
        (vec![header, (GPA + MEMORY, 512, NEXT | WRITE), (at + 16, 1, WRITE)], "the device cannot access"),
        (vec![header, (at + 512, 512, NEXT | WRITE), (GPA - 1, 1, WRITE)], "the device cannot access"),
        (vec![(at, 16, 0)], "is malformed"),
        (vec![(at, 15, NEXT), (at + 512, 513, WRITE)], "is malformed"),
        (vec![(at, 1, WRITE)], "is malformed"),
        (vec![header, (at + 512, 512, 0)], "is malformed"),
        (vec![(at, 32, INDIRECT | NEXT), (at, 16, 0)], "indirect and also chained"),
        (vec![(at, 31, INDIRECT)], "indirect table"),
        (vec![(at, 0, INDIRECT)], "indirect table"),
        (vec![(at, 0x1000_0000, INDIRECT)], "indirect table"),
        (vec![(at, 0xffff_fff0, INDIRECT)], "indirect table"),
        (vec![(GPA + MEMORY - 16, 32, INDIRECT)], "the device cannot access"),
        (vec![(u64::MAX - 15, 32, INDIRECT)], "wraps around"),
    ]
}

/// Layout in a split queue or table.
fn linked(chain: &[(u64, u32, u16)]) -> Vec<Desc> {
    (1..).zip(chain).map(|(next, &(addr, len, flags))| (addr, len, flags, next)).collect()
}

/// Layout in a packed queue or table, available in the first round.
fn neighbours(chain: &[(u64, u32, u16)]) -> Vec<Desc> {
    chain.iter().map(|&(addr, len, flags)| (addr, len, flags | DESC_F_AVAIL, 0)).collect()
}

/// Offset of the tables that a case needs.
const TABLE: usize = 8;

#[test]
fn a_split_ring_that_makes_no_sense_stops_its_queue() {
    let at = GPA + Machine::slot(0);
    let table = GPA + Machine::slot(TABLE);
    let header = (at, 16, NEXT, 1);
    let mut cases = Vec::new();
    let mut ring = |descs: Vec<Desc>, avail: Vec<u16>, idx: u16, error| {
        let write = Box::new(move |machine: &Machine| machine.write_split(&descs, 0, &avail, idx));
        cases.push(Broken { write, error });
    };
    ring(vec![(at, 16, NEXT, 0)], vec![0], 1, "or loops");
    ring(vec![(at, 16, NEXT, 1), (at, 16, NEXT, 0)], vec![0], 1, "or loops");
    ring(vec![(at, 16, NEXT, 64)], vec![0], 1, "is outside a table of 64");
    ring(vec![(at, 16, NEXT, 0xffff)], vec![0], 1, "is outside a table of 64");
    ring(vec![header], vec![64], 1, "is outside a table of 64");
    ring(vec![header], vec![0xffff], 1, "is outside a table of 64");
    // The index jumps, and goes back.
    ring(vec![header], vec![0], 65, "more than the queue's 64");
    ring(vec![header], vec![0], 0xffff, "more than the queue's 64");
    // The same head twice at once.
    ring(vec![header, (at + 512, 513, WRITE, 0)], vec![0, 0], 2, "while it is in flight");
    for (chain, error) in chains() {
        ring(linked(&chain), vec![0], 1, error);
    }
    let mut tables = |descs: Vec<Desc>, len: u32, error| {
        let write = Box::new(move |machine: &Machine| {
            machine.set_bytes(Machine::slot(TABLE), split_bytes(&descs));
            machine.write_split(&[(table, len, INDIRECT, 0)], 0, &[0], 1);
        });
        cases.push(Broken { write, error });
    };
    tables(vec![(at, 16, NEXT, 0)], 16, "or loops");
    tables(vec![(at, 16, NEXT, 1), (at, 16, NEXT, 0)], 32, "or loops");
    tables(vec![(at, 16, NEXT, 2), (at, 1, WRITE, 0)], 32, "is outside a table of 2");
    tables(vec![(table, 32, INDIRECT, 0), (at, 1, WRITE, 0)], 32, "inside an indirect table");
    // Longer than the queue, followed by zeroes; longer than any queue.
    tables(vec![(at, 16, NEXT, 1)], 0x4000, "has length 0");
    tables(vec![(at, 16, NEXT, 1)], 0x8000, "indirect table");
    for (chain, error) in chains().into_iter().filter(|(chain, _)| chain.iter().all(|d| d.2 & INDIRECT == 0))
    {
        tables(linked(&chain), 16 * chain.len() as u32, error);
    }
    break_queues(INDIRECT_DESC, cases);
}

#[test]
fn a_packed_ring_that_makes_no_sense_stops_its_queue() {
    let at = GPA + Machine::slot(0);
    let table = GPA + Machine::slot(TABLE);
    let mut cases = Vec::new();
    let mut ring = |descs: Vec<Desc>, error| {
        let write = Box::new(move |machine: &Machine| machine.write_packed(0, &descs));
        cases.push(Broken { write, error });
    };
    // All of the ring in one chain without an end.
    ring(vec![(at, 16, NEXT | DESC_F_AVAIL, 0); 64], "or loops");
    for id in [64, 0x8000, 0xffff] {
        let error = "is not below the queue's size 64";
        ring(vec![(at, 16, NEXT | DESC_F_AVAIL, 0), (at + 512, 513, WRITE | DESC_F_AVAIL, id)], error);
    }
    // The same identifier twice at once.
    let request = |id| [(at, 16, NEXT | DESC_F_AVAIL, 0), (at + 512, 513, WRITE | DESC_F_AVAIL, id)];
    ring([request(7), request(7)].concat(), "buffer 7 was made available while it is in flight");
    for (chain, error) in chains() {
        ring(neighbours(&chain), error);
    }
    let mut tables = |descs: Vec<Desc>, len: u32, error| {
        let write = Box::new(move |machine: &Machine| {
            machine.set_bytes(Machine::slot(TABLE), packed_bytes(&descs));
            machine.write_packed(0, &[(table, len, INDIRECT | DESC_F_AVAIL, 0)]);
        });
        cases.push(Broken { write, error });
    };
    tables(vec![(table, 32, INDIRECT, 0), (at, 1, WRITE, 0)], 32, "inside an indirect table");
    tables(vec![(at, 16, 0, 0)], 0x4000, "has length 0");
    tables(vec![(at, 16, 0, 0)], 0x8000, "indirect table");
    for (chain, error) in chains().into_iter().filter(|(chain, _)| chain.iter().all(|d| d.2 & INDIRECT == 0))
    {
        tables(neighbours(&chain), 16 * chain.len() as u32, error);
    }
    break_queues(INDIRECT_DESC | RING_PACKED, cases);
}

/// A queue waits if the flags do not make its descriptor available.
///
/// Flags behind the first one are ignored.
#[test]
fn descriptors_of_another_round_are_not_available() {
    let rig = Rig::new(1);
    let raw = Raw::connect(&rig.socket());
    let mut machine = Machine::new(RING_PACKED, SIZE, 4);
    machine.attach(&raw, machine.first_base(), false);
    let header = header(&machine, 0, blk::T_FLUSH);
    for flags in [0, DESC_F_USED, DESC_F_AVAIL | DESC_F_USED] {
        machine.set_bytes(Machine::slot(0) + STATUS, [0xff]);
        let status = (header + STATUS, 1, WRITE | DESC_F_AVAIL, 3);
        machine.write_packed(0, &[(header, 16, NEXT | flags, 0), status]);
        for _ in 0..20 {
            machine.signal_kick();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(rig.status().queues[0].taken, 0, "{flags:#x}");
    }
    // By its own flags, the second one is of the round before.
    let status = (header + STATUS, 1, WRITE | DESC_F_USED, 3);
    machine.write_packed(0, &[(header, 16, NEXT | DESC_F_AVAIL, 0), status]);
    machine.signal_kick();
    until("a flush", || machine.bytes(Machine::slot(0) + STATUS, 1) == [blk::S_OK]);
    until("its descriptor", || {
        machine.word(machine.desc() + 12) == 3
            && machine.word(machine.desc() + 14) & (DESC_F_AVAIL | DESC_F_USED) == DESC_F_AVAIL | DESC_F_USED
    });
    let status = rig.status();
    assert_eq!((status.queues[0].taken, &status.queues[0].error), (1, &None));
}

#[test]
fn what_is_odd_and_allowed_is_served() {
    let rig = Rig::new(1);
    let content: Vec<u8> = (0..DISK).map(|at| (at / 3) as u8).collect();
    std::fs::write(rig.image(), &content).unwrap();
    let raw = Raw::connect(&rig.socket());
    let mut machine = Machine::new(INDIRECT_DESC, SIZE, 4);
    machine.attach(&raw, 0, false);
    // More memory directly behind, in another file, at another user address.
    let second = Machine::new(0, SIZE, 1);
    let region = MemoryRegion { gpa: GPA + MEMORY, user: USER + 8 * MEMORY, ..second.region() };
    raw.say(request::ADD_MEM_REG, &SingleRegion { padding: 0, region }, &[second.memory.fd().unwrap()]);

    let (at, mut used) = (GPA + Machine::slot(0), 0);
    let mut serve = |machine: &Machine, descs: &[Desc]| {
        header(machine, 0, blk::T_IN);
        machine.write_split(descs, used, &[0], used + 1);
        used += 1;
        machine.signal_kick();
        until("a read", || machine.word(machine.device() + 2) == used);
    };
    // The header byte by byte, the data in three pieces, the status at the end of the last one.
    let pieces = (0..16).map(|byte| (at + byte, 1, NEXT, byte as u16 + 1));
    let data = [(at + 600, 1, NEXT | WRITE, 17), (at + 700, 510, NEXT | WRITE, 18), (at + 1300, 2, WRITE, 0)];
    serve(&machine, &pieces.chain(data).collect::<Vec<_>>());
    let slot = Machine::slot(0);
    let read = [machine.bytes(slot + 600, 1), machine.bytes(slot + 700, 510), machine.bytes(slot + 1300, 2)]
        .concat();
    assert_eq!(read, [&content[..512], &[blk::S_OK]].concat());
    // Across the border of two regions.
    let data = GPA + MEMORY - 200;
    serve(&machine, &[(at, 16, NEXT, 1), (data, 512, NEXT | WRITE, 2), (at + STATUS, 1, WRITE, 0)]);
    assert_eq!(machine.bytes(slot + STATUS, 1), [blk::S_OK]);
    assert_eq!([machine.bytes(MEMORY - 200, 200), second.bytes(0, 312)].concat(), content[..512]);
    // The data over the header, the status over the data.
    serve(&machine, &[(at, 16, NEXT, 1), (at, 512, NEXT | WRITE, 2), (at + 5, 1, WRITE, 0)]);
    assert_eq!(machine.bytes(slot + 6, 506), content[6..512]);
    let status = rig.status();
    assert_eq!((status.queues[0].completed, &status.queues[0].error), (3, &None));
}

/// A disk of 0xff is read over each area of the ring in turn.
///
/// Only this queue is affected.
#[test]
fn a_ring_may_be_overwritten_by_what_is_read() {
    let rig = Rig::new(1);
    std::fs::write(rig.image(), vec![0xff; DISK]).unwrap();
    let raw = Raw::connect(&rig.socket());
    let mut broken = 0;
    for packed in [0, RING_PACKED] {
        let mut machine = Machine::new(packed, SIZE, 4);
        machine.attach(&raw, machine.first_base(), false);
        stop(&raw);
        let QueueAreas { desc, driver, device } = QueueAreas::of(&machine);
        for area in [desc, driver, device] {
            machine = replace(&raw, packed);
            let read = header(&machine, 0, blk::T_IN);
            let data = (GPA + area) & !511;
            if packed == 0 {
                let status = (read + STATUS, 1, WRITE, 0);
                let chain = [(read, 16, NEXT, 1), (data, 1024, NEXT | WRITE, 2), status];
                machine.write_split(&chain, 0, &[0], 1);
            } else {
                let status = (read + STATUS, 1, WRITE | DESC_F_AVAIL, 0);
                let data = (data, 1024, NEXT | WRITE | DESC_F_AVAIL, 0);
                machine.write_packed(0, &[(read, 16, NEXT | DESC_F_AVAIL, 0), data, status]);
            }
            machine.set_bytes(Machine::slot(0) + STATUS, [0xff]);
            machine.signal_kick();
            until("the read", || machine.bytes(Machine::slot(0) + STATUS, 1) == [blk::S_OK]);
            // The new contents of the ring are examined.
            for _ in 0..5 {
                machine.signal_kick();
                std::thread::sleep(Duration::from_millis(1));
            }
            broken += u32::from(rig.status().queues[0].error.is_some());
            stop(&raw);
        }
        let mut good = replace(&raw, packed);
        good.ask(0, Ask::Write(packed.count_ones() as u8), 0, 512);
        good.kick();
        good.finish(&mut vec![0xff; DISK]);
        stop(&raw);
    }
    assert!(broken > 0, "an available index of 0xffff is none");
    assert_eq!(rig.status().protocol_errors, 0);
}

/// Offsets in the memory.
struct QueueAreas {
    desc: u64,
    driver: u64,
    device: u64,
}

impl QueueAreas {
    fn of(machine: &Machine) -> Self {
        Self { desc: machine.desc(), driver: machine.driver(), device: machine.device() }
    }
}

#[test]
fn a_disk_that_is_only_read_is_not_written() {
    let rig = Rig::read_only();
    let raw = Raw::connect(&rig.socket());
    let mut machine = Machine::new(0, SIZE, 4);
    machine.attach(&raw, 0, false);
    for (slot, kind) in [blk::T_OUT, blk::T_DISCARD, blk::T_WRITE_ZEROES].into_iter().enumerate() {
        let at = header(&machine, slot, kind);
        machine.set_bytes(Machine::slot(slot) + STATUS, [0xff]);
        // 16 bytes are a range, of one sector; 512 are one.
        let len = if kind == blk::T_OUT { 512 } else { 16 };
        machine.set_bytes(Machine::slot(slot) + DATA, [&[0; 8][..], &1_u32.to_le_bytes(), &[0; 4]].concat());
        let head = slot as u16 * 3;
        let chain = [(at, 16, NEXT, head + 1), (at + DATA, len, NEXT, head + 2), (at + STATUS, 1, WRITE, 0)];
        machine.set_bytes(machine.desc() + 16 * u64::from(head), split_bytes(&chain));
        machine.write_split(&[], slot as u16, &[head], slot as u16 + 1);
        machine.signal_kick();
        until("an answer", || machine.bytes(Machine::slot(slot) + STATUS, 1) != [0xff]);
        assert_eq!(machine.bytes(Machine::slot(slot) + STATUS, 1), [blk::S_IOERR], "request {kind}");
    }
    assert_eq!(rig.status().queues[0].error, None);
    assert!(std::fs::read(rig.image()).unwrap().iter().all(|&byte| byte == 0));
}

/// DPDK's virtio-user sends position 0 to each server it connects to.
///
/// It leaves a split ring as it is.
#[test]
fn a_split_queue_goes_on_although_its_client_says_0() {
    let rig = Rig::new(1);
    let mut model = vec![0; DISK];
    let mut random = Random::new(16);
    for features in [0, INDIRECT_DESC | EVENT_IDX] {
        let mut machine = Machine::new(features, SIZE, 4);
        for _ in 0..4 {
            let raw = Raw::connect(&rig.socket());
            machine.attach(&raw, 0, false);
            machine.finish(&mut model);
            machine.fill(DISK, &mut random);
            machine.finish(&mut model);
            drop(raw);
            rig.wait_for(|status| !status.connected);
            // The next server serves what becomes available without a server.
            machine.fill(DISK, &mut random);
        }
        let raw = Raw::connect(&rig.socket());
        machine.attach(&raw, 0, false);
        machine.finish(&mut model);
        drop(raw);
    }
    assert_eq!(rig.status().protocol_errors, 0);
    assert!(std::fs::read(rig.image()).unwrap() == model);
}

/// Four requests across the end of the index range, with each near event index.
#[test]
fn interrupts_come_where_they_were_asked_for() {
    const FIRST: u16 = 0xfffe;
    const COUNT: u16 = 4;
    let rig = Rig::new(1);
    let raw = Raw::connect(&rig.socket());
    let begin = |features, base: u32, set_up: &dyn Fn(&Machine)| {
        let mut machine = Machine::new(features, SIZE, 4);
        set_up(&machine);
        machine.attach(&raw, base, false);
        // The start of a queue interrupts once.
        machine.interrupts();
        for slot in 0..usize::from(COUNT) {
            let at = header(&machine, slot, blk::T_FLUSH);
            let table = [(at, 16, NEXT, 1), (at + STATUS, 1, WRITE, 0)];
            let table = if features & RING_PACKED == 0 { split_bytes(&table) } else { packed_bytes(&table) };
            machine.set_bytes(Machine::slot(TABLE + slot), table);
        }
        machine
    };
    let table = |slot: u16| GPA + Machine::slot(TABLE + usize::from(slot));
    for event in (FIRST - 2..=u16::MAX).chain(0..4).chain([FIRST - SIZE, FIRST ^ 0x8000]) {
        let machine = begin(INDIRECT_DESC | EVENT_IDX, FIRST.into(), &|machine| {
            machine.set_bytes(machine.driver() + 2, FIRST.to_le_bytes());
            machine.set_bytes(machine.device() + 2, FIRST.to_le_bytes());
            machine.set_bytes(machine.driver() + 4 + 2 * u64::from(SIZE), event.to_le_bytes());
        });
        let descs: Vec<Desc> = (0..COUNT).map(|slot| (table(slot), 32, INDIRECT, 0)).collect();
        machine.write_split(&descs, FIRST, &[0, 1, 2, 3], FIRST.wrapping_add(COUNT));
        machine.signal_kick();
        let last = FIRST.wrapping_add(COUNT);
        until("four flushes", || machine.word(machine.device() + 2) == last);
        // Where a kick is wanted next, when its server sleeps.
        until("a server that waits", || machine.word(machine.device() + 4 + 8 * u64::from(SIZE)) == last);
        stop(&raw);
        let wanted = event.wrapping_sub(FIRST) < COUNT;
        assert_eq!(machine.interrupts() > 0, wanted, "an interrupt was asked for at {event:#x}");
    }
    // From position 62 of 64 on.
    let first = 62;
    let position = u32::from(EVENT_WRAP | first);
    let (this, next) = (EVENT_WRAP, 0);
    let asked = [61 | this, 62 | this, 63 | this, next, 1 | next, 2 | next, 62 | next, this, 1 | this]
        .map(|place| (place, 2))
        // Always, never, and undefined values: a reserved flag, and a position that does not exist.
        .into_iter()
        .chain([(0, 0), (0, 1), (0, 3), (64 | this, 2), (0x7fff, 2)]);
    for (place, flags) in asked {
        let machine = begin(INDIRECT_DESC | EVENT_IDX | RING_PACKED, position << 16 | position, &|machine| {
            machine.set_bytes(machine.driver(), [place.to_le_bytes(), u16::to_le_bytes(flags)].concat());
        });
        let available = |slot| if slot < SIZE - first { DESC_F_AVAIL } else { DESC_F_USED };
        let descs: Vec<Desc> =
            (0..COUNT).map(|slot| (table(slot), 32, INDIRECT | available(slot), slot)).collect();
        machine.write_packed(first, &descs);
        machine.signal_kick();
        let last = machine.desc() + 16 * u64::from((first + COUNT - 1) % SIZE) + 14;
        until("four flushes", || machine.word(last) & (DESC_F_AVAIL | DESC_F_USED) == 0);
        until("a server that waits", || {
            let (place, flags) = (machine.word(machine.device()), machine.word(machine.device() + 2));
            (place, flags) == (2, 2)
        });
        stop(&raw);
        let among = [62 | this, 63 | this, next, 1 | next].contains(&place);
        match (flags, place) {
            (2, 0x7fff) | (2, 0x8040) | (3, _) => drop(machine.interrupts()),
            (2, _) => assert_eq!(machine.interrupts() > 0, among, "asked for at {place:#x}"),
            _ => assert_eq!(machine.interrupts() > 0, flags == 0, "asked for by {flags}"),
        }
    }
    assert_eq!((rig.status().protocol_errors, &rig.status().queues[0].error), (0, &None));
}

#[test]
fn a_storm_of_kicks_disturbs_no_other_queue() {
    let rig = Rig::new(2);
    let (mut model, mut random) = (vec![0; DISK], Random::new(41));
    let raw = Raw::connect(&rig.socket());
    let (mut machine, mut second) = (Machine::new(0, SIZE, 8), Machine::with_index(1, 0, SIZE, 4));
    machine.attach(&raw, 0, false);
    let region = SingleRegion { padding: 0, region: second.region() };
    raw.say(request::ADD_MEM_REG, &region, &[second.memory.fd().unwrap()]);
    second.start(&raw, 0);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Relaxed: it only ends the storm.
            while !over.load(Ordering::Relaxed) {
                let _ = rustix::io::write(&second.kick, &1_u64.to_ne_bytes());
            }
        });
        while machine.done < 200 {
            machine.fill(DISK, &mut random);
            machine.finish(&mut model);
        }
        over.store(true, Ordering::Relaxed);
    });
    // As many as the counter can hold.
    let _ = rustix::io::write(&second.kick, &(u64::MAX - 10_000_000).to_ne_bytes());
    second.fill(DISK, &mut random);
    second.finish(&mut model);
    assert_eq!(rig.status().protocol_errors, 0);
}

#[test]
fn requests_outlive_neither_a_reset_nor_their_client() {
    let rig = Rig::new(1);
    let mut random = Random::new(42);
    let mut model = vec![0; DISK];
    for round in 0..24 {
        let raw = Raw::connect(&rig.socket());
        let features = if round % 2 == 0 { 0 } else { RING_PACKED | EVENT_IDX };
        let mut machine = Machine::new(features, SIZE, 16);
        machine.attach(&raw, machine.first_base(), false);
        machine.fill(DISK, &mut random);
        let mut raw = Some(raw);
        match (round % 4, &raw) {
            (0, Some(raw)) => raw.say(request::RESET_DEVICE, &[0_u8; 0], &[]),
            (1, Some(raw)) => raw.say(request::SET_STATUS, &0_u64, &[]),
            (2, Some(raw)) => stop(raw),
            _ => {
                raw = None;
                rig.wait_for(|status| !status.connected);
            }
        }
        // From here on nothing writes to the memory of that machine.
        let used = Machine::slot(16) as usize;
        let before = machine.bytes(0, used);
        std::thread::sleep(Duration::from_millis(2));
        assert!(machine.bytes(0, used) == before);
        // A driver that starts over finds what is on the disk, whatever became of those requests.
        drop(raw);
        let raw = Raw::connect(&rig.socket());
        let mut anew = Machine::new(features, SIZE, 4);
        anew.attach(&raw, anew.first_base(), false);
        model.copy_from_slice(&std::fs::read(rig.image()).unwrap());
        anew.fill(DISK, &mut random);
        anew.finish(&mut model);
        drop(raw);
        rig.wait_for(|status| !status.connected);
    }
    assert_eq!(rig.status().protocol_errors, 0);
}

/// A second thread writes into rings and tables while they are read.
///
/// Queues stop, and sessions may end; the next client is served.
#[test]
fn rings_that_change_while_they_are_read_end_at_most_their_session() {
    let rig = Rig::new(1);
    for features in [INDIRECT_DESC, INDIRECT_DESC | EVENT_IDX | RING_PACKED] {
        let mut stopped = 0;
        let start = Instant::now();
        for seed in 43.. {
            if stopped == 8 {
                break;
            }
            assert!(start.elapsed() < patience(), "{stopped} queues were broken");
            let raw = Raw::connect(&rig.socket());
            let mut machine = Machine::new(features, SIZE, 4);
            machine.attach(&raw, machine.first_base(), false);
            stopped += u32::from(vandalise(&rig, &machine, seed));
            drop(raw);
            rig.wait_for(|status| !status.connected);
        }
        let raw = Raw::connect(&rig.socket());
        let mut good = Machine::new(features, SIZE, 4);
        good.attach(&raw, good.first_base(), false);
        let mut model = std::fs::read(rig.image()).unwrap();
        good.fill(DISK, &mut Random::new(44));
        good.finish(&mut model);
        drop(raw);
        rig.wait_for(|status| !status.connected);
    }
}

/// Whether the queue was stopped.
///
/// Its requests are valid except for what the second thread changes.
fn vandalise(rig: &Rig, machine: &Machine, seed: u64) -> bool {
    let packed = machine.features & RING_PACKED != 0;
    let over = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (vandal, memory) = (Arc::clone(&over), Arc::clone(&machine.memory));
        scope.spawn(move || {
            let mut random = Random::new(seed);
            // Relaxed: it only ends the thread.
            while !vandal.load(Ordering::Relaxed) {
                // Lengths and flags of tables, mostly; sometimes anything in the ring.
                let at = match random.below(64) {
                    0 => random.below(0x600) as u64,
                    _ => Machine::slot(TABLE + random.below(4)) + 8 + random.below(32) as u64,
                };
                put(&memory, at, [random.below(256) as u8]);
            }
        });
        // Tables are valid at first.
        for slot in 0..4 {
            let at = header(machine, slot, blk::T_IN);
            let descs = [(at, 16, NEXT, 1), (at + DATA, 512, NEXT | WRITE, 2), (at + STATUS, 1, WRITE, 0)];
            let table = if packed { packed_bytes(&descs) } else { split_bytes(&descs) };
            machine.set_bytes(Machine::slot(TABLE + slot), table);
        }
        let table = |slot: u16| GPA + Machine::slot(TABLE + usize::from(slot));
        let is_stopped = || rig.status().queues[0].error.is_some();
        let mut round = 0_u16;
        // Rounds and not a time, of which a busy host leaves little to the other threads.
        while round < 2000 && !(round % 16 == 15 && is_stopped()) {
            if packed {
                let place = round * 4 % SIZE;
                let flags = if (round * 4 / SIZE).is_multiple_of(2) { DESC_F_AVAIL } else { DESC_F_USED };
                let descs: Vec<Desc> = (0..4).map(|slot| (table(slot), 48, INDIRECT | flags, slot)).collect();
                machine.write_packed(place, &descs);
            } else {
                let descs: Vec<Desc> = (0..4).map(|slot| (table(slot), 48, INDIRECT, 0)).collect();
                let base = round * 4;
                machine.write_split(&descs, base, &[0, 1, 2, 3], base + 4);
            }
            machine.signal_kick();
            round += 1;
            // Also for a slower server.
            let until = Instant::now() + Duration::from_micros(100);
            while Instant::now() < until {
                std::thread::yield_now();
            }
        }
        over.store(true, Ordering::Relaxed);
        is_stopped()
    })
}
