//! `paravane bench dma`: the cost of an access to guest memory.
//!
//! The questions are those of "drm/i915/gvt: subsitute kvm_read/write_guest with vfio_dma_rw" (Yan
//! Zhao, Linux, 2020).
//!
//! The path of a case is `WORK/regionsR/mapsM/PATTERN`:
//!
//! * `WORK`: reads or writes of one size, or the mix of the series.
//! * `R`: regions of guest memory.
//! * `M`: mappings of the device's address space; one of everything, or scattered pages.
//! * `PATTERN`: `repeated` uses sixteen ranges in turn, as a queue uses its buffers; `random` draws
//!   a page for each access.
//!
//! Cases with threads (`threadsT/spacesS/WORK`) are in [`threads`].
//!
//! | subject | accesses |
//! |---|---|
//! | `memcpy` | host memory, without checks |
//! | `memcpy/pages` | the same pages as behind the domain, copied one by one |
//! | `paravane` | guest-physical addresses, through an access guard |
//! | `paravane/log` | the same, with the dirty log on |
//! | `paravane/iova` | device addresses, behind a domain |
//! | `paravane/iova+log` | device addresses, with the dirty log on |
//! | `paravane/mutex`, `paravane/rwlock` | as `iova+log`, with a lock per access |
//! | `vm-memory`, `/bitmap`, `/iommu` | the crate: plain, `AtomicBitmap`, `IommuMemory` |
//!
//! An access guard lives for 32 accesses. All subjects of a case access the same pages of the host.
use crate::instructions::Counter;
use crate::machine::ThreadPlacement;
use crate::machine::{Pinned, load_average};
use crate::options::MIN_ROUNDS;
use crate::subject::{PARAVANE, Subject};
use crate::{BenchError, Options, Row, published};
use fixture::Fixture;
use ops::{Ops, PAGE, Work};
use shape::{IOVA, SIZE, Shape};
use std::fmt;
use std::time::Duration;
use subjects::{LOOP, SCATTERED, subject, translated};
use timing::{Origin, SLICE, Timed, overhead};

mod fixture;
mod memcpy;
pub(crate) mod ops;
pub(crate) mod paravane;
mod shape;
mod subjects;
mod threads;
pub(crate) mod timing;
#[cfg(feature = "peers")]
mod vm_memory;

/// The name of this benchmark.
pub(crate) const NAME: &str = "dma";
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "A figure is one access. The time of the empty loop is subtracted. cycles: time stamp counter.",
    "memcpy: host memory, without checks. memcpy/pages: the same, page by page in the order of the domain's mappings.",
    "paravane: guest-physical addresses, through an access guard. The guard lives for 32 accesses, and its cost is included.",
    "/iova: device addresses, translated by a domain. /log: dirty log on. /mutex, /rwlock: as iova+log, with a lock of the address space per access.",
    "vm-memory: the crate. /bitmap: with its dirty bitmap. /iommu: with its IOTLB.",
    "repeated: sixteen ranges in turn. random: a random mapped page per access. Guest memory has 64 MiB; the addresses of maps100000 have 400 MiB.",
    "threadsT/spacesS: T threads in S address spaces. scaling: rate relative to one thread in the same round.",
    "--filter also selects cases that the default run omits (other regions, mappings, patterns).",
    "published: cycles per access in the kernel, GVT-g with glmark2 in one guest and in two; its timer took about 20 of them. Do not compare.",
];

/// One case with one thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    work: Work,
    shape: Shape,
    random: bool,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { regions, mappings } = self.shape;
        let pattern = if self.random { "random" } else { "repeated" };
        write!(f, "{}/regions{regions}/maps{mappings}/{pattern}", self.work)
    }
}

const REGIONS: [u64; 3] = [1, 4, 64];
const MAPPINGS: [u64; 3] = [1, 256, 100_000];

impl Case {
    /// Every combination.
    fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for regions in REGIONS {
            for mappings in MAPPINGS {
                for random in [false, true] {
                    cases.extend(ops::works().map(|work| Self {
                        work,
                        shape: Shape { regions, mappings },
                        random,
                    }));
                }
            }
        }
        cases
    }

    /// Whether a run without a filter includes it.
    ///
    /// It includes the table of the 2020 series, and small accesses by number of mappings and
    /// regions.
    fn default(self) -> bool {
        let Shape { regions, mappings } = self.shape;
        match (regions, mappings, self.random) {
            (1, 256, false) => true,
            (1, _, true) => matches!(self.work, Work::Read(64) | Work::Write(64)),
            (4 | 64, 1, true) => self.work == Work::Read(64),
            _ => false,
        }
    }

    /// The subjects.
    fn subjects(self) -> Vec<&'static str> {
        let mut names = vec![PARAVANE, "paravane/log", "paravane/iova", "paravane/iova+log"];
        if self.shape.regions == 1 {
            names.insert(0, "memcpy");
            if self.shape.mappings > 1 {
                names.insert(1, SCATTERED);
            }
        }
        if !self.random {
            names.extend(["paravane/mutex", "paravane/rwlock"]);
        }
        if cfg!(feature = "peers") {
            names.extend(["vm-memory", "vm-memory/bitmap", "vm-memory/iommu"]);
        }
        names
    }

    fn ops(self, name: &str) -> Ops {
        // The same amount of memory by either kind of address, within guest memory.
        let span = self.shape.span();
        let (first, span) = if translated(name) { (IOVA, span) } else { (0, span.min(SIZE)) };
        Ops::new(self.work, self.random, first, span)
    }
}

/// Whether this is the path of a case with one thread.
pub(crate) fn is_single(path: &str) -> bool {
    Case::all().iter().any(|case| case.to_string() == path)
}

/// Makes a subject of a case with one thread.
///
/// # Errors
/// No such case or subject exists, or it cannot be set up.
pub(crate) fn make(path: &str, name: &str) -> Result<Box<dyn Subject>, BenchError> {
    let case = Case::all().into_iter().find(|case| case.to_string() == path);
    let case = case.ok_or_else(|| BenchError::NoCase(path.to_owned()))?;
    let fixture = Fixture::new(case.shape)?;
    subject(name, &fixture, case.ops(name), case.work.longest())
        .map(|subject| -> Box<dyn Subject> { subject })
}

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let wanted = |path: String, default: bool| match &options.filter {
        Some(filter) => path.contains(filter),
        None => default,
    };
    let singles: Vec<Case> =
        Case::all().into_iter().filter(|case| wanted(case.to_string(), case.default())).collect();
    let threaded: Vec<threads::Case> =
        threads::Case::all().into_iter().filter(|case| wanted(case.to_string(), case.default())).collect();
    let mut published = published::vfio_dma_rw::rows();
    published.retain(|row| wanted(row.case.clone(), true));
    if singles.is_empty() && threaded.is_empty() && published.is_empty() {
        return Err(BenchError::NoCase(options.filter.clone().unwrap_or_default()));
    }
    let rounds = options.rounds.max(MIN_ROUNDS);
    let mut rows = measure(&singles, &threaded, rounds, SLICE, threads::RUN_TIME, progress)?;
    rows.extend(published);
    Ok(rows)
}

/// Measures all cases and subjects, interleaved.
fn measure(
    singles: &[Case],
    threaded: &[threads::Case],
    rounds: u32,
    slice: Duration,
    run: Duration,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let load_start = load_average();
    // Must precede pinning this thread to one CPU.
    let placement = ThreadPlacement::choose();
    let mut fixtures: Vec<Fixture> = Vec::new();
    let mut timed = Vec::new();
    let mut counter = Counter::choose(progress);
    let pinned = Pinned::here();
    for &case in singles {
        let at = match fixtures.iter().position(|fixture| fixture.shape == case.shape) {
            Some(at) => at,
            None => {
                progress(&format!("{case}: allocating memory"));
                fixtures.push(Fixture::touched(case.shape)?);
                fixtures.len() - 1
            }
        };
        let of_case: Result<Vec<Timed>, _> = std::iter::once(LOOP)
            .chain(case.subjects())
            .map(|name| {
                let subject = subject(name, &fixtures[at], case.ops(name), case.work.longest())?;
                Timed::new(case.to_string(), name, subject, slice)
            })
            .collect();
        timed.push((case, of_case?));
    }
    drop(pinned);
    let mut groups = threads::groups(threaded, &placement, run, progress)?;
    let pinned = Pinned::here();
    let pinned_cpu = pinned.as_ref().map(Pinned::cpu);
    for number in 0..rounds as usize {
        for (case, of_case) in &mut timed {
            progress(&format!("round {} of {rounds}: {case}", number + 1));
            // A step takes microseconds, and a string instruction takes a step per byte.
            let countable = counter.is_hardware() || case.work.longest() < PAGE as usize;
            timing::sample(of_case, number, countable.then_some(&mut counter))?;
        }
        if !groups.is_empty() {
            progress(&format!("round {} of {rounds}: allocating memory for the threads", number + 1));
            let fixtures = threads::Fixtures::new()?;
            for group in groups.iter_mut().flatten() {
                group.enter(&fixtures, number)?;
            }
        }
        for of_work in &mut groups {
            let subjects = of_work.len();
            for turn in 0..subjects {
                let group = &mut of_work[(turn + number) % subjects];
                progress(&format!(
                    "round {} of {rounds}: threads: {}: {}",
                    number + 1,
                    group.work,
                    group.name
                ));
                group.sample(&placement)?;
            }
        }
    }
    let origin =
        Origin { bench: NAME, counter: counter.method(), pinned_cpu, load: [load_start, load_average()] };
    let mut rows = Vec::new();
    for (_, of_case) in &timed {
        if let [alone, subjects @ ..] = of_case.as_slice() {
            rows.extend(subjects.iter().flat_map(|entry| entry.rows(Some(alone), &origin)));
        }
    }
    rows.extend(groups.iter().flatten().flat_map(|group| group.rows(&placement, &origin)));
    if !timed.is_empty() {
        rows.extend(overhead(&origin, rounds));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::memcpy::{Memcpy, Scattered};
    use super::paravane::Paravane;
    use super::*;

    #[test]
    fn paths_are_distinct_and_the_default_is_a_part() {
        let all = Case::all();
        let mut paths: Vec<String> = all.iter().map(Case::to_string).collect();
        assert!(paths.contains(&"read/4KiB/regions1/maps256/repeated".to_owned()));
        paths.sort();
        paths.dedup();
        assert_eq!(paths.len(), all.len());
        let default = all.iter().filter(|case| case.default()).count();
        assert_eq!(default, 11 + 2 * 3 + 2);
    }

    /// Every address of a case is valid for every subject.
    #[test]
    fn every_subject_of_every_shape_runs() {
        for shape in [(1, 1), (1, 256), (4, 256), (1, 100_000)] {
            let shape = Shape { regions: shape.0, mappings: shape.1 };
            let fixture = Fixture::new(shape).unwrap();
            for random in [false, true] {
                for work in ops::works() {
                    let case = Case { work, shape, random };
                    assert!(is_single(&case.to_string()));
                    for name in case.subjects().into_iter().chain([LOOP]) {
                        let mut subject = subject(name, &fixture, case.ops(name), work.longest()).unwrap();
                        subject.run(2).unwrap_or_else(|error| panic!("{case}: {name}: {error}"));
                    }
                }
            }
        }
    }

    /// All subjects access the same memory: each reads what the previous one wrote.
    #[test]
    fn all_subjects_access_the_same_memory() {
        use timing::{MemoryAccess, Target};
        fn poke(target: &mut impl Target, addr: u64, value: u32) -> u32 {
            let guard = target.enter();
            let old = guard.read4(addr).unwrap();
            guard.write4(addr, value).unwrap();
            old
        }
        let shape = Shape { regions: 1, mappings: 256 };
        let fixture = Fixture::new(shape).unwrap();
        let (iova, gpa, _) = shape.map().nth(77).unwrap();
        let mut last = 0;
        let mut next = |target_poke: &mut dyn FnMut(u32) -> u32| {
            assert_eq!(target_poke(last + 1), last);
            last += 1;
        };
        next(&mut |value| poke(&mut Memcpy::new(&fixture).unwrap(), gpa, value));
        next(&mut |value| poke(&mut Scattered::new(&fixture).unwrap(), iova, value));
        next(&mut |value| poke(&mut <Paravane>::direct(&fixture.plain), gpa, value));
        next(&mut |value| poke(&mut <Paravane>::behind(&fixture.domain), iova, value));
        next(&mut |value| poke(&mut <Paravane>::behind(&fixture.logged), iova, value));
        #[cfg(feature = "peers")]
        {
            next(&mut |value| poke(&mut fixture.peers.plain().unwrap(), gpa, value));
            next(&mut |value| poke(&mut fixture.peers.logged().unwrap(), gpa, value));
            next(&mut |value| poke(&mut fixture.peers.translated().unwrap(), iova, value));
        }
    }

    #[test]
    fn a_measurement_has_its_rows() {
        let case = Case { work: Work::Write(64), shape: Shape { regions: 1, mappings: 256 }, random: false };
        let threaded = &threads::Case::all()[..2];
        let tiny = Duration::from_micros(20);
        let rows = measure(&[case], threaded, 2, tiny, tiny, &mut |_| {}).unwrap();
        let subjects: Vec<&str> = rows
            .iter()
            .filter(|row| row.case == case.to_string() && row.metric == "time")
            .map(|row| row.subject.as_str())
            .collect();
        assert_eq!(subjects, case.subjects());
        assert!(rows.iter().any(|row| row.case == threaded[0].to_string() && row.metric == "rate"));
        for row in rows.iter().filter(|row| row.case == threaded[1].to_string() && row.metric == "rate") {
            let scaling = rows.iter().find(|other| {
                (&other.case, &other.subject, &*other.metric) == (&row.case, &row.subject, "scaling")
            });
            assert!(scaling.is_some_and(|scaling| scaling.median > 0.0), "{}: {}", row.case, row.subject);
        }
        assert!(rows.iter().any(|row| row.case == "overhead/timer"));
    }
}
