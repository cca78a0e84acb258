//! `paravane bench transport`: mmio, mmio with messages, and PCI (the table of the virtio-mmio seed of 2019).
//!
//! A sample is a whole run of the microVM with one device, of which the measured phase alone counts:
//!
//! ```text
//! for round { for case { for transport { boot -> set up -> [ measured phase ] -> verify } } }
//! ```
//! **Subjects**: `mmio`, `mmio-msi`, `pci`. **Cases**:
//!
//! * `net/32/1024`, `net/1/1`: request and response, one outstanding, between the guest's driver and a thread of the host.
//! * `blk/read4k/depth1`, `blk/read4k/depth32`: random reads of 4 KiB from an image in memory.
//!
//! What the transports differ in is the exits that a transaction takes, so those are counted, by what they are about.
//! The seed's own figures are added as they were published, under a case of their own.
use crate::guest::Image;
use crate::machine::{Pinned, RealTime, two_cpus};
use crate::ring::{FEWEST_ROUNDS, broken};
use crate::series::{Gathered, Shots, ratio};
use crate::{BenchError, Options, Row};
use paravane_vmm::{AccelChoice, TransportChoice};
use shot::{Amount, shoot};

mod seed;
mod shot;

/// The name of this benchmark.
pub(crate) const NAME: &str = "transport";
/// Rounds for each one that is asked for: what two transports do not differ in has to come out equal to a percent, while a
/// host's speed drifts by ten.
const SHORT: u32 = 3;
/// The transports, the seed's base first.
const TRANSPORTS: [TransportChoice; 3] =
    [TransportChoice::Mmio, TransportChoice::MmioMsi, TransportChoice::Pci];
/// What a table of it says about its figures.
pub(crate) const NOTES: &[&str] = &[
    "net/REQUEST/RESPONSE: payload bytes, one request outstanding, behind 66 bytes each way, which is what netperf's TCP takes (Ethernet, IPv4, TCP with time stamps): frames of 98 and 1090 bytes, or of 67 and 67, none below Ethernet's least. The 66 bytes are no real headers but pattern, and every frame is compared. Another thread of the host answers, as netperf's other end does.",
    "blk/read4k: random reads of 4 KiB out of 256 KiB in memory, each compared by the guest.",
    "exits are those to user space, by what they are about. kernel-notify and kernel-eoi never get there: a kick that KVM turns into an eventfd, and the end of an interrupt, which KVM's APIC takes (by the guest's count of interrupts that it took: several that are raised before it takes one are one). With the thread machine exits are the accesses that would have been some.",
    "mmio reads the interrupt status and acknowledges what it finds, two exits; mmio-msi and pci do neither. The guest sleeps between kick and answer, so that each transaction takes an interrupt.",
    "rate-to-mmio, rate-to-pci: the medians of what the rates of mmio-msi are to theirs round by round, so that a host whose speed drifts is the same for both.",
    "cpu is that of the whole process, guest included, in the measured phase.",
    "On kvm-pvm an instruction that the guest executes in ring 0 (its interrupt stubs: some five for each interrupt, on every transport alike) is emulated at about 1.4 us, so an interrupt is dearer than with VMX or SVM, and exits have other prices. Take no time or rate from there for another host; exits an interrupt are the same.",
    "reference: the seed's own figures (netperf TCP_RR 32,1024, three runs of 30 s, December 2019). Another machine, and a network stack on both sides; compare ratios at most.",
];

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    /// Payload bytes there and back.
    Exchange { request: u32, response: u32 },
    /// Reads of 4 KiB, so many in flight.
    Read { depth: u32 },
}

impl Case {
    const ALL: [Self; 4] = [
        Self::Exchange { request: 32, response: 1024 },
        Self::Exchange { request: 1, response: 1 },
        Self::Read { depth: 1 },
        Self::Read { depth: 32 },
    ];
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exchange { request, response } => write!(f, "net/{request}/{response}"),
            Self::Read { depth } => write!(f, "blk/read4k/depth{depth}"),
        }
    }
}

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let filter = options.filter.as_deref().unwrap_or("");
    let mut cases = Case::ALL.to_vec();
    cases.retain(|case| case.to_string().contains(filter));
    let mut reference = seed::rows();
    reference.retain(|row| row.case.contains(filter));
    if cases.is_empty() && reference.is_empty() {
        return Err(BenchError::NoCase(filter.to_owned()));
    }
    let rounds = options.rounds.max(FEWEST_ROUNDS).saturating_mul(SHORT);
    let mut rows = measure(&cases, AccelChoice::Auto, rounds, Amount::FULL, progress)?;
    rows.extend(reference);
    Ok(rows)
}

/// Measures, interleaved: every round goes through all cases, and within a case the transports take turns, each of them the
/// first one in turn. A round's figure is the median of its shots: a busy host then has to be busy for longer than one.
/// The guest has a CPU, and everything else has another.
fn measure(
    cases: &[Case],
    accel: AccelChoice,
    rounds: u32,
    amount: Amount,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let mut gathered = Gathered::new(NAME);
    let image = Image::new(shot::SPAN)?;
    let (io, vcpu) = two_cpus();
    let _host = io.and_then(Pinned::to);
    // Everything sleeps when it has nothing to do, so that two CPUs never have to be shared; with one, they would.
    let real_time = vcpu.and_then(|_| RealTime::enter());
    for round in 0..rounds {
        for case in cases {
            let mut shots = TRANSPORTS.map(|transport| (transport.name(), Shots::default()));
            for turn in 0..TRANSPORTS.len() * amount.shots {
                let at = (turn + turn / TRANSPORTS.len() + round as usize) % TRANSPORTS.len();
                let transport = TRANSPORTS[at];
                progress(&format!("round {} of {rounds}: {case}: {}", round + 1, transport.name()));
                let figures = shoot(*case, transport, accel, amount, &image, vcpu, real_time.is_some())
                    .map_err(|reason| broken(transport.name(), format_args!("{case}: {reason}")))?;
                shots[at].1.add(figures);
            }
            let path = case.to_string();
            let [mmio, msi, pci] =
                shots.map(|(subject, shots)| (subject, shots.medians().collect::<Vec<_>>()));
            // Within a round they had the same host, however fast that was.
            let relative = ratio(&msi.1, &mmio.1, "rate-to-mmio").into_iter().chain(ratio(
                &msi.1,
                &pci.1,
                "rate-to-pci",
            ));
            let relative: Vec<_> = relative.collect();
            for (subject, figures) in [mmio, msi, pci] {
                gathered.add(&path, subject, vcpu, figures);
            }
            gathered.add(&path, TransportChoice::MmioMsi.name(), vcpu, relative);
        }
    }
    Ok(gathered.rows())
}

#[cfg(test)]
mod tests;
