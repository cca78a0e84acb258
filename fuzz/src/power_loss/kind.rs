//! The kinds of disks that are tried.
use std::ops::RangeInclusive;

/// The file below an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Base {
    None,
    Raw,
    Qcow2,
}

/// Format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Raw,
    /// Made by `qemu-img` with these options.
    Qcow2 {
        version: u32,
        cluster: u64,
        refcount_bits: u32,
    },
}

/// What else an image has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extra {
    Nothing,
    /// An internal snapshot, which shares clusters with the disk.
    Snapshot,
    LazyRefcounts,
    /// A dirty bitmap.
    Bitmap,
    /// Compressed clusters.
    Compressed,
    /// The disk changes its size.
    Resizes,
    /// The disk is full but for its end, and so is the refcount table.
    Full,
    /// The disk changes its size, and with it an L1 table of more clusters than half a refcount block counts.
    LongL1,
    /// The clusters of the disk are in random order. The guest discards most of the disk at once.
    Scattered,
}

/// A kind of disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) name: String,
    pub(super) format: Format,
    pub(super) base: Base,
    pub(super) extra: Extra,
    /// Bytes of the disk at the start.
    pub(super) size: u64,
    /// Percentage of it that has data at the start.
    pub(super) filled: usize,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

impl Kind {
    fn raw(name: &str, extra: Extra) -> Self {
        let (format, base) = (Format::Raw, Base::None);
        Self { name: name.into(), format, base, extra, size: MIB, filled: 30 }
    }

    fn qcow2(version: u32, cluster: u64, refcount_bits: u32) -> Self {
        // Room for many clusters, and for tables to grow where they are small.
        let size = (24 * cluster).clamp(MIB, 7 * MIB);
        let text = if cluster < MIB { format!("{}", cluster) } else { format!("{}M", cluster / MIB) };
        let text = if (KIB..MIB).contains(&cluster) { format!("{}K", cluster / KIB) } else { text };
        let name = format!("qcow2-v{version}-{text}-r{refcount_bits}");
        let format = Format::Qcow2 { version, cluster, refcount_bits };
        Self { name, format, base: Base::None, extra: Extra::Nothing, size, filled: 30 }
    }

    fn with(self, extra: Extra) -> Self {
        let what = match extra {
            Extra::Nothing => "",
            Extra::Snapshot => "-snapshot",
            Extra::LazyRefcounts => "-lazy",
            Extra::Bitmap => "-bitmap",
            Extra::Compressed => "-compressed",
            Extra::Resizes => "-resizes",
            Extra::Full => "-full",
            Extra::LongL1 => "-long-l1",
            Extra::Scattered => "-scattered",
        };
        Self { name: self.name + what, extra, ..self }
    }

    fn over(self, base: Base) -> Self {
        let what = match base {
            Base::None => "",
            Base::Raw => "-over-raw",
            Base::Qcow2 => "-over-qcow2",
        };
        Self { name: self.name + what, base, ..self }
    }

    fn of_size(self, size: u64) -> Self {
        Self { size, ..self }
    }

    fn filled(self, filled: usize) -> Self {
        Self { filled, ..self }
    }

    /// Sizes in bytes that the disk changes between, if it does.
    pub(super) fn sizes(&self) -> Option<RangeInclusive<u64>> {
        match self.extra {
            Extra::Resizes => Some(self.size / 2..=self.size * 2),
            Extra::LongL1 => Some(self.size + 2 * MIB..=self.size + 3 * MIB),
            _ => None,
        }
    }

    /// Bytes of a cluster, or of a block where the format has none.
    pub(super) fn cluster(&self) -> u64 {
        match self.format {
            Format::Raw => 4096,
            Format::Qcow2 { cluster, .. } => cluster,
        }
    }
}

/// All kinds.
pub(super) fn kinds() -> Vec<Kind> {
    let v2 = |cluster| Kind::qcow2(2, cluster, 16);
    let v3 = |cluster| Kind::qcow2(3, cluster, 16);
    let (k4, k64, m2) = (4 * KIB, 64 * KIB, 2 * MIB);
    let mut kinds = vec![Kind::raw("raw", Extra::Nothing), Kind::raw("raw-resizes", Extra::Resizes)];
    kinds.extend([512, k4, k64, m2].map(v2));
    kinds.extend([512, KIB, k4, k64, m2].map(v3));
    for bits in [1, 2, 8, 64] {
        kinds.extend([512, k64].map(|cluster| Kind::qcow2(3, cluster, bits)));
    }
    for base in [Base::Raw, Base::Qcow2] {
        kinds.extend([512, k4, k64, m2].map(|cluster| v3(cluster).over(base)));
        kinds.push(v2(k64).over(base));
    }
    kinds.extend([512, k4, k64].map(|cluster| v3(cluster).with(Extra::Snapshot)));
    kinds.extend([512, k64].map(|cluster| v2(cluster).with(Extra::Snapshot)));
    kinds.push(v3(k4).over(Base::Raw).with(Extra::Snapshot));
    for extra in [Extra::LazyRefcounts, Extra::Bitmap, Extra::Compressed] {
        kinds.extend([512, k64].map(|cluster| v3(cluster).with(extra)));
    }
    kinds.push(v3(k64).with(Extra::Resizes));
    // The L1 table grows by a cluster.
    kinds.extend([v2(512), v3(512)].map(|kind| kind.with(Extra::Resizes).of_size(2 * MIB - 256 * KIB)));
    kinds.push(v3(k4).over(Base::Qcow2).with(Extra::Resizes));
    // The refcount table is almost full: it grows, and its blocks lie in what they count.
    let full = |bits, size| Kind::qcow2(3, 512, bits).with(Extra::Full).of_size(size);
    kinds.extend([full(64, 2 * MIB + 384 * KIB), full(16, 8 * MIB + 256 * KIB)]);
    // A refcount block counts 64 clusters, and 64 MiB have an L1 table of 32.
    kinds.push(Kind::qcow2(3, 512, 64).with(Extra::LongL1).of_size(63 * MIB).filled(1));
    kinds.push(v3(512).with(Extra::Scattered).of_size(5 * MIB).filled(100));
    kinds
}
