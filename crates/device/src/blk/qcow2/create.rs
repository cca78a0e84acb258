//! Makes empty qcow2 images.
use super::super::Format;
use super::super::source::Source;
use super::{Storage, bytes, panicked};
use imago::FormatCreateBuilder;
use imago::qcow2::Qcow2CreateBuilder;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

/// An empty qcow2 image that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewQcow2 {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Bytes of a cluster: a power of two from 512 bytes to 2 MiB.
    pub cluster_size: u32,
    /// What the header says of the backing file. It is not opened.
    pub backing: Option<BackingName>,
}

/// The backing file, as the header of an image has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingName {
    /// Path or URL. QEMU takes a relative path from the image's folder. At most 1023 bytes.
    pub name: String,
    /// Format of the backing file.
    pub format: Format,
}

/// Writes the tables of an empty image to `source`, and makes them durable.
pub(in crate::blk) fn create(source: &Source, path: &Path, new: &NewQcow2) -> io::Result<()> {
    // Nothing is protected: no guest has the image yet.
    let storage = Storage::new(bytes(source, path, true)?, 0, Arc::default());
    let mut builder = Qcow2CreateBuilder::<Storage>::new(storage)
        .size(new.size)
        .cluster_size(new.cluster_size.try_into().unwrap_or(usize::MAX));
    if let Some(backing) = &new.backing {
        builder = builder.backing(backing.name.clone(), backing.format.name().to_owned());
    }
    catch_unwind(AssertUnwindSafe(|| builder.create())).unwrap_or_else(|_| Err(panicked()))?;
    source.sync()
}
