//! The cases: storage, layout, work, requests in flight.
use crate::BenchError;
use crate::meter::SampleLength;
use std::fmt;
use std::time::Duration;

/// Bytes of the image.
pub(super) const SPAN: u64 = 256 << 20;
/// Requests in flight.
const DEPTHS: [usize; 4] = [1, 4, 32, 128];
/// Requests in flight with O_DIRECT.
const FEW_DEPTHS: [usize; 2] = [1, 32];
/// Requests in flight with qcow2 images, and to a server.
const THREE_DEPTHS: [usize; 3] = [1, 32, 128];

/// Where the image is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    /// In memory (`/dev/shm`).
    Tmpfs,
    /// In the current directory.
    Disk,
    /// In the current directory, with O_DIRECT.
    Direct,
    /// In memory, in qcow2 format.
    Qcow2,
    /// In memory, behind an NBD server.
    Nbd,
    /// The same, whose answers take a millisecond more.
    NbdFar,
    /// In memory, in qcow2 format, behind an NBD server.
    Qcow2Nbd,
    /// In a Ceph cluster.
    Rbd,
    /// In the current directory, behind an HTTP server; all chunks are in a cache there.
    HttpCached,
}

impl Storage {
    pub(super) const ALL: [Self; 9] = [
        Self::Tmpfs,
        Self::Disk,
        Self::Direct,
        Self::Qcow2,
        Self::Nbd,
        Self::NbdFar,
        Self::Qcow2Nbd,
        Self::Rbd,
        Self::HttpCached,
    ];

    /// Name in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tmpfs => "tmpfs",
            Self::Disk => "disk",
            Self::Direct => "direct",
            Self::Qcow2 => "qcow2",
            Self::Nbd => "nbd",
            Self::NbdFar => "nbd-1ms",
            Self::Qcow2Nbd => "qcow2-over-nbd",
            Self::Rbd => "rbd",
            Self::HttpCached => "http-cached",
        }
    }

    /// Whether the image is in qcow2 format.
    pub(super) fn is_qcow2(self) -> bool {
        matches!(self, Self::Qcow2 | Self::Qcow2Nbd)
    }

    /// Whether the image is behind an NBD server.
    pub(super) fn is_remote(self) -> bool {
        matches!(self, Self::Nbd | Self::NbdFar | Self::Qcow2Nbd)
    }

    /// Whether work of this kind is measured with it.
    fn takes(self, work: Work) -> bool {
        match self {
            Self::NbdFar => work.bytes == 4096,
            Self::HttpCached => !work.write,
            _ => true,
        }
    }

    /// Whether the image, or what stands for it here, is in memory.
    pub(super) fn in_memory(self) -> bool {
        !matches!(self, Self::Disk | Self::Direct | Self::HttpCached)
    }
}

/// Direction, order and size of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub(super) write: bool,
    pub(super) sequential: bool,
    /// Bytes of a request, a multiple of 4096.
    pub(super) bytes: u64,
}

impl Work {
    /// The work that touches the whole image once, before anything is measured.
    pub(super) const WARM: Self = Self { write: false, sequential: true, bytes: 128 << 10 };
    const ALL: [Self; 4] = [
        Self { write: false, sequential: false, bytes: 4096 },
        Self { write: true, sequential: false, bytes: 4096 },
        Self { write: false, sequential: true, bytes: 128 << 10 },
        Self { write: true, sequential: true, bytes: 128 << 10 },
    ];
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = if self.sequential { "seq-" } else { "" };
        let what = if self.write { "write" } else { "read" };
        write!(f, "{order}{what}{}k", self.bytes >> 10)
    }
}

/// A case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) storage: Storage,
    pub(super) packed: bool,
    pub(super) work: Work,
    pub(super) depth: usize,
    /// Whether the client is libblkio's blkio-bench.
    pub(super) blkio: bool,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = if self.packed { "packed" } else { "split" };
        let client = if self.blkio { "blkio/" } else { "" };
        write!(f, "{client}{}/{layout}/{}/depth{}", self.storage.name(), self.work, self.depth)
    }
}

impl Case {
    /// Every case; with `quick`, those of raw images in memory.
    pub(super) fn all(quick: bool) -> Vec<Self> {
        let storages = if quick { &Storage::ALL[..1] } else { &Storage::ALL[..] };
        let mut all = Vec::new();
        for &storage in storages {
            // Storage and layout are independent: few cases suffice for the others.
            let (layouts, depths) = match storage {
                Storage::Tmpfs | Storage::Disk => (&[false, true][..], &DEPTHS[..]),
                Storage::Direct => (&[false][..], &FEW_DEPTHS[..]),
                Storage::Qcow2
                | Storage::Nbd
                | Storage::NbdFar
                | Storage::Qcow2Nbd
                | Storage::Rbd
                | Storage::HttpCached => (&[false][..], &THREE_DEPTHS[..]),
            };
            for &packed in layouts {
                for work in Work::ALL.into_iter().filter(|&work| storage.takes(work)) {
                    let case = |&depth| Self { storage, packed, work, depth, blkio: false };
                    all.extend(depths.iter().map(case));
                }
            }
        }
        if !quick {
            // It writes what it likes: with reads, the image stays as it is.
            let work = Work { write: false, sequential: false, bytes: 4096 };
            let storage = Storage::Tmpfs;
            let case = |depth| Self { storage, packed: false, work, depth, blkio: true };
            all.extend(FEW_DEPTHS.map(case));
        }
        all
    }

    /// Selects the cases for busy CPUs: raw images in memory, split rings, at most 32 in flight.
    ///
    /// # Errors
    /// No case matches.
    pub(super) fn select_contended(filter: &str) -> Result<Vec<Self>, BenchError> {
        let mut all = Self::all(true);
        all.retain(|case| !case.packed && case.depth <= 32);
        crate::options::select(all, filter)
    }

    /// Selects the cases whose path contains `filter` and whose programs are `present`.
    ///
    /// # Errors
    /// No case matches.
    pub(super) fn select(filter: &str, quick: bool, present: Present) -> Result<Vec<Self>, BenchError> {
        let mut all = Self::all(quick);
        let has = |case: &Self| {
            (present.qcow2 || !case.storage.is_qcow2())
                && (present.blkio || !case.blkio)
                && (present.nbd || !case.storage.is_remote())
                && (present.rbd || case.storage != Storage::Rbd)
                && (present.http || case.storage != Storage::HttpCached)
        };
        all.retain(has);
        crate::options::select(all, filter)
    }
}

/// What this host has for cases that need more than our program.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Present {
    /// A program that makes qcow2 images.
    pub(super) qcow2: bool,
    /// libblkio's `blkio-bench`.
    pub(super) blkio: bool,
    /// An NBD server.
    pub(super) nbd: bool,
    /// A Ceph cluster.
    pub(super) rbd: bool,
    /// An HTTP server.
    pub(super) http: bool,
}

/// Windows of a full sample.
pub(super) const FULL: SampleLength = SampleLength {
    warm_up: Duration::from_millis(20),
    timed: Duration::from_millis(90),
    counted: Duration::from_millis(20),
};
/// Windows of a sample beside busy threads: long beside their time slices.
pub(super) const CONTENDED: SampleLength = SampleLength {
    warm_up: Duration::from_millis(50),
    timed: Duration::from_millis(400),
    counted: Duration::from_millis(50),
};
/// Windows of a sample with `--quick`.
pub(super) const QUICK: SampleLength = SampleLength {
    warm_up: Duration::from_millis(10),
    timed: Duration::from_millis(30),
    counted: Duration::from_millis(10),
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_stable() {
        let names: Vec<String> = Case::all(false).iter().map(Case::to_string).collect();
        assert_eq!(names.len(), 64 + 8 + 12 + 12 + 6 + 12 + 12 + 6 + 2);
        for name in [
            "tmpfs/split/read4k/depth1",
            "tmpfs/packed/write4k/depth32",
            "disk/split/seq-read128k/depth4",
            "disk/packed/seq-write128k/depth128",
            "direct/split/read4k/depth1",
            "qcow2/split/write4k/depth32",
            "blkio/tmpfs/split/read4k/depth32",
            "nbd/split/seq-write128k/depth128",
            "nbd-1ms/split/read4k/depth128",
            "qcow2-over-nbd/split/read4k/depth1",
            "rbd/split/seq-read128k/depth32",
            "http-cached/split/read4k/depth32",
        ] {
            assert!(names.iter().any(|known| known == name), "{name}");
        }
        assert!(!names.iter().any(|name| name.starts_with("http-cached/") && name.contains("write")));
    }

    #[test]
    fn cases_without_their_program_are_left_out() {
        let wanted = |http| Case::select("http-cached/", false, Present { http, ..Present::default() });
        assert_eq!(wanted(true).unwrap().len(), 2 * 3);
        assert!(matches!(wanted(false), Err(BenchError::NoCase(_))));
    }

    #[test]
    fn a_filter_selects() {
        let selected = Case::select("tmpfs/split/read4k/depth1", false, Present::default()).unwrap();
        assert_eq!(selected.len(), 2, "depth 1 and 128: {selected:?}");
        assert_eq!(Case::select_contended("").unwrap().len(), 4 * 3);
        assert!(matches!(
            Case::select("disk/", true, Present { qcow2: true, ..Present::default() }),
            Err(BenchError::NoCase(_))
        ));
    }
}
