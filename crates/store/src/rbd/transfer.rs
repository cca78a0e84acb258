//! Copies between the pieces of a job and the buffer of a request.
use paravane_dma::HostSlice;

/// Number of bytes in the pieces.
pub(super) fn total(pieces: &[HostSlice]) -> u64 {
    pieces.iter().fold(0, |sum: u64, piece| sum.saturating_add(piece.len as u64))
}

/// Calls `copy` for the parts of pieces that hold bytes `from .. from + len`, in order.
///
/// It gets the part and its place in a buffer that starts at `from`.
fn each_part(pieces: &[HostSlice], from: u64, len: usize, mut copy: impl FnMut(HostSlice, usize)) {
    let (mut skip, mut done) = (from, 0);
    for piece in pieces {
        if done == len {
            return;
        }
        if skip >= piece.len as u64 {
            skip -= piece.len as u64;
            continue;
        }
        let start = skip as usize;
        skip = 0;
        let now = (piece.len - start).min(len - done);
        copy(HostSlice { ptr: piece.ptr.wrapping_add(start), len: now }, done);
        done += now;
    }
}

/// Fills `buffer` from the pieces, from byte `from` on.
///
/// # Safety
/// The memory of the pieces is mapped.
pub(super) unsafe fn gather(pieces: &[HostSlice], from: u64, buffer: &mut [u8]) {
    each_part(pieces, from, buffer.len(), |part, at| {
        // SAFETY: a part of a piece, which is mapped, as the caller promises.
        unsafe { part.read(&mut buffer[at..at + part.len]) };
    });
}

/// Copies `data` to the pieces, from byte `from` on.
///
/// # Safety
/// The memory of the pieces is mapped for writing.
pub(super) unsafe fn scatter(pieces: &[HostSlice], from: u64, data: &[u8]) {
    each_part(pieces, from, data.len(), |part, at| {
        // SAFETY: a part of a piece, which is mapped for writing, as the caller promises.
        unsafe { part.write(&data[at..at + part.len]) };
    });
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
}
