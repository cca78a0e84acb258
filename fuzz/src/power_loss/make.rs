//! Images at the start of a run.
use super::check::OFFSET;
use super::kind::{Base, Extra, Format, Kind};
use super::log::resize;
use super::stamp::{self, SECTOR};
use paravane_test_support::{Random, qemu_img};
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// The number of the write that made the base, and that which made the image.
const BASE: u64 = 1;
const IMAGE: u64 = 2;

/// An image, and what it reads as.
#[derive(Clone, Debug)]
pub(super) struct Made {
    /// Bytes of the image.
    pub(super) image: Vec<u8>,
    /// Bytes of the file below it, in its format.
    pub(super) base: Option<Vec<u8>>,
    /// What the disk reads as.
    pub(super) disk: Arc<Vec<u8>>,
    /// What the base reads as.
    pub(super) base_disk: Arc<Vec<u8>>,
}

/// Makes an image of a kind. Needs `qemu-img`, unless it is raw.
///
/// Files that the image names are in `folder`.
pub(super) fn make(kind: &Kind, seed: u64, folder: &Path) -> Result<Made, String> {
    let mut random = Random::new(seed);
    let size = kind.size as usize;
    let base_disk = match kind.base {
        Base::None => Vec::new(),
        // Shorter than the disk in some runs.
        _ => {
            let len = if random.once_in(3) { size / 4 * 3 } else { size };
            content(kind, vec![0; len], BASE, 60, &mut random)
        }
    };
    let mut below = base_disk.clone();
    resize(&mut below, size);
    // What the image holds itself. The rest shows its base, so that writes copy from there.
    let own = match kind.base {
        Base::None => None,
        _ => Some(content(kind, vec![0; size], IMAGE, kind.filled, &mut random)),
    };
    let disk = match (&own, kind.extra) {
        (Some(own), _) => over(own, below, kind.cluster() as usize),
        (None, Extra::Full) => full(below),
        (None, _) => content(kind, below, IMAGE, kind.filled, &mut random),
    };
    let (base_disk, disk) = (Arc::new(base_disk), Arc::new(disk));
    let Format::Qcow2 { .. } = kind.format else {
        return Ok(Made { image: disk.to_vec(), base: None, disk, base_disk });
    };
    let base = match kind.base {
        Base::None => None,
        Base::Raw => Some(base_disk.to_vec()),
        Base::Qcow2 => {
            write(folder, "base.raw", &base_disk)?;
            run(folder, &["convert", "-f", "raw", "-O", "qcow2", "base.raw", "base.qcow2"])?;
            Some(read(folder, "base.qcow2")?)
        }
    };
    if let (Some(base), Base::Raw) = (&base, kind.base) {
        write(folder, "base.raw", base)?;
    }
    write(folder, "disk.raw", own.as_deref().unwrap_or(&disk))?;
    convert(kind, folder)?;
    let mut image = read(folder, "image.qcow2")?;
    if kind.extra == Extra::Scattered {
        scatter(&mut image, kind.cluster() as usize, &mut random);
    }
    Ok(Made { image, base, disk, base_disk })
}

fn convert(kind: &Kind, folder: &Path) -> Result<(), String> {
    let Format::Qcow2 { version, cluster, refcount_bits } = kind.format else { return Ok(()) };
    let lazy = if kind.extra == Extra::LazyRefcounts { ",lazy_refcounts=on" } else { "" };
    let compat = if version == 2 { "0.10" } else { "1.1" };
    let options = format!("compat={compat},cluster_size={cluster},refcount_bits={refcount_bits}{lazy}");
    // -S: no cluster of zeroes is written.
    let mut arguments = vec!["convert", "-f", "raw", "-O", "qcow2", "-S", "512", "-o", &options];
    if kind.extra == Extra::Compressed {
        arguments.push("-c");
    }
    let name = match kind.base {
        Base::None => None,
        Base::Raw => Some(("raw", folder.join("base.raw"))),
        Base::Qcow2 => Some(("qcow2", folder.join("base.qcow2"))),
    };
    let name = name.as_ref().map(|(format, path)| (*format, path.display().to_string()));
    arguments.extend(["disk.raw", "image.qcow2"]);
    run(folder, &arguments)?;
    if let Some((format, path)) = &name {
        run(folder, &["rebase", "-u", "-f", "qcow2", "-F", format, "-b", path, "image.qcow2"])?;
    }
    match kind.extra {
        Extra::Snapshot => run(folder, &["snapshot", "-c", "before", "image.qcow2"]),
        Extra::Bitmap => run(folder, &["bitmap", "--add", "image.qcow2", "changes"]),
        _ => Ok(()),
    }
}

/// Exchanges data clusters of an image without snapshots, and the entries that name them.
fn scatter(image: &mut [u8], cluster: usize, random: &mut Random) {
    let long = |image: &[u8], at: usize| u64::from_be_bytes(std::array::from_fn(|n| image[at + n]));
    let offset = |entry: u64| (entry & OFFSET) as usize;
    let (l1, entries) = (long(image, 40) as usize, long(image, 32) as u32 as usize);
    let tables: Vec<usize> =
        (0..entries).map(|number| offset(long(image, l1 + number * 8))).filter(|table| *table != 0).collect();
    let places = tables.into_iter().flat_map(|table| (table..table + cluster).step_by(8));
    let places: Vec<usize> = places.filter(|place| offset(long(image, *place)) != 0).collect();
    for number in (1..places.len()).rev() {
        let (one, other) = (places[number], places[random.below(number + 1)]);
        let (first, second) = (offset(long(image, one)), offset(long(image, other)));
        for byte in 0..cluster {
            image.swap(first + byte, second + byte);
        }
        for byte in 0..8 {
            image.swap(one + byte, other + byte);
        }
    }
}

/// The clusters of an image that are not zeroes, over those of its base.
fn over(own: &[u8], mut below: Vec<u8>, cluster: usize) -> Vec<u8> {
    for (below, own) in below.chunks_mut(cluster).zip(own.chunks(cluster)) {
        if own.iter().any(|byte| *byte != 0) {
            below.copy_from_slice(own);
        }
    }
    below
}

/// Fills a disk with clusters of 512 bytes until its tables take it to a multiple of 2 MiB.
fn full(mut disk: Vec<u8>) -> Vec<u8> {
    let end = disk.len() / (2 << 20) * (2 << 20);
    // An L2 table for 64 clusters, and a count of 8 bytes at most for each.
    let data = end / 66 * 64 - (20 << 10);
    stamp::fill(&mut disk[..data], IMAGE, 0);
    disk
}

/// Gives a part of the clusters content, in runs.
fn content(kind: &Kind, mut disk: Vec<u8>, write: u64, percent: usize, random: &mut Random) -> Vec<u8> {
    let cluster = (kind.cluster() as usize).min(64 << 10);
    let mut start = 0;
    while start < disk.len() {
        let len = cluster * (1 + random.below(8));
        let end = (start + len).min(disk.len());
        if random.below(100) < percent {
            stamp::fill(&mut disk[start..end], write, (start / SECTOR) as u64);
        }
        start = end;
    }
    disk
}

pub(super) fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), String> {
    fs::write(folder.join(name), bytes).map_err(|error| format!("{name}: {error}"))
}

fn read(folder: &Path, name: &str) -> Result<Vec<u8>, String> {
    fs::read(folder.join(name)).map_err(|error| format!("{name}: {error}"))
}

/// Runs `qemu-img`; names of files in `folder` are made whole.
fn run(folder: &Path, arguments: &[&str]) -> Result<(), String> {
    let whole = |argument: &&str| match *argument {
        name @ ("base.raw" | "base.qcow2" | "disk.raw" | "image.qcow2") => {
            folder.join(name).display().to_string()
        }
        other => other.to_owned(),
    };
    let arguments: Vec<_> = arguments.iter().map(whole).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let output = qemu_img(&arguments);
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("qemu-img {arguments:?}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

/// The errors that `qemu-img check` finds in an image, other than leaks.
pub(super) fn qemu_check(folder: &Path, image: &[u8]) -> Result<Option<String>, String> {
    write(folder, "check.qcow2", image)?;
    let path = folder.join("check.qcow2");
    let output = qemu_img(&["check", "-f", "qcow2", &path.display().to_string()]);
    // 0: clean; 3: leaks only.
    if matches!(output.status.code(), Some(0 | 3)) {
        return Ok(None);
    }
    let text = [output.stderr, output.stdout].concat();
    Ok(Some(String::from_utf8_lossy(&text).lines().take(4).collect::<Vec<_>>().join("; ")))
}
