//! Copies a disk to a new image, without its zeroes.
use super::{Disk, Extent, ImageError};
use std::ops::ControlFlow;

/// Bytes that are copied at once: a multiple of every cluster.
const AT_ONCE: u64 = 2 << 20;
/// Bytes that are compared at once.
const ZEROES: [u8; 4096] = [0; 4096];

/// Copies `from` to `to`, an image that was just made and reads as zeroes.
///
/// Zeroes are not written: they stay holes. `watch` is told how far the copy is, in bytes of the
/// disk, and may end it. The copy is durable at the end. Returns the number of bytes written.
///
/// # Errors
/// Reading or writing failed, or [`ImageError::Stopped`]. Then the target is incomplete.
pub fn copy(
    from: &Disk,
    to: &Disk,
    watch: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<u64, ImageError> {
    let (size, grain) = (from.size(), to.grain().min(AT_ONCE));
    if to.size() < size {
        return Err(ImageError::Small { path: to.path().to_owned(), target: to.size(), source_size: size });
    }
    let mut buffer = vec![0; AT_ONCE.min(size) as usize];
    let (mut at, mut written) = (0, 0);
    while at < size {
        if watch(at).is_break() {
            return Err(ImageError::Stopped);
        }
        let (extent, len) = from.extent(at, size - at)?;
        let end = at + len;
        if extent != Extent::Data {
            at = end;
            continue;
        }
        // To a border of the target's clusters, so that each is written once.
        let end = end.min((at + 1).next_multiple_of(AT_ONCE));
        let data = &mut buffer[..(end - at) as usize];
        from.read(data, at)?;
        written += write_data(to, data, at, grain)?;
        at = end;
    }
    to.sync()?;
    let _ = watch(size);
    Ok(written)
}

/// Writes the grains that are not all zeroes. Returns the number of bytes written.
fn write_data(to: &Disk, data: &[u8], offset: u64, grain: u64) -> Result<u64, ImageError> {
    let len = data.len() as u64;
    let end_of_grain = |at: u64| ((offset + at + 1).next_multiple_of(grain) - offset).min(len);
    let is_zero = |from: u64, to: u64| {
        data[from as usize..to as usize].chunks(ZEROES.len()).all(|part| part == &ZEROES[..part.len()])
    };
    let (mut at, mut written) = (0, 0);
    while at < len {
        let mut end = end_of_grain(at);
        if is_zero(at, end) {
            at = end;
            continue;
        }
        while end < len && !is_zero(end, end_of_grain(end)) {
            end = end_of_grain(end);
        }
        to.write(&data[at as usize..end as usize], offset + at)?;
        written += end - at;
        at = end;
    }
    Ok(written)
}
