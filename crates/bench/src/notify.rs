//! `paravane bench notify`: cost of a kick (guest) and an interrupt (host).
//!
//! It repeats the tables of "virtio: Use ioeventfd for virtqueue notify" (Stefan Hajnoczi, QEMU,
//! 2010). A sample is one run of the microVM with one device. Only the measured phase counts:
//!
//! ```text
//! for round {
//!     for case { for placement { for subject { boot -> set up -> [ measured ] -> verify } } }
//!     for state of the guest { for delivery { inject, wait for the handler, many times } }
//! }
//! ```
//! **Subjects**: `exit-inline`, `exit`, `ioeventfd`, `process`; see [`Subject`].
//!
//! **Cases**, each with the host's threads on another CPU than the guest (`separate`) and on the
//! same (`colocated`):
//!
//! * `blk/WORKLOAD/inflightN`: the disk workloads of the series, 1, 8 and 16 requests in flight.
//! * `stream/DIRECTION/SIZE`: frames in one direction.
//! * `rr/SIZE`: request and response, one outstanding.
//! * `injection/STATE`: an interrupt by KVM_SIGNAL_MSI and by an irqfd.
use crate::error::broken;
use crate::figures::Collector;
use crate::guest::{self, Image};
use crate::machine::{Pinned, RealTime, two_cpus};
use crate::options::MIN_ROUNDS;
use crate::{BenchError, Options, Row, published};
use case::{Case, Placement, SampleSize, Subject};
use paravane_vmm::AccelChoice;
use paravane_vmm::injection::GuestState;
use sample::sample;

mod case;
mod injection;
mod inline;
pub(crate) mod process;
mod sample;

/// The name of this benchmark.
pub(crate) const NAME: &str = "notify";
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "A kick is the guest's notification that buffers are available. All devices use virtio-mmio with message interrupts.",
    "exit-inline: a kick exits to user space, and the vCPU's thread does the device's work before the guest goes on ('unmodified' in the 2010 series).",
    "exit: a kick exits to user space, and the exit signals the queue's I/O thread.",
    "ioeventfd: KVM signals the I/O thread without an exit to user space.",
    "process: as ioeventfd, but another process owns the queue and interrupts by irqfd. The others use KVM_SIGNAL_MSI. Needs KVM.",
    "separate, colocated: the host's threads run on another CPU than the guest, or on the same.",
    "blk: an image of 4 MiB in memory; create and seq-read use blocks of 64 KiB, random-read and random-write of 4 KiB. inflight: requests in flight. All data are compared.",
    "stream: frames of SIZE bytes with Ethernet header, each with its own kick, 64 buffers. guest-to-host: the host discards them. host-to-guest: the host sends as fast as the guest has buffers. All data are compared. No TCP is involved.",
    "rr: request and response of SIZE bytes of payload behind 66 bytes of headers, at most 65536 bytes in all. Another host thread answers. rate: transactions/s.",
    "mb-per-cpu: megabytes (10^6) per second of host CPU time, guest and owning process included.",
    "kick-stop, kick-stop-p50: how long a kick stops the guest, by its time stamp counter before and after the write; mean and median of a run. It includes the time that the guest waits for its CPU, and about 20 ns for reading the counter.",
    "kicks, exits (to user space), interrupts: per request, that is per block, frame or transaction.",
    "injection: call: what the host's thread spends. latency: from the call until the guest's handler has run, seen from another CPU. halted, computing: what the guest does meanwhile. stopped: the guest does not run, so call is the bare cost.",
    "On kvm-pvm, ring 0 of the guest is emulated at about 1.4 us per instruction, and a kick takes about 10 us by ioeventfd, 36 us by an exit. Compare ratios, not times, with other hosts.",
    "published: QEMU and vhost-net of September 2010; FFSB on a disk array, netperf TCP_STREAM and TCP_RR. Compare ratios at most.",
];

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let filter = options.filter.as_deref().unwrap_or("");
    let mut cases = Vec::new();
    for case in Case::all() {
        let placements = if options.quick { &Placement::ALL[..1] } else { &Placement::ALL[..] };
        cases.extend(placements.iter().map(|&placement| (case, placement)));
    }
    cases.retain(|(case, placement)| format!("{case}/{placement}").contains(filter));
    let mut published = published::ioeventfd::rows();
    published.retain(|row| row.case.contains(filter));
    let mut states = injection::STATES.to_vec();
    states.retain(|(_, path)| path.contains(filter));
    if cases.is_empty() && states.is_empty() && published.is_empty() {
        return Err(BenchError::NoCase(filter.to_owned()));
    }
    let rounds = options.rounds.max(MIN_ROUNDS);
    let size = if options.quick { SampleSize::QUICK } else { SampleSize::FULL };
    let subjects = if guest::runs_under_kvm().is_ok() { &Subject::ALL[..] } else { &Subject::ALL[..3] };
    let mut rows = measure(&cases, &states, subjects, AccelChoice::Auto, rounds, size, progress)?;
    rows.extend(published);
    Ok(rows)
}

/// Measures all cases, interleaved. The first subject of a case rotates.
fn measure(
    cases: &[(Case, Placement)],
    states: &[(GuestState, &str)],
    subjects: &[Subject],
    accel: AccelChoice,
    rounds: u32,
    size: SampleSize,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let mut collector = Collector::new(NAME);
    let image = Image::new(case::SPAN)?;
    let (host, guest) = two_cpus();
    for round in 0..rounds {
        for &(case, placement) in cases {
            // With one CPU, everything runs on it.
            let (host, vcpu) = match placement {
                Placement::Separate => (host, guest),
                Placement::Colocated => (guest, guest),
            };
            let _host = host.and_then(Pinned::to);
            // Real time on separate CPUs only. On a shared CPU, the scheduler's choice is measured.
            let alone = placement == Placement::Separate && vcpu.is_some();
            let real_time = alone.then(RealTime::enter).flatten();
            let path = format!("{case}/{placement}");
            for turn in 0..subjects.len() {
                let subject = subjects[(turn + round as usize) % subjects.len()];
                progress(&format!("round {} of {rounds}: {path}: {}", round + 1, subject.name()));
                let figures = sample(case, subject, accel, size, &image, vcpu, real_time.is_some())
                    .map_err(|reason| broken(subject.name(), format_args!("{path}: {reason}")))?;
                collector.add(&path, subject.name(), vcpu, figures);
            }
        }
        let _host = host.and_then(Pinned::to);
        let real_time = guest.and_then(|_| RealTime::enter());
        for (state, path) in states {
            progress(&format!("round {} of {rounds}: {path}", round + 1));
            let found = injection::sample(*state, size.injections, guest, real_time.is_some())
                .map_err(|reason| broken("injection", format_args!("{path}: {reason}")))?;
            for (subject, figures) in found.into_iter().flatten() {
                collector.add(path, subject, guest, figures);
            }
        }
    }
    Ok(collector.rows())
}

#[cfg(test)]
mod tests;
