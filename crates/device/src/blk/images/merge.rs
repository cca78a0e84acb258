//! Merges an overlay into its backing file.
use super::{Disk, Extent, ImageError};
use std::ops::ControlFlow;

/// Bytes that are copied at once.
const AT_ONCE: u64 = 2 << 20;

/// Writes all that `overlay` holds itself to `base`, its backing file.
///
/// `overlay` was opened by [`Disk::open_alone`], and stays as it is. The base grows to the size of
/// the overlay; a larger base keeps its size. `watch` is told how far the work is, in bytes of the
/// disk, and may end it. Returns the number of bytes merged, zeroes included, which are durable.
///
/// At any moment the overlay reads as before: what is written to the base is what the overlay shows
/// there, and the overlay has it, too. A base that a snapshot has frozen for the overlay is not frozen
/// any more at the end. So after an error or a crash, run it again.
///
/// # Errors
/// Reading or writing failed, the base cannot grow, or [`ImageError::Stopped`].
pub fn merge(
    overlay: &Disk,
    base: &Disk,
    watch: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<u64, ImageError> {
    let size = overlay.size();
    if base.size() < size {
        // In the new range, the base would show what its backing file has there.
        if base.has_backing() {
            let path = base.path().to_owned();
            return Err(ImageError::Grow { path, base: base.size(), overlay: size });
        }
        base.grow(size)?;
    }
    let mut buffer = vec![0; AT_ONCE.min(size) as usize];
    let (mut at, mut merged) = (0, 0);
    while at < size {
        if watch(at).is_break() {
            return Err(ImageError::Stopped);
        }
        let (extent, len) = overlay.extent(at, size - at)?;
        let len = len.min(if extent == Extent::Hole { u64::MAX } else { AT_ONCE });
        match extent {
            Extent::Hole => {}
            Extent::Zeroes => base.zero(at, len)?,
            Extent::Data => {
                let data = &mut buffer[..len as usize];
                overlay.read(data, at)?;
                base.write(data, at)?;
            }
        }
        at += len;
        merged += if extent == Extent::Hole { 0 } else { len };
    }
    base.sync()?;
    base.thaw();
    let _ = watch(size);
    Ok(merged)
}
