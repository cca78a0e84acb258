//! Memory that a subject shares with the script on the other side of its queue.
use paravane_ring::Area;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Alignment and granularity of [`Pages`].
pub(crate) const PAGE: usize = 4096;

/// Memory that a subject also accesses.
///
/// A copy refers to the same bytes. Values are little-endian.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedMemory {
    ptr: NonNull<u8>,
    len: usize,
}

impl SharedMemory {
    /// Refers to `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes must stay mapped, readable and writable while any copy of the result is used, and
    /// no Rust reference to them may exist in that time.
    pub(crate) unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len }
    }

    /// The part from `offset` to the end.
    pub(crate) fn from(self, offset: usize) -> Self {
        assert!(offset <= self.len);
        // SAFETY: `offset` is inside, by the assertion.
        Self { ptr: unsafe { self.ptr.add(offset) }, len: self.len - offset }
    }

    /// The same memory, as the ring crate takes it.
    pub(crate) fn area(self) -> Area {
        // SAFETY: the promise of `new` is the one that `Area::new` asks for.
        unsafe { Area::new(self.ptr, self.len) }
    }

    /// Address of an aligned value of `size` bytes.
    fn at(self, offset: usize, size: usize) -> *mut u8 {
        assert!(offset < self.len && size <= self.len - offset);
        // SAFETY: `offset` is inside, by the assertion.
        let at = unsafe { self.ptr.as_ptr().add(offset) };
        assert!(at.addr().is_multiple_of(size));
        at
    }

    /// Loads a u16. Acquire: pairs with the subject's release store of the index.
    pub(crate) fn load_u16(self, offset: usize) -> u16 {
        // SAFETY: `at` checked bounds and alignment; the memory lives by the promise of `new`.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.at(offset, 2).cast()) }.load(Ordering::Acquire))
    }

    /// Stores a u16. Release: pairs with the subject's acquire load of the index.
    pub(crate) fn store_u16(self, offset: usize, value: u16) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU16::from_ptr(self.at(offset, 2).cast()) }.store(value.to_le(), Ordering::Release);
    }

    /// Loads a u64 (relaxed; an index load orders it).
    pub(crate) fn load_u64(self, offset: usize) -> u64 {
        // SAFETY: as in `load_u16`.
        u64::from_le(unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }.load(Ordering::Relaxed))
    }

    /// Stores a u64 (relaxed; an index store publishes it).
    pub(crate) fn store_u64(self, offset: usize, value: u64) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }.store(value.to_le(), Ordering::Relaxed);
    }
}

/// Equally spaced values in [`SharedMemory`], with bounds checked once.
///
/// Their number is a power of two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strided {
    first: NonNull<u8>,
    stride: usize,
    mask: usize,
}

impl Strided {
    /// `count` values of `align` bytes, `stride` bytes apart from `offset` on.
    fn new(memory: SharedMemory, offset: usize, stride: usize, count: u16, align: usize) -> Self {
        assert!(count.is_power_of_two() && stride.is_multiple_of(align));
        let mask = usize::from(count) - 1;
        // If the last value is inside, all are.
        memory.at(offset + mask * stride, align);
        // SAFETY: the first value is before the last one, which is inside.
        Self { first: unsafe { memory.ptr.add(offset) }, stride, mask }
    }

    /// Values of 2 bytes.
    pub(crate) fn of_u16(memory: SharedMemory, offset: usize, stride: usize, count: u16) -> StridedU16 {
        StridedU16(Self::new(memory, offset, stride, count, 2))
    }

    /// Values of 4 bytes.
    pub(crate) fn of_u32(memory: SharedMemory, offset: usize, stride: usize, count: u16) -> StridedU32 {
        StridedU32(Self::new(memory, offset, stride, count, 4))
    }

    /// Values of 8 bytes.
    pub(crate) fn of_u64(memory: SharedMemory, offset: usize, stride: usize, count: u16) -> StridedU64 {
        StridedU64(Self::new(memory, offset, stride, count, 8))
    }

    fn at(self, index: u16) -> *mut u8 {
        // SAFETY: `new` checked that every masked index is inside.
        unsafe { self.first.as_ptr().add((usize::from(index) & self.mask) * self.stride) }
    }
}

/// [`Strided`] of 2 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StridedU16(Strided);

impl StridedU16 {
    /// Loads value `index` modulo their number (relaxed; an index load orders it).
    pub(crate) fn load(self, index: u16) -> u16 {
        // SAFETY: inside and aligned by `Strided::new`; the memory lives by the promise of
        // `SharedMemory::new`.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.0.at(index).cast()) }.load(Ordering::Relaxed))
    }

    /// Stores value `index` modulo their number (relaxed).
    ///
    /// An index store publishes it.
    pub(crate) fn store(self, index: u16, value: u16) {
        // SAFETY: as in `StridedU16::load`.
        unsafe { AtomicU16::from_ptr(self.0.at(index).cast()) }.store(value.to_le(), Ordering::Relaxed);
    }
}

/// [`Strided`] of 4 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StridedU32(Strided);

impl StridedU32 {
    /// Stores value `index` modulo their number (relaxed).
    ///
    /// An index store publishes it.
    pub(crate) fn store(self, index: u16, value: u32) {
        // SAFETY: as in `StridedU16::load`.
        unsafe { AtomicU32::from_ptr(self.0.at(index).cast()) }.store(value.to_le(), Ordering::Relaxed);
    }
}

/// [`Strided`] of 8 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StridedU64(Strided);

impl StridedU64 {
    /// Loads value `index` modulo their number.
    ///
    /// Acquire: pairs with the subject's release store of the flags.
    pub(crate) fn load(self, index: u16) -> u64 {
        // SAFETY: as in `StridedU16::load`.
        u64::from_le(unsafe { AtomicU64::from_ptr(self.0.at(index).cast()) }.load(Ordering::Acquire))
    }

    /// Stores value `index` modulo their number (relaxed).
    ///
    /// A [`StridedU64::publish`] publishes it.
    pub(crate) fn store(self, index: u16, value: u64) {
        // SAFETY: as in `StridedU16::load`.
        unsafe { AtomicU64::from_ptr(self.0.at(index).cast()) }.store(value.to_le(), Ordering::Relaxed);
    }

    /// Stores value `index` modulo their number.
    ///
    /// Release: pairs with the subject's acquire load.
    pub(crate) fn publish(self, index: u16, value: u64) {
        // SAFETY: as in `StridedU16::load`.
        unsafe { AtomicU64::from_ptr(self.0.at(index).cast()) }.store(value.to_le(), Ordering::Release);
    }
}

/// Zeroed pages. Their owner drops them after all users.
#[derive(Debug)]
pub(crate) struct Pages {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the pages belong to this value, not to a thread; their bytes are accessed through
// `SharedMemory`.
unsafe impl Send for Pages {}

/// The layout of pages for `len` bytes, at least one page.
fn pages(len: usize) -> Layout {
    Layout::from_size_align(len.next_multiple_of(PAGE).max(PAGE), PAGE)
        .expect("a benchmark's memory is far smaller than the address space")
}

impl Pages {
    /// Allocates at least `len` bytes, rounded up to whole pages.
    pub(crate) fn new(len: usize) -> Self {
        let layout = pages(len);
        // SAFETY: the size is at least one page.
        let Some(ptr) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        Self { ptr, layout }
    }

    /// The memory.
    pub(crate) fn shared(&self) -> SharedMemory {
        // SAFETY: `alloc_zeroed` gave this many bytes, page-aligned, and nothing makes references
        // to them. The owner keeps the pages until all users are dropped.
        unsafe { SharedMemory::new(self.ptr, self.layout.size()) }
    }

    /// Address of the first byte.
    pub(crate) fn address(&self) -> u64 {
        self.ptr.as_ptr().expose_provenance() as u64
    }

    /// Their bytes, as a slice with an unbounded lifetime.
    ///
    /// # Safety
    /// The slice must not be used after the pages are dropped, nor together with another one.
    #[cfg(feature = "peers")]
    pub(crate) unsafe fn bytes(&self) -> &'static mut [u8] {
        // SAFETY: `alloc_zeroed` gave this many bytes; the caller promises the rest.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.layout.size()) }
    }

    /// Gives up ownership: returns address and pointer.
    #[cfg(feature = "peers")]
    pub(crate) fn into_raw(self) -> (u64, NonNull<u8>) {
        let raw = (self.address(), self.ptr);
        std::mem::forget(self);
        raw
    }

    /// Takes back ownership.
    ///
    /// # Safety
    /// `ptr` came from [`Pages::into_raw`] of pages made with this `len`, and has not been taken
    /// back.
    #[cfg(feature = "peers")]
    pub(crate) unsafe fn from_raw(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, layout: pages(len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}
