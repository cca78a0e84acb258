//! The sequence of accesses of a case.
use std::fmt;

/// One access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Op {
    /// Guest-physical or device address.
    pub(crate) addr: u64,
    /// Length in bytes.
    pub(crate) len: u32,
    /// Whether the device writes.
    pub(crate) write: bool,
}

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;
/// Ranges of a case with repeated accesses, which stand for the buffers of a queue.
const RANGES: u64 = 16;
/// Accesses in the table of the mix.
const MIX: usize = 1024;
/// Sizes below a page in the mix. The 2020 series does not state them.
const BELOW_A_PAGE: [u32; 6] = [4, 16, 64, 256, 1024, 2048];

/// The work of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Reads of this many bytes.
    Read(u32),
    /// Writes of this many bytes.
    Write(u32),
    /// The mix of the 2020 series: 63 % reads, 48 % of them of one page.
    ///
    /// The rest is below a page.
    Mix,
}

/// 4 bytes, a cache line, 1, 5 and 20 pages.
const SIZES: [u32; 5] = [4, 64, PAGE as u32, 5 * PAGE as u32, 20 * PAGE as u32];
/// The work of all cases.
pub(super) fn works() -> impl Iterator<Item = Work> {
    SIZES.into_iter().flat_map(|len| [Work::Read(len), Work::Write(len)]).chain([Work::Mix])
}

impl Work {
    /// Length of the longest access in bytes.
    pub(crate) fn longest(self) -> usize {
        match self {
            Self::Read(len) | Self::Write(len) => len as usize,
            Self::Mix => PAGE as usize,
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(len) => write!(f, "read/{}", Bytes(*len)),
            Self::Write(len) => write!(f, "write/{}", Bytes(*len)),
            Self::Mix => f.write_str("mix"),
        }
    }
}

/// A number of bytes, formatted for paths.
pub(crate) struct Bytes(pub(crate) u32);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            len if len >= 1024 && len.is_multiple_of(1024) => write!(f, "{}KiB", len / 1024),
            len => write!(f, "{len}B"),
        }
    }
}

/// An endless sequence of accesses.
#[derive(Clone, Debug)]
pub(crate) enum Ops {
    /// A table of accesses, in turn.
    Repeated {
        /// The accesses.
        table: Vec<Op>,
        /// Index of the next access.
        next: usize,
    },
    /// Accesses to random pages.
    Random {
        /// State of the generator.
        state: u64,
        /// Number of the first page.
        first: u64,
        /// Number of pages.
        pages: u64,
        /// Length in bytes.
        len: u32,
        /// Whether the device writes.
        write: bool,
    },
}

/// The next number of a generator (xorshift64).
fn draw(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

impl Ops {
    /// Accesses inside `first .. first + span`, in bytes, whole pages.
    pub(crate) fn new(work: Work, random: bool, first: u64, span: u64) -> Self {
        let mut state = 0x9e37_79b9_7f4a_7c15;
        let (len, write) = match work {
            Work::Read(len) => (len, false),
            Work::Write(len) => (len, true),
            Work::Mix => {
                let table = (0..MIX).map(|_| mixed(&mut state, first, span)).collect();
                return Self::Repeated { table, next: 0 };
            }
        };
        // An access must end inside.
        let pages = (span / PAGE).saturating_sub(u64::from(len).div_ceil(PAGE)) + 1;
        if random {
            return Self::Random { state, first: first / PAGE, pages, len, write };
        }
        let at = |i: u64| {
            // Irregular distances: regular ones compete for few cache sets.
            let page = (i * pages / RANGES + i * i % (pages / RANGES).max(1)).min(pages - 1);
            // Small accesses are spread over the lines of their pages; others start at a page.
            let offset = if u64::from(len) < PAGE / 2 { i * 128 % (PAGE / 2) } else { 0 };
            Op { addr: first + page * PAGE + offset, len, write }
        };
        Self::Repeated { table: (0..RANGES).map(at).collect(), next: 0 }
    }

    /// Fills `out` with the next accesses.
    #[inline(always)]
    pub(crate) fn fill(&mut self, out: &mut [Op]) {
        match self {
            Self::Repeated { table, next } => {
                for op in out {
                    *op = table[*next];
                    *next += 1;
                    if *next == table.len() {
                        *next = 0;
                    }
                }
            }
            Self::Random { state, first, pages, len, write } => {
                for op in out {
                    let number = draw(state);
                    // The upper half of a product of 32-bit numbers is evenly spread, and faster
                    // than a remainder.
                    let page = *first + (((number & 0xffff_ffff) * *pages) >> 32);
                    let line = if u64::from(*len) < PAGE / 2 { (number >> 58) * 64 % (PAGE / 2) } else { 0 };
                    *op = Op { addr: page * PAGE + line, len: *len, write: *write };
                }
            }
        }
    }
}

/// One access of the mix, in any page.
fn mixed(state: &mut u64, first: u64, span: u64) -> Op {
    let percent = |state: &mut u64| draw(state) % 100;
    let write = percent(state) >= 63;
    let page = first + draw(state) % (span / PAGE) * PAGE;
    if !write && percent(state) < 48 {
        return Op { addr: page, len: PAGE as u32, write };
    }
    let len = BELOW_A_PAGE[(draw(state) % BELOW_A_PAGE.len() as u64) as usize];
    let lines = (PAGE - u64::from(len)) / 64;
    Op { addr: page + draw(state) % (lines + 1) * 64, len, write }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_access_ends_inside() {
        let (first, span) = (64 * PAGE, 32 * PAGE);
        for random in [false, true] {
            for work in [Work::Read(4), Work::Write(64), Work::Read(4096), Work::Write(20 * 4096), Work::Mix]
            {
                let mut ops = Ops::new(work, random, first, span);
                let mut out = [Op::default(); 999];
                ops.fill(&mut out);
                for op in out {
                    assert!(
                        op.addr >= first && op.addr + u64::from(op.len) <= first + span,
                        "{work:?} {op:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_mix_has_the_published_shares() {
        let Ops::Repeated { table, .. } = Ops::new(Work::Mix, false, 0, 256 * PAGE) else {
            panic!("not a table")
        };
        let share = |of: usize, all: usize| of as f64 / all as f64;
        let reads: Vec<&Op> = table.iter().filter(|op| !op.write).collect();
        let pages = reads.iter().filter(|op| u64::from(op.len) == PAGE).count();
        assert!((share(reads.len(), table.len()) - 0.63).abs() < 0.04);
        assert!((share(pages, reads.len()) - 0.48).abs() < 0.04);
        assert!(table.iter().all(|op| !op.write || u64::from(op.len) < PAGE));
    }

    #[test]
    fn repeated_accesses_are_sixteen_ranges() {
        let Ops::Repeated { table, .. } = Ops::new(Work::Read(64), false, 0, 256 * PAGE) else {
            panic!("not a table")
        };
        let mut pages: Vec<u64> = table.iter().map(|op| op.addr / PAGE).collect();
        pages.dedup();
        assert_eq!(pages.len(), 16);
    }
}
