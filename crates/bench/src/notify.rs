//! `paravane bench notify`: what a kick costs the guest, and an interrupt the host (the tables of the ioeventfd seed of
//! 2010).
//!
//! A sample is a whole run of the microVM with one device, of which the measured phase alone counts:
//!
//! ```text
//! for round { for case { for placement { for subject { boot -> set up -> [ measured phase ] -> verify } } } }
//!           { for state of the guest { for delivery { inject, wait for the handler, many times } } }
//! ```
//! **Subjects**: `exit-inline`, `exit`, `ioeventfd`, `process`, see [`Subject`]. **Cases**, each with the host's threads on a
//! CPU of their own (`separate`) and on the guest's (`colocated`):
//!
//! * `blk/WORKLOAD/inflightN`: the seed's four workloads at 1, 8 and 16 requests in flight.
//! * `stream/DIRECTION/SIZE`: frames one way.
//! * `rr/SIZE`: request and response, one outstanding.
//! * `injection/STATE`: an interrupt by KVM_SIGNAL_MSI and by an irqfd.
//!
//! The seed's own figures are added as they were published, under cases of their own.
use crate::guest::{self, Image};
use crate::machine::{Pinned, RealTime, two_cpus};
use crate::ring::{FEWEST_ROUNDS, broken};
use crate::series::Gathered;
use crate::{BenchError, Options, Row};
use case::{Amount, Case, Placement, Subject};
use paravane_vmm::AccelChoice;
use paravane_vmm::injection::GuestState;
use shot::shoot;

mod case;
mod injection;
mod seed;
mod shot;

/// The name of this benchmark.
pub(crate) const NAME: &str = "notify";
/// What a table of it says about its figures.
pub(crate) const NOTES: &[&str] = &[
    "exit-inline: no ioeventfd, and the vCPU's thread does the device's work before the guest goes on, which is what the seed calls unmodified (completions and frames that come later have a thread). exit: no ioeventfd, and the exit signals the queue's I/O thread, which is what a refused ioeventfd comes to here. ioeventfd: KVM signals it, without an exit to user space (the seed's patched). process: the same, but the queue, its device and its thread are another process's, on the same memory, and it interrupts by irqfd; the others use KVM_SIGNAL_MSI. All over virtio-mmio with messages. process takes KVM.",
    "blk: an image of 4 MiB in memory, so that no disk is measured; create and seq-read go through it in blocks of 64 KiB, random-read and random-write draw blocks of 4 KiB (the seed does not say how large its were); in flight: the seed's threads. Data are compared.",
    "stream: frames of so many bytes, Ethernet header and all, each kicked for by itself, with 64 slots; the host swallows them (guest-to-host), or sends as fast as the guest has buffers (host-to-guest), and the guest compares them. There is no TCP.",
    "rr: payload bytes each way behind 66 bytes for headers, 65536 in all at most; another thread of the host answers, as netperf's other end does. rate is transactions/s.",
    "mb-per-cpu: megabytes (10^6) a CPU second of the host, guest included, and the owning process's.",
    "kick-stop: from right before the write to the notification address until right after it, by the guest's time stamp counter in ring 3; the mean of a run, and its median (kick-stop-p50). With exit-inline the device's work is in it. It includes the time that the guest is off its CPU meanwhile, which is what colocated threads make of it. A second reading of the counter is in it too (some 20 ns).",
    "kicks, exits (to user space) and interrupts are those a request: a block, a frame, or a transaction.",
    "injection: call is what the host's thread spends on it; latency is from before the call until the handler has counted the interrupt, seen by the host in shared memory from another CPU; the guest is halted, or computes in ring 3, or is stopped (nobody takes the interrupt, so that the call is all there is). The seed's thread says that an irqfd is slower than the call.",
    "On kvm-pvm ring 0 of the guest is emulated at about 1.4 us an instruction: interrupt handlers and going to sleep are dear, on all subjects alike, and a kick from ring 3 takes some 10 us even by an ioeventfd (a few hundred ns with VMX or SVM) where an exit to user space takes some 36. So take ratios from there, and no times.",
    "reference: the seed's own figures, with QEMU and vhost-net of September 2010: FFSB on a disk array (MB/s), netperf TCP_STREAM (Mb/s) and TCP_RR (transactions/s). Other machines, and a network stack on both sides; compare ratios at most. Its unmodified virtio is our exit-inline.",
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
    let mut reference = seed::rows();
    reference.retain(|row| row.case.contains(filter));
    let mut states = injection::STATES.to_vec();
    states.retain(|(_, path)| path.contains(filter));
    if cases.is_empty() && states.is_empty() && reference.is_empty() {
        return Err(BenchError::NoCase(filter.to_owned()));
    }
    let rounds = options.rounds.max(FEWEST_ROUNDS);
    let amount = if options.quick { Amount::QUICK } else { Amount::FULL };
    let subjects = if guest::runs_under_kvm().is_ok() { &Subject::ALL[..] } else { &Subject::ALL[..3] };
    let mut rows = measure(&cases, &states, subjects, AccelChoice::Auto, rounds, amount, progress)?;
    rows.extend(reference);
    Ok(rows)
}

/// Measures, interleaved: every round goes through all cases, and within a case each subject comes first in turn.
fn measure(
    cases: &[(Case, Placement)],
    states: &[(GuestState, &str)],
    subjects: &[Subject],
    accel: AccelChoice,
    rounds: u32,
    amount: Amount,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let mut gathered = Gathered::new(NAME);
    let image = Image::new(case::SPAN)?;
    let (host, guest) = two_cpus();
    for round in 0..rounds {
        for &(case, placement) in cases {
            // Where there is one CPU only, everything is on it.
            let (host, vcpu) = match placement {
                Placement::Separate => (host, guest),
                Placement::Colocated => (guest, guest),
            };
            let _host = host.and_then(Pinned::to);
            // Nobody keeps the two CPUs from each other. On one, the scheduler's choice is what is measured.
            let alone = placement == Placement::Separate && vcpu.is_some();
            let real_time = alone.then(RealTime::enter).flatten();
            let path = format!("{case}/{placement}");
            for turn in 0..subjects.len() {
                let subject = subjects[(turn + round as usize) % subjects.len()];
                progress(&format!("round {} of {rounds}: {path}: {}", round + 1, subject.name()));
                let figures = shoot(case, subject, accel, amount, &image, vcpu, real_time.is_some())
                    .map_err(|reason| broken(subject.name(), format_args!("{path}: {reason}")))?;
                gathered.add(&path, subject.name(), vcpu, figures);
            }
        }
        let _host = host.and_then(Pinned::to);
        let real_time = guest.and_then(|_| RealTime::enter());
        for (state, path) in states {
            progress(&format!("round {} of {rounds}: {path}", round + 1));
            let found = injection::shoot(*state, amount.injections, guest, real_time.is_some())
                .map_err(|reason| broken("injection", format_args!("{path}: {reason}")))?;
            for (subject, figures) in found.into_iter().flatten() {
                gathered.add(path, subject, guest, figures);
            }
        }
    }
    Ok(gathered.rows())
}

#[cfg(test)]
mod tests;
