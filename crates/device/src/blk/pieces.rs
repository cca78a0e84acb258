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

/// Makes `part` the `len` bytes of the pieces after the first `skip`.
pub(super) fn cut(pieces: &[HostSlice], skip: u64, len: u64, part: &mut Vec<HostSlice>) {
    part.clear();
    let (mut skip, mut left) = (skip, len);
    for piece in pieces {
        let skipped = skip.min(piece.len as u64);
        skip -= skipped;
        let now = (piece.len as u64 - skipped).min(left);
        if now > 0 {
            // Inside the piece.
            part.push(HostSlice { ptr: piece.ptr.wrapping_add(skipped as usize), len: now as usize });
            left -= now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_cut_out_of_the_pieces() {
        let piece = |ptr: usize, len| HostSlice { ptr: std::ptr::without_provenance_mut(ptr), len };
        let pieces = [piece(1000, 100), piece(2000, 0), piece(3000, 50)];
        let cut_out = |skip, len| {
            let mut part = Vec::new();
            cut(&pieces, skip, len, &mut part);
            part.iter().map(|piece| (piece.ptr.addr(), piece.len)).collect::<Vec<_>>()
        };
        assert_eq!(cut_out(0, 150), [(1000, 100), (3000, 50)]);
        assert_eq!(cut_out(0, 100), [(1000, 100)]);
        assert_eq!(cut_out(99, 2), [(1099, 1), (3000, 1)]);
        assert_eq!(cut_out(100, 10), [(3000, 10)]);
        assert_eq!(cut_out(149, 5), [(3049, 1)]);
        assert_eq!(cut_out(150, 5), []);
    }
}
