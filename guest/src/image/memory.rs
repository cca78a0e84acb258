//! Memory: an allocator over a fixed arena.
use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr::null_mut;
use core::sync::atomic::{
    AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

/// Bytes of the arena.
///
/// Enough for the private state of 32 disks with 256 requests in flight each.
const ARENA: usize = 2 << 20;

/// A bump allocator: the program rarely allocates after its start.
struct Arena {
    bytes: UnsafeCell<[u8; ARENA]>,
    /// Bytes handed out from the start of the arena.
    used: AtomicUsize,
}

// SAFETY: the bytes are reached only through pointers that `alloc` has handed out, each once;
// `used` is atomic.
unsafe impl Sync for Arena {}

#[global_allocator]
static HEAP: Arena = Arena { bytes: UnsafeCell::new([0; ARENA]), used: AtomicUsize::new(0) };

// SAFETY: pieces are disjoint (`used` only grows past what is handed out), inside the arena, and
// aligned.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let base = self.bytes.get().cast::<u8>();
        let take = |used: usize| {
            let start = (base as usize + used).checked_next_multiple_of(layout.align())?;
            let end = (start - base as usize).checked_add(layout.size())?;
            (end <= ARENA).then_some(end)
        };
        // Acquire, pairs with the release in `dealloc`: what another processor did with the piece is over.
        match self.used.fetch_update(Acquire, Acquire, take) {
            // SAFETY: the piece lies before its end, which is at most ARENA.
            Ok(used) => unsafe { base.add(take(used).map_or(0, |end| end - layout.size())) },
            Err(_) => null_mut(),
        }
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        // Only the piece handed out last is taken back.
        let offset = piece as usize - self.bytes.get() as usize;
        let _ = self.used.compare_exchange(offset + layout.size(), offset, Release, Relaxed);
    }
}
