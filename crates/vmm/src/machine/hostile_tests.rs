//! Guests that are hostile within the rules of the ring.
//!
//! They never acknowledge an interrupt, kick without end, mask every vector for ever. Nothing
//! grows, no other guest waits, and the machine stops.
mod rig;

use crate::config::TransportChoice;
use paravane_driver::pci::Space;
use paravane_spec::builtin::PCI_ECAM;
use paravane_spec::mmio::{INT_USED_BUFFER, INTERRUPT_STATUS, QUEUE_SEL};
use paravane_spec::mmio_msi::{MSI_COMMAND, MSI_STATE, SELECT_CONFIGURATION, command, state};
use paravane_spec::pci::{capability, ecam, header, msix};
use paravane_test_support::patience;
use rig::{Host, TRANSPORTS};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The device with the hostile driver.
///
/// `POLITE` is beside it, on the same I/O thread.
const HOSTILE: u32 = 0;
const POLITE: u32 = 1;
/// Requests of a driver.
const REQUESTS: u32 = 3000;

#[test]
fn a_guest_that_never_acknowledges_is_served_and_costs_an_interrupt_a_request() {
    for (transport, wired) in [
        (TransportChoice::Mmio, true),
        (TransportChoice::MmioMsi, true),
        (TransportChoice::MmioMsi, false),
        (TransportChoice::Pci, true),
        (TransportChoice::Pci, false),
    ] {
        let host = Host::new(transport, true, Duration::ZERO);
        let mut driver = host.driver(HOSTILE, wired);
        driver.exchange(REQUESTS);
        host.settle();
        let device = host.device(HOSTILE);
        assert!(
            (1..=u64::from(REQUESTS)).contains(&device.interrupts()),
            "{transport:?}: {}",
            device.interrupts()
        );
        assert_eq!(device.messages(), if wired { 0 } else { device.interrupts() });
        if transport != TransportChoice::Pci {
            let status = host.addresses.read32(host.base(HOSTILE) + INTERRUPT_STATUS);
            assert_eq!(status, if wired { INT_USED_BUFFER } else { 0 });
        }
        if wired {
            assert_eq!(driver.interrupt(), INT_USED_BUFFER, "one acknowledgement is enough for all");
            assert_eq!(driver.interrupt(), 0);
        }
        host.driver(POLITE, wired).exchange(1);
        host.stop();
        assert_eq!(host.counters.fault_of(HOSTILE as usize), None);
    }
}

#[test]
fn a_storm_of_kicks_keeps_no_device_from_being_served_or_stopped() {
    for transport in TRANSPORTS {
        for (ioeventfd, longest_poll) in
            [(true, Duration::ZERO), (false, Duration::ZERO), (true, Duration::from_micros(200))]
        {
            let host = Host::new(transport, ioeventfd, longest_poll);
            let (mut hostile, mut polite) = (host.driver(HOSTILE, false), host.driver(POLITE, false));
            let (over, kicks) = (AtomicBool::new(false), AtomicU64::new(0));
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        kicks.fetch_add(1, Ordering::Relaxed);
                        host.kick(HOSTILE);
                    }
                });
                // Its own queue is served, and the other device's.
                hostile.exchange(REQUESTS / 10);
                polite.exchange(REQUESTS / 10);
                over.store(true, Ordering::Relaxed);
            });
            // It costs a turn a kick at most, however many come; what is served while one turn
            // lasts needs none. A request may be found by polling, and its kick come all the same.
            let requests = 2 * u64::from(REQUESTS / 10);
            let (turns, kicks) = (host.turns(), kicks.load(Ordering::Relaxed) + 2 * requests);
            assert!(turns <= kicks + 2, "{transport:?}: {turns} turns for {kicks} kicks");
            // And nothing when it is over.
            host.settle();
            // The machine stops in the middle of another, which then hits nothing.
            over.store(false, Ordering::Relaxed);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        host.kick(HOSTILE);
                    }
                });
                let before = host.turns();
                let start = Instant::now();
                while host.turns() == before {
                    assert!(start.elapsed() < patience(), "no kick arrives");
                    thread::yield_now();
                }
                host.stop();
                assert!(!host.kick(HOSTILE), "an ioeventfd is left");
                over.store(true, Ordering::Relaxed);
            });
        }
    }
}

#[test]
fn vectors_that_are_masked_for_ever_keep_one_interrupt_each_and_send_it_when_they_are_not() {
    for transport in [TransportChoice::MmioMsi, TransportChoice::Pci] {
        let host = Host::new(transport, true, Duration::ZERO);
        let vectors = Vectors { host: &host, transport };
        let mut driver = host.driver(HOSTILE, false);
        vectors.mask(true);
        driver.exchange(REQUESTS);
        let device = host.device(HOSTILE);
        assert_eq!(device.messages(), 0, "{transport:?}");
        host.settle();
        assert!(vectors.pending(), "{transport:?}");
        // Neither more nor less with one more.
        driver.exchange(1);
        host.settle();
        vectors.mask(false);
        assert_eq!(device.messages(), 1, "{transport:?}: one for all that came");
        assert!(!vectors.pending());
        // And masked for ever it stops as ever.
        vectors.mask(true);
        driver.exchange(10);
        host.stop();
        assert_eq!(host.counters.fault_of(HOSTILE as usize), None);
    }
}

/// The vectors of the hostile guest's device, by its registers.
struct Vectors<'a> {
    host: &'a Host,
    transport: TransportChoice,
}

impl Vectors<'_> {
    fn write(&self, offset: u64, value: u32) {
        self.host.addresses.write32(self.host.base(HOSTILE) + offset, value);
    }

    fn mask(&self, masked: bool) {
        if self.transport == TransportChoice::MmioMsi {
            for source in [0, SELECT_CONFIGURATION] {
                self.write(QUEUE_SEL, source);
                self.write(MSI_COMMAND, if masked { command::MASK } else { command::UNMASK });
            }
            return;
        }
        let table = self.structure(msix::TABLE);
        for vector in 0..2 {
            let entry = table + vector * msix::ENTRY;
            self.write(entry + msix::VECTOR_CONTROL, if masked { msix::MASKED } else { 0 });
        }
    }

    /// Whether the queue's vector has one pending.
    fn pending(&self) -> bool {
        if self.transport == TransportChoice::MmioMsi {
            self.write(QUEUE_SEL, 0);
            let state = self.host.addresses.read32(self.host.base(HOSTILE) + MSI_STATE);
            return state & state::PENDING != 0;
        }
        let bits = self.host.addresses.read32(self.host.base(HOSTILE) + self.structure(msix::PBA));
        // Vector 0 is the configuration change's.
        bits & 0b10 != 0
    }

    /// Offset in the BAR of the structure that an MSI-X `register` points to.
    fn structure(&self, register: u16) -> u64 {
        let function = PCI_ECAM + (u64::from(HOSTILE) + 1) * ecam::FUNCTIONS * ecam::FUNCTION;
        let read8 = |register: u64| self.host.addresses.read8(function + register);
        let mut at = u64::from(read8(u64::from(header::CAPABILITIES)));
        while read8(at) != capability::MSIX {
            at = u64::from(read8(at + 1));
            assert_ne!(at, 0, "there is MSI-X");
        }
        u64::from(self.host.addresses.read32(function + at + u64::from(register)) & !msix::BIR)
    }
}
