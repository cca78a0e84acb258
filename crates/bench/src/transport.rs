//! `paravane bench transport`: virtio-mmio, with and without messages, and PCI.
//!
//! It repeats the table of "virtio-mmio: add features for virtio-mmio specification version 3" (Liu
//! Jiang and Zha Bin, Linux, 2019). A sample is one run of the microVM with a device for each CPU. Only
//! the measured phase counts:
//!
//! ```text
//! for round { for case { for transport { boot -> set up -> [ measured phase ] -> verify } } }
//! ```
//! **Subjects**: `mmio`, `mmio-msi`, `pci`.
//!
//! **Cases**:
//!
//! * `net/32/1024`, `net/1/1`: request and response between the guest's driver and a thread of the
//!   host, one outstanding.
//! * `blk/read4k/depth1`, `blk/read4k/depth32`: random reads of 4 KiB from an image in memory.
//! * `.../cpus2`, `.../cpus4`: the same on each of 2 and 4 CPUs, beside one CPU in turn.
//! * `boot`: from the start to the first request.
//!
//! The transports differ in the exits that a transaction takes. The benchmark counts them by cause.
use crate::error::broken;
use crate::figures::{Collector, RoundSamples, ratio};
use crate::guest::Image;
use crate::machine::{Pinned, RealTime, cpus_apart};
use crate::options::MIN_ROUNDS;
use crate::{BenchError, Options, Row, published};
use case::Case;
use paravane_vmm::{AccelChoice, TransportChoice};
use sample::{Conditions, SampleSize};

mod case;
mod sample;

/// The name of this benchmark.
pub(crate) const NAME: &str = "transport";
/// Rounds per requested round.
///
/// Equal transports must measure equal within 1 %, while the host's speed drifts by 10 %.
const SHORT: u32 = 3;
/// The transports, the base of the comparison first.
const TRANSPORTS: [TransportChoice; 3] =
    [TransportChoice::Mmio, TransportChoice::MmioMsi, TransportChoice::Pci];
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "net/REQUEST/RESPONSE: bytes of payload, one request outstanding. Frames have 66 bytes more each way, as netperf's TCP has (98 and 1090 bytes; 67 and 67). The guest compares every frame. Another host thread answers.",
    "blk/read4k: random reads of 4 KiB from 256 KiB in memory, compared by the guest. depth: requests in flight.",
    "mmio: two exits per interrupt, to read and to acknowledge its status. mmio-msi, pci: none. The guest sleeps between request and answer, so each transaction takes an interrupt.",
    "exits: exits to user space per transaction; of these, -notify are kicks, -status and -acknowledge handle interrupts. In the thread machine, which runs without KVM, they are the accesses that would exit.",
    "kernel-notify, kernel-eoi: exits that KVM handles itself: kicks by ioeventfd, and ends of interrupts.",
    "kvm-exits: all exits by KVM's count, those that it handles included; from Linux 5.14 on.",
    "cpus2, cpus4: the guest has 2 or 4 CPUs, each with a device of its own and the same work. Figures are of all together, latencies of the slowest device. The guest's CPUs are on half of the host's, at most one on each; all else is on the other half. On a host of two CPUs they share one, so a rate grows only by what one of them leaves idle.",
    "rate-to-1cpu: rate relative to a guest with one CPU and one device, measured right after.",
    "boot: start-time from the request for the machine to the guest's first request, and exits until then. There is one disk, whatever the number of CPUs.",
    "rate-to-mmio, rate-to-pci: rate of mmio-msi relative to the others; the median of the ratios of each round, so that drift of the host's speed cancels.",
    "cpu: CPU time of the process, guest included.",
    "On kvm-pvm, the guest's interrupt handler is emulated at about 1.4 us per instruction, for every transport. Do not compare times or rates with other hosts; exits per interrupt are the same.",
    "published: netperf TCP_RR 32,1024; three runs of 30 s. Compare ratios at most.",
];

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let filter = options.filter.as_deref().unwrap_or("");
    let mut cases = Case::all(options.quick);
    cases.retain(|case| case.to_string().contains(filter));
    let mut published = published::virtio_mmio_v3::rows();
    published.retain(|row| row.case.contains(filter));
    if cases.is_empty() && published.is_empty() {
        return Err(BenchError::NoCase(filter.to_owned()));
    }
    let rounds = options.rounds.max(MIN_ROUNDS).saturating_mul(SHORT);
    let mut rows = measure(&cases, AccelChoice::Auto, rounds, SampleSize::FULL, progress)?;
    rows.extend(published);
    Ok(rows)
}

/// Measures all cases, interleaved.
///
/// Within a case the transports take turns, and the first one rotates. The median sample stands for
/// the round, so that a short disturbance does not count. The guest has one half of the CPUs, all
/// else the other.
fn measure(
    cases: &[Case],
    accel: AccelChoice,
    rounds: u32,
    size: SampleSize,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let mut collector = Collector::new(NAME);
    let images = (0..Case::MAX_CPUS).map(|_| Image::new(sample::SPAN)).collect::<Result<Vec<_>, _>>()?;
    for round in 0..rounds {
        for case in cases {
            let [host, vcpu_cpus] = cpus_apart(case.cpus.into());
            let vcpu = vcpu_cpus.first().copied();
            let _host = Pinned::among(&host);
            // All threads sleep when idle, so two CPUs suffice for real time; one CPU does not.
            let class = vcpu.and_then(|_| RealTime::enter());
            let real_time = class.is_some();
            let conditions = Conditions { accel, size, images: &images, vcpu_cpus: &vcpu_cpus, real_time };
            let mut samples = TRANSPORTS.map(|transport| (transport.name(), RoundSamples::default()));
            for turn in 0..TRANSPORTS.len() * size.samples {
                let at = (turn + turn / TRANSPORTS.len() + round as usize) % TRANSPORTS.len();
                let transport = TRANSPORTS[at];
                progress(&format!("round {} of {rounds}: {case}: {}", round + 1, transport.name()));
                let sample = |case: Case| {
                    let figures = conditions.sample(case, transport);
                    figures.map_err(|reason| broken(transport.name(), format_args!("{case}: {reason}")))
                };
                let mut figures = sample(*case)?;
                if let Some(one) = case.on_one_cpu() {
                    figures.extend(ratio(&figures, &sample(one)?, "rate-to-1cpu"));
                }
                samples[at].1.add(figures);
            }
            let path = case.to_string();
            let [mmio, msi, pci] =
                samples.map(|(subject, samples)| (subject, samples.medians().collect::<Vec<_>>()));
            // Within a round, the host had the same speed for all.
            let relative = ratio(&msi.1, &mmio.1, "rate-to-mmio").into_iter().chain(ratio(
                &msi.1,
                &pci.1,
                "rate-to-pci",
            ));
            let relative: Vec<_> = relative.collect();
            for (subject, figures) in [mmio, msi, pci] {
                collector.add(&path, subject, vcpu, figures);
            }
            collector.add(&path, TransportChoice::MmioMsi.name(), vcpu, relative);
        }
    }
    Ok(collector.rows())
}

#[cfg(test)]
mod tests;
