//! Creates an overlay: an image without data, on a backing file.
use super::super::source::Source;
use super::{Driver, Storage, bytes, panicked};
use imago::FormatCreateBuilder;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

/// Makes an image of `size` bytes in an empty file, and writes it to the disk.
///
/// `backing` is the name and format that it records of its backing file.
///
/// # Errors
/// The file cannot be written.
pub(in crate::blk) fn create(
    source: &Source,
    path: &Path,
    size: u64,
    backing: (String, &str),
) -> io::Result<()> {
    let storage = Storage::new(bytes(source, path, true, false)?, 0, Arc::default());
    let builder = Driver::create_builder(storage).size(size).backing(backing.0, backing.1.to_owned());
    catch_unwind(AssertUnwindSafe(|| builder.create())).unwrap_or_else(|_| Err(panicked()))?;
    source.sync()
}
