//! Copies between a buffer and guest memory in pieces.
use paravane_dma::HostSlice;

/// Fills `out` from the first bytes of the pieces.
///
/// # Safety
/// The mapping of the pieces is alive.
pub(super) unsafe fn gather(pieces: &[HostSlice], out: &mut [u8]) {
    let mut rest = out;
    for piece in pieces {
        let (now, later) = rest.split_at_mut(piece.len.min(rest.len()));
        // SAFETY: as the caller promises, and no more than the piece has.
        unsafe { piece.read(now) };
        rest = later;
    }
}

/// Copies `data` to the first bytes of the pieces.
///
/// # Safety
/// As [`gather`]; and they were mapped for writing.
pub(super) unsafe fn scatter(data: &[u8], pieces: &[HostSlice]) {
    let mut rest = data;
    for piece in pieces {
        let (now, later) = rest.split_at(piece.len.min(rest.len()));
        // SAFETY: as the caller promises, and no more than the piece has.
        unsafe { piece.write(now) };
        rest = later;
    }
}
