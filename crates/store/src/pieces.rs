//! Parts of the pieces of a job, and copies between them and a buffer.
use paravane_dma::HostSlice;

/// Number of bytes in the pieces.
#[must_use]
pub fn total(pieces: &[HostSlice]) -> u64 {
    pieces.iter().fold(0, |sum: u64, piece| sum.saturating_add(piece.len as u64))
}

/// The parts of pieces that hold bytes `from .. from + len`, in order. None is empty.
pub fn parts(pieces: &[HostSlice], from: u64, len: u64) -> impl Iterator<Item = HostSlice> {
    let (mut pieces, mut skip, mut left) = (pieces.iter(), from, len);
    std::iter::from_fn(move || {
        while left > 0 {
            let piece = pieces.next()?;
            let skipped = skip.min(piece.len as u64);
            let now = (piece.len as u64 - skipped).min(left);
            (skip, left) = (skip - skipped, left - now);
            if now > 0 {
                // Inside the piece.
                let ptr = piece.ptr.wrapping_add(skipped as usize);
                return Some(HostSlice { ptr, len: now as usize });
            }
        }
        None
    })
}

/// Fills `out` from the pieces, from byte `from` on.
///
/// # Safety
/// The memory of the pieces is mapped.
pub unsafe fn gather(pieces: &[HostSlice], from: u64, out: &mut [u8]) {
    let mut rest = out;
    for part in parts(pieces, from, rest.len() as u64) {
        let (now, later) = rest.split_at_mut(part.len);
        // SAFETY: a part of a piece, which is mapped, as the caller promises.
        unsafe { part.read(now) };
        rest = later;
    }
}

/// Copies `data` to the pieces, from byte `from` on.
///
/// # Safety
/// The memory of the pieces is mapped for writing.
pub unsafe fn scatter(pieces: &[HostSlice], from: u64, data: &[u8]) {
    let mut rest = data;
    for part in parts(pieces, from, data.len() as u64) {
        let (now, later) = rest.split_at(part.len);
        // SAFETY: a part of a piece, which is mapped for writing, as the caller promises.
        unsafe { part.write(now) };
        rest = later;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_of_any_pieces() {
        let mut memory: Vec<u8> = (0..100).collect();
        let base = memory.as_mut_ptr();
        let piece = |at: usize, len| HostSlice { ptr: base.wrapping_add(at), len };
        // 30..33, nothing, 10..17, 50..51
        let pieces = [piece(30, 3), piece(0, 0), piece(10, 7), piece(50, 1)];
        let model: Vec<u8> = (30..33).chain(10..17).chain(50..51).collect();
        assert_eq!(total(&pieces), model.len() as u64);
        for from in 0..=model.len() {
            for to in from..=model.len() {
                let mut buffer = vec![0; to - from];
                // SAFETY: the memory lives.
                unsafe { gather(&pieces, from as u64, &mut buffer) };
                assert_eq!(buffer, model[from..to]);
            }
        }
        // SAFETY: the memory lives.
        unsafe { scatter(&pieces, 2, &[200, 201, 202]) };
        assert_eq!((memory[31], memory[32], memory[10], memory[11], memory[12]), (31, 200, 201, 202, 12));
        assert_eq!(total(&[HostSlice { ptr: std::ptr::null_mut(), len: usize::MAX }; 3]), u64::MAX);
    }

    #[test]
    fn a_part_is_cut_out_of_the_pieces() {
        let piece = |ptr: usize, len| HostSlice { ptr: std::ptr::without_provenance_mut(ptr), len };
        let pieces = [piece(1000, 100), piece(2000, 0), piece(3000, 50)];
        let cut_out =
            |skip, len| parts(&pieces, skip, len).map(|part| (part.ptr.addr(), part.len)).collect::<Vec<_>>();
        assert_eq!(cut_out(0, 150), [(1000, 100), (3000, 50)]);
        assert_eq!(cut_out(0, 100), [(1000, 100)]);
        assert_eq!(cut_out(99, 2), [(1099, 1), (3000, 1)]);
        assert_eq!(cut_out(100, 10), [(3000, 10)]);
        assert_eq!(cut_out(149, 5), [(3049, 1)]);
        assert_eq!(cut_out(150, 5), []);
    }
}
