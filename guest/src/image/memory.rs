//! Memory: an allocator over a fixed arena.
use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

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
// `used` is atomic. (And there is one processor, whose interrupt stubs do not allocate.)
unsafe impl Sync for Arena {}

#[global_allocator]
static HEAP: Arena = Arena { bytes: UnsafeCell::new([0; ARENA]), used: AtomicUsize::new(0) };

// SAFETY: pieces are disjoint (`used` only grows past what is handed out), inside the arena, and
// aligned.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let base = self.bytes.get().cast::<u8>();
        // Relaxed: one processor, and the stubs do not allocate.
        let used = self.used.load(Relaxed);
        let start = (base as usize + used).checked_next_multiple_of(layout.align());
        let offset = start.map(|start| start - base as usize);
        match offset.and_then(|offset| Some((offset, offset.checked_add(layout.size())?))) {
            Some((offset, end)) if end <= ARENA => {
                self.used.store(end, Relaxed);
                // SAFETY: offset <= end <= ARENA.
                unsafe { base.add(offset) }
            }
            _ => null_mut(),
        }
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        // Only the piece handed out last is taken back.
        let offset = piece as usize - self.bytes.get() as usize;
        if offset + layout.size() == self.used.load(Relaxed) {
            self.used.store(offset, Relaxed);
        }
    }
}
