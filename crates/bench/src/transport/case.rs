//! What is measured: the cases and their paths.

/// A case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) work: Work,
    /// Number of the guest's CPUs.
    pub(super) cpus: u16,
}

/// What the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Request and response on each CPU, in bytes of payload.
    Exchange { request: u32, response: u32 },
    /// Reads of 4 KiB on each CPU, `depth` in flight.
    Read { depth: u32 },
    /// The first request to one disk, whatever the number of CPUs.
    Boot,
}

/// Numbers of CPUs.
const ONE: &[u16] = &[1];
const SEVERAL: &[u16] = &[1, 2, 4];
/// Each work, and the numbers of CPUs that it is measured with.
const WORK: [(Work, &[u16]); 5] = [
    (Work::Exchange { request: 32, response: 1024 }, SEVERAL),
    (Work::Exchange { request: 1, response: 1 }, ONE),
    (Work::Read { depth: 1 }, SEVERAL),
    (Work::Read { depth: 32 }, SEVERAL),
    (Work::Boot, SEVERAL),
];

impl Case {
    /// Most CPUs of a case.
    pub(super) const MAX_CPUS: usize = 4;

    /// Every case, or only those with one CPU.
    pub(super) fn all(one_cpu: bool) -> Vec<Self> {
        let of = |&(work, cpus): &(Work, &'static [u16])| cpus.iter().map(move |&cpus| Self { work, cpus });
        WORK.iter().flat_map(of).filter(|case| case.cpus == 1 || !one_cpu).collect()
    }

    /// The same work on one CPU, to compare the rate with; `None`: there is no rate to compare.
    pub(super) fn on_one_cpu(self) -> Option<Self> {
        (self.cpus > 1 && self.work != Work::Boot).then_some(Self { cpus: 1, ..self })
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.work {
            Work::Exchange { request, response } => write!(f, "net/{request}/{response}")?,
            Work::Read { depth } => write!(f, "blk/read4k/depth{depth}")?,
            Work::Boot => write!(f, "boot")?,
        }
        if self.cpus > 1 { write!(f, "/cpus{}", self.cpus) } else { Ok(()) }
    }
}
