//! Translations of one domain: a radix tree over page numbers that is changed while others walk it.
//!
//! ```text
//! root (height 0 to 6) --> node: 512 entries --> node ... --> leaf: guest page, permissions
//!                                     '--> leaf: 512 pages at once (or 512^2 ...), if the mapping covers them
//! ```
//! An entry is one word: nothing, a child, or a leaf. Walkers load it, the one who holds the domain's lock stores it;
//! so a walker sees each page's translation before or after a change and nothing in between. The tree is as high as
//! the highest address needs: two loads for devices that use less than a gigabyte of addresses.
//!
//! Why a tree: a change costs what it covers and not what is there (a sorted array would be copied), a million
//! single pages take 8 MiB of leaves, neighbours share a cache line, and no hash is to be made or probed.
//!
//! A node that a removal has emptied is unlinked at once and handed to the caller, who frees it when no walker can be
//! in it any more.
use crate::Access;
use crate::sync::AtomicPtr;
use std::ptr::{NonNull, null_mut, without_provenance_mut};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The smallest page, as a power of two.
pub(crate) const PAGE_SHIFT: u32 = 12;
/// Bits of the page number that one node resolves. Models have tiny nodes, since each atomic costs there.
const BITS: u32 = if cfg!(loom) { 1 } else { 9 };
const ENTRIES: usize = 1 << BITS;
/// Height that resolves every 64-bit address.
const MAX_HEIGHT: u32 = (64 - PAGE_SHIFT).div_ceil(BITS);
/// Highest level of a leaf: one of 2^48 bytes, so that sizes stay far below 2^64.
const MAX_LEAF: u32 = 36 / BITS;

/// Bit 0 of an entry tells a leaf from a child, which is aligned. The device's permissions follow.
const LEAF: usize = 1;
const ALLOWS_SHIFT: u32 = 1;
const ALLOWS: usize = (Access::READ.bits() | Access::WRITE.bits()) as usize;

const _: () = assert!(size_of::<usize>() == 8, "a leaf holds a 64-bit guest address");
const _: () = assert!(BITS * (MAX_HEIGHT - 1) < 64 && ALLOWS < 8);

/// Child, leaf or nothing. How many bits of the page number the root leaves to those below it stands in the low bits of
/// its pointer.
type Entry = AtomicPtr<Node>;

/// A node of the tree.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Node {
    entries: [Entry; ENTRIES],
}

impl Node {
    /// `None`: the host has no memory.
    fn new() -> Option<Box<Self>> {
        #[cfg(not(loom))]
        {
            // SAFETY: a node has a size, and is an array of pointers, for which zeroes are null.
            let node = unsafe { std::alloc::alloc_zeroed(std::alloc::Layout::new::<Self>()) }.cast::<Self>();
            // SAFETY: if it is not null, it was allocated by the global allocator with the layout of a node, and is valid.
            (!node.is_null()).then(|| unsafe { Box::from_raw(node) })
        }
        #[cfg(loom)]
        Some(Box::new(Self { entries: std::array::from_fn(|_| AtomicPtr::new(null_mut())) }))
    }

    fn is_empty(&self) -> bool {
        // Relaxed: for the one who holds the domain's lock, under which all stores are made.
        self.entries.iter().all(|entry| entry.load(Relaxed).is_null())
    }
}

/// Nodes that a change will put into the tree: all are made before it begins, so that it cannot fail half-way.
#[derive(Debug, Default)]
pub(crate) struct Spares(Vec<Box<Node>>);

impl Spares {
    /// So many; `None`: the host has no memory.
    pub(crate) fn new(count: usize) -> Option<Self> {
        let mut nodes = Vec::new();
        nodes.try_reserve_exact(count).ok()?;
        for _ in 0..count {
            nodes.push(Node::new()?);
        }
        Some(Self(nodes))
    }

    fn take(&mut self) -> *mut Node {
        Box::into_raw(self.0.pop().expect("as many as the change was counted to need"))
    }

    /// Nodes that were not taken.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// A node that is out of the tree, with nothing below it.
#[derive(Debug)]
pub(crate) struct Unlinked(*mut Node);

// SAFETY: the node belongs to whoever has this, but for walkers that may still read its atomics.
unsafe impl Send for Unlinked {}

impl Unlinked {
    /// Frees the node.
    ///
    /// # Safety
    /// Every walk that began before it was unlinked has ended.
    pub(crate) unsafe fn free(self) {
        // SAFETY: made by `Node::new`, unlinked once, and by the caller's promise nobody's any more.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// What a walk finds: the largest aligned block around the address that one entry translates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// First device address.
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) size: u64,
    /// Guest-physical address of `start`.
    pub(crate) gpa: u64,
    /// READ, WRITE.
    pub(crate) allows: Access,
}

impl Block {
    /// What a leaf says of the addresses around `addr`, of whose page number it leaves `below` bits open.
    #[inline(always)]
    fn of(addr: u64, leaf: *mut Node, below: u32) -> Self {
        let size = 1 << PAGE_SHIFT << below;
        let bits = leaf.addr();
        Self {
            start: addr & !(size - 1),
            size,
            gpa: (bits & !((1 << PAGE_SHIFT) - 1)) as u64,
            allows: Access::from_bits_truncate((bits >> ALLOWS_SHIFT & ALLOWS) as u32),
        }
    }
}

/// The node of single pages that a walk ended in: leaves beside the one that it found need no walk of their own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Near {
    node: *const Node,
    /// Its first page, without the bits that it resolves.
    number: u64,
}

impl Near {
    /// None yet: no page has this number.
    #[inline(always)]
    pub(crate) fn nowhere() -> Self {
        Self { node: std::ptr::null(), number: u64::MAX }
    }
}

/// A range of pages that becomes leaves.
#[derive(Clone, Copy)]
struct Change {
    first: u64,
    /// Leaf of the first page.
    leaf: usize,
}

impl Change {
    /// The leaf of `page`.
    fn at(&self, page: u64) -> *mut Node {
        without_provenance_mut(self.leaf + (((page - self.first) as usize) << PAGE_SHIFT))
    }
}

/// The tree. All that changes it must be called by one thread at a time.
#[derive(Debug)]
pub(crate) struct Table {
    root: Entry,
}

/// Pages below one entry of a node at `level` (0 is the lowest).
const fn span(level: u32) -> u64 {
    1 << (BITS * level)
}

fn index(page: u64, level: u32) -> usize {
    (page >> (BITS * level)) as usize & (ENTRIES - 1)
}

fn is_leaf(entry: *mut Node) -> bool {
    entry.addr() & LEAF != 0
}

/// Root and height; 0 if there is none.
fn split(root: *mut Node) -> (*mut Node, u32) {
    let height = if root.is_null() { 0 } else { (root.addr() & 63) as u32 / BITS + 1 };
    (root.map_addr(|addr| addr & !63), height)
}

/// Height of a tree that resolves `last`.
fn height_for(last: u64) -> u32 {
    (1..MAX_HEIGHT).find(|high| last >> (BITS * high) == 0).unwrap_or(MAX_HEIGHT)
}

/// Whether the part `first..=last` of what an entry covers, from `start` on, is all of it and can be one leaf.
fn is_whole(level: u32, start: u64, first: u64, last: u64) -> bool {
    level <= MAX_LEAF && first == start && last - start == span(level) - 1
}

/// The entries of a node that covers pages from `start` on, as far as they meet `first..=last`: the number of each, the first page
/// that it covers, and the part of the range that it covers.
fn spans(level: u32, start: u64, first: u64, last: u64) -> impl Iterator<Item = (usize, u64, u64, u64)> {
    // A page number has 52 bits, so nothing overflows; a root of full height has entries for more.
    let below = |page: u64| page.checked_sub(start).map(|at| at >> (BITS * level));
    let from = below(first).unwrap_or(0) as usize;
    let to = below(last).map_or(0, |to| (to as usize + 1).min(ENTRIES));
    (from..to).map(move |index| {
        let start = start + index as u64 * span(level);
        (index, start, first.max(start), last.min(start + (span(level) - 1)))
    })
}

impl Table {
    pub(crate) fn new() -> Self {
        Self { root: AtomicPtr::new(null_mut()) }
    }

    /// The block around `addr`, in the node that an earlier walk has left in `near` if it is that one's.
    ///
    /// # Safety
    /// No node that was unlinked after the first walk with `near` began is freed before the last one ends.
    #[inline]
    pub(crate) unsafe fn find(&self, addr: u64, near: &mut Near) -> Option<Block> {
        if addr >> (PAGE_SHIFT + BITS) == near.number {
            // SAFETY: a walk has found the node, and the caller sees to it that it stays. Acquire: as in `walk`.
            let entry = unsafe { &*near.node }.entries[index(addr >> PAGE_SHIFT, 0)].load(Acquire);
            if is_leaf(entry) {
                return Some(Block::of(addr, entry, 0));
            }
            // Nothing: but the node may have been replaced since.
        }
        // SAFETY: the caller's promise.
        unsafe { self.walk(addr, near) }
    }

    /// [`Table::find`], from the root.
    ///
    /// # Safety
    /// As there.
    #[inline]
    unsafe fn walk(&self, addr: u64, near: &mut Near) -> Option<Block> {
        let page = addr >> PAGE_SHIFT;
        // Acquire, here and below: pairs with the Release stores in `insert` and `remove`. A child's entries, and
        // what the one who mapped did before, are seen with it.
        let root = self.root.load(Acquire);
        // Bits of the page number below those that the node resolves. Above those of the root there are none.
        let mut below = (root.addr() & 63) as u32;
        if root.is_null() || page >> below >= ENTRIES as u64 {
            return None;
        }
        let mut node = root.map_addr(|addr| addr & !63);
        loop {
            // SAFETY: a root and a child are nodes, and the caller sees to it that they stay. Nodes that leave no bits have
            // no children, so that this ends there.
            let entry = unsafe { &*node }.entries[(page >> below) as usize % ENTRIES].load(Acquire);
            if is_leaf(entry) {
                if below == 0 {
                    *near = Near { node, number: page >> BITS };
                }
                return Some(Block::of(addr, entry, below));
            }
            if entry.is_null() {
                return None;
            }
            node = entry;
            below -= BITS;
        }
    }

    /// The first page in `first..=last` that is mapped.
    pub(crate) fn first_mapped(&self, first: u64, last: u64) -> Option<u64> {
        let (root, height) = split(self.root.load(Relaxed));
        if height == 0 { None } else { Self::first_mapped_below(root, height - 1, 0, first, last) }
    }

    fn first_mapped_below(node: *mut Node, level: u32, start: u64, first: u64, last: u64) -> Option<u64> {
        Self::entries(node, level, start, first, last).find_map(|(entry, start, first, last)| {
            // Relaxed: see `Node::is_empty`.
            match entry.load(Relaxed) {
                entry if entry.is_null() => None,
                entry if is_leaf(entry) => Some(first),
                child => Self::first_mapped_below(child, level - 1, start, first, last),
            }
        })
    }

    /// The entries of a node that covers pages from `start` on, as far as they meet `first..=last`: each with the
    /// first page that it covers, and the part of the range that it covers.
    fn entries<'a>(
        node: *mut Node,
        level: u32,
        start: u64,
        first: u64,
        last: u64,
    ) -> impl Iterator<Item = (&'a Entry, u64, u64, u64)> {
        // SAFETY: nodes in the tree live until they are unlinked, and only the caller, who changes the tree, does
        // that; it does not use an entry of a node that it has unlinked.
        let entries = unsafe { &(*node).entries };
        let each = move |(index, start, first, last)| (&entries[index], start, first, last);
        spans(level, start, first, last).map(each)
    }

    /// Most nodes that [`Table::insert`] makes: only the paths to the two ends need any, and every page of the
    /// largest leaves' worth of 512.
    pub(crate) fn nodes_to_insert(first: u64, last: u64) -> u64 {
        2 * u64::from(MAX_HEIGHT) + ((last - first) >> (BITS * (MAX_LEAF + 1)))
    }

    /// Most nodes that [`Table::remove`] makes: it may cut a leaf at either end.
    pub(crate) const NODES_TO_REMOVE: u64 = 2 * MAX_LEAF as u64;

    /// Translates pages `first..=last`, none of which is mapped, to guest memory from `gpa` on. Returns how many nodes
    /// were made.
    ///
    /// # Errors
    /// The host has no memory: no page is translated. The nodes that were made all the same stay in the tree.
    pub(crate) fn insert(&self, first: u64, last: u64, gpa: u64, allows: Access) -> Result<u64, u64> {
        let leaf = gpa as usize | (allows.bits() as usize & ALLOWS) << ALLOWS_SHIFT | LEAF;
        let above = self.nodes_to_raise(last);
        let mut spares = Spares::new(above).ok_or(0_u64)?;
        self.raise(last, &mut spares);
        let (root, height) = split(self.root.load(Relaxed));
        let below = Self::nodes_below(root, height - 1, 0, first, last);
        let mut spares = Spares::new(below).ok_or(above as u64)?;
        Self::insert_below(root, height - 1, 0, Change { first, leaf }, (first, last), &mut spares);
        Ok((above + below - spares.len()) as u64)
    }

    /// Nodes that [`Table::raise`] makes.
    fn nodes_to_raise(&self, last: u64) -> usize {
        let height = split(self.root.load(Relaxed)).1;
        match (height, height_for(last)) {
            (0, _) => 1,
            (height, wanted) => wanted.saturating_sub(height) as usize,
        }
    }

    /// Nodes that [`Table::insert_below`] makes; `node` is null where there is none yet.
    fn nodes_below(node: *mut Node, level: u32, start: u64, first: u64, last: u64) -> usize {
        let below = |(index, start, first, last): (usize, u64, u64, u64)| {
            let child = match NonNull::new(node) {
                None => null_mut(),
                // SAFETY: as in `entries`. Relaxed: see `Node::is_empty`.
                Some(node) => unsafe { &node.as_ref().entries[index] }.load(Relaxed),
            };
            if child.is_null() && is_whole(level, start, first, last) {
                return 0;
            }
            usize::from(child.is_null()) + Self::nodes_below(child, level - 1, start, first, last)
        };
        spans(level, start, first, last).map(below).sum()
    }

    /// Puts nodes above the root until `last` is below it.
    fn raise(&self, last: u64, spares: &mut Spares) {
        for _ in 0..self.nodes_to_raise(last) {
            let (root, height) = split(self.root.load(Relaxed));
            let new = spares.take();
            // SAFETY: just made, and nobody else's yet.
            unsafe { &(*new).entries[0] }.store(root, Relaxed);
            // The first root has the height that is wanted: nodes between it and nothing would only be in the way.
            let height = if height == 0 { height_for(last) } else { height + 1 };
            // Release: pairs with the Acquire load in `find`, which then sees the node's entries.
            self.root.store(new.map_addr(|addr| addr | (BITS * (height - 1)) as usize), Release);
        }
    }

    fn insert_below(
        node: *mut Node,
        level: u32,
        start: u64,
        change: Change,
        (first, last): (u64, u64),
        spares: &mut Spares,
    ) {
        for (entry, start, first, last) in Self::entries(node, level, start, first, last) {
            let mut child = entry.load(Relaxed);
            if child.is_null() && is_whole(level, start, first, last) {
                // Release: pairs with the Acquire load in `find`.
                entry.store(change.at(start), Release);
                continue;
            }
            if child.is_null() {
                child = spares.take();
                // Release: as above, for a child without entries.
                entry.store(child, Release);
            }
            Self::insert_below(child, level - 1, start, change, (first, last), spares);
        }
    }

    /// Nodes that cutting a leaf at `page`, an end of `first..=last`, takes: none if the range has all of the leaf.
    fn nodes_to_cut(&self, page: u64, first: u64, last: u64) -> usize {
        let (mut node, height) = split(self.root.load(Relaxed));
        let mut leaf = false;
        let mut count = 0;
        for level in (0..height).rev() {
            let start = page & !(span(level) - 1);
            if !leaf {
                if level + 1 == height && page >> (BITS * level) >= ENTRIES as u64 {
                    return 0;
                }
                // SAFETY: as in `entries`. Relaxed: see `Node::is_empty`.
                let entry = unsafe { &(*node).entries[index(page, level)] }.load(Relaxed);
                if entry.is_null() {
                    return 0;
                }
                (node, leaf) = (entry, is_leaf(entry));
            }
            if leaf {
                if start >= first && start + (span(level) - 1) <= last {
                    return count;
                }
                count += 1;
            }
        }
        count
    }

    /// Removes what translates pages `first..=last`, in whatever pieces it was mapped; a leaf that reaches beyond them
    /// is cut. Nodes that are left empty are appended to `unlinked`, which has room for all nodes. Returns the pages that were
    /// mapped, and how many nodes were made; `None`: the host has no memory to cut leaves, and nothing was changed.
    pub(crate) fn remove(&self, first: u64, last: u64, unlinked: &mut Vec<Unlinked>) -> Option<(u64, u64)> {
        let (root, height) = split(self.root.load(Relaxed));
        let cuts = self.nodes_to_cut(first, first, last) + self.nodes_to_cut(last, first, last);
        let mut spares = Spares::new(cuts)?;
        let mut pages = 0;
        if height > 0 {
            Self::remove_below(root, height - 1, 0, (first, last), &mut pages, &mut spares, unlinked);
        }
        Some((pages, (cuts - spares.len()) as u64))
    }

    fn remove_below(
        node: *mut Node,
        level: u32,
        start: u64,
        (first, last): (u64, u64),
        pages: &mut u64,
        spares: &mut Spares,
        unlinked: &mut Vec<Unlinked>,
    ) {
        for (entry, start, first, last) in Self::entries(node, level, start, first, last) {
            let mut child = entry.load(Relaxed);
            if child.is_null() {
                continue;
            }
            if is_leaf(child) {
                if first == start && last - start == span(level) - 1 {
                    *pages += span(level);
                    // Relaxed: the domain's change number, which is stored with Release after this, brings it.
                    entry.store(null_mut(), Relaxed);
                    continue;
                }
                // Cut: the same translations, one level lower. A walker finds either.
                let below = span(level - 1);
                let whole = Change { first: start, leaf: child.addr() };
                child = spares.take();
                for index in 0..ENTRIES {
                    // SAFETY: just made, and nobody else's yet.
                    let entry = unsafe { &(*child).entries[index] };
                    entry.store(whole.at(start + index as u64 * below), Relaxed);
                }
                // Release: pairs with the Acquire load in `find`, which then sees the leaves.
                entry.store(child, Release);
            }
            Self::remove_below(child, level - 1, start, (first, last), pages, spares, unlinked);
            // SAFETY: nodes in the tree live, and this one was in the tree.
            if unsafe { &*child }.is_empty() {
                // Relaxed: as above.
                entry.store(null_mut(), Relaxed);
                unlinked.push(Unlinked(child));
            }
        }
    }

    /// Frees everything below and including `node`.
    ///
    /// # Safety
    /// Nobody else uses the tree any more.
    unsafe fn free(node: *mut Node) {
        // SAFETY: nodes in the tree are alive and in it once; the caller owns them all.
        let node = unsafe { Box::from_raw(node) };
        for entry in &node.entries {
            let child = entry.load(Relaxed);
            if !child.is_null() && !is_leaf(child) {
                // SAFETY: as above.
                unsafe { Self::free(child) };
            }
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let (root, height) = split(self.root.load(Relaxed));
        if height > 0 {
            // SAFETY: `&mut self`: nobody walks or changes the tree.
            unsafe { Self::free(root) };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ALL: u64 = u64::MAX >> PAGE_SHIFT;

    fn find(table: &Table, addr: u64) -> Option<Block> {
        // SAFETY: one thread, and nothing is freed but by `free_all` below.
        unsafe { table.find(addr, &mut Near::nowhere()) }
    }

    fn free_all(unlinked: Vec<Unlinked>) -> u64 {
        let count = unlinked.len() as u64;
        for node in unlinked {
            // SAFETY: one thread: nobody walks.
            unsafe { node.free() };
        }
        count
    }

    #[test]
    fn an_empty_tree_finds_nothing() {
        let table = Table::new();
        assert_eq!(find(&table, 0), None);
        assert_eq!(find(&table, u64::MAX), None);
        assert_eq!(table.first_mapped(0, ALL), None);
        let mut unlinked = Vec::new();
        assert_eq!(table.remove(0, ALL, &mut unlinked), Some((0, 0)));
        assert!(unlinked.is_empty());
    }

    #[test]
    fn aligned_ranges_become_large_leaves() {
        let table = Table::new();
        // 4 KiB, then 2 MiB minus one page, then 2 MiB: from page 511 to page 1535.
        table.insert(511, 1535, 0x5000, Access::READ).unwrap();
        let first = find(&table, 511 << 12).expect("mapped");
        assert_eq!(first, Block { start: 511 << 12, size: 4096, gpa: 0x5000, allows: Access::READ });
        let second = find(&table, (512 << 12) + 0x1234).expect("mapped");
        assert_eq!(second, Block { start: 512 << 12, size: 2 << 20, gpa: 0x6000, allows: Access::READ });
        assert_eq!(find(&table, 510 << 12), None);
        assert_eq!(find(&table, 1536 << 12), None);
    }

    #[test]
    fn the_whole_address_space_can_be_mapped_and_unmapped() {
        // 128 subtrees below the root, each with 512 leaves. Miri takes minutes for all of them, and gets the last two.
        let first = if cfg!(miri) { ALL - ((2 << 45) - 1) } else { 0 };
        let table = Table::new();
        let made = table.insert(first, ALL, first << PAGE_SHIFT, Access::all()).unwrap();
        assert!(made <= Table::nodes_to_insert(first, ALL));
        let start = first << PAGE_SHIFT;
        for addr in [start, start + (1 << 20), start + (1 << 47), start + (1 << 48), u64::MAX] {
            let block = find(&table, addr).expect("mapped");
            assert_eq!(block.gpa, block.start, "{addr:#x}");
            assert_eq!(block.size, 1 << 48);
            assert_eq!(block.allows, Access::READ | Access::WRITE);
        }
        let mut unlinked = Vec::new();
        let (pages, cut) = table.remove(first, ALL, &mut unlinked).unwrap();
        assert_eq!((pages, cut), (ALL - first + 1, 0));
        assert_eq!(free_all(unlinked), made - 1, "all but the root");
    }

    #[test]
    fn a_page_in_the_middle_of_a_large_leaf_is_cut_out() {
        let table = Table::new();
        let pages = 1 << 20;
        table.insert(0, pages - 1, 1 << 40, Access::WRITE).unwrap();
        assert_eq!(find(&table, 0).map(|block| block.size), Some(1 << 30));
        let mut unlinked = Vec::new();
        assert_eq!(table.remove(1000, 1000, &mut unlinked), Some((1, 2)));
        assert!(unlinked.is_empty());
        assert_eq!(find(&table, 1000 << 12), None);
        for (page, size) in [(999, 4096), (1001, 4096), (0, 2 << 20), (1024, 2 << 20)] {
            let block = find(&table, page << 12).expect("mapped");
            assert_eq!((block.size, block.gpa - block.start), (size, 1 << 40));
            assert_eq!(block.allows, Access::WRITE);
        }
        assert_eq!(table.first_mapped(1000, 1000), None);
        assert_eq!(table.first_mapped(1000, ALL), Some(1001));
        assert_eq!(table.remove(0, ALL, &mut unlinked), Some((pages - 1, 0)));
        free_all(unlinked);
        assert_eq!(table.first_mapped(0, ALL), None);
    }

    #[test]
    fn a_tree_grows_above_what_is_there() {
        let table = Table::new();
        let mut made = table.insert(3, 3, 0x3000, Access::READ).unwrap();
        assert_eq!(made, 1);
        made += table.insert(ALL, ALL, 0x8000, Access::READ).unwrap();
        assert_eq!(find(&table, 3 << 12).map(|block| block.gpa), Some(0x3000));
        assert_eq!(find(&table, u64::MAX).map(|block| block.gpa), Some(0x8000));
        let mut unlinked = Vec::new();
        assert_eq!(table.remove(0, ALL - 1, &mut unlinked).unwrap().0, 1);
        assert_eq!(table.remove(ALL, ALL, &mut unlinked).unwrap().0, 1);
        assert_eq!(free_all(unlinked), made - 1);
    }

    /// Nodes are counted before they are made, and none is left over.
    #[test]
    fn a_change_makes_the_nodes_that_it_was_counted_to_need() {
        let table = Table::new();
        let mut random = 1_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let mut nodes = 0;
        for _ in 0..if cfg!(miri) { 30 } else { 5000 } {
            let (wide, shift, long) = (9 * (1 + next(4)), next(14), 9 * next(4));
            let first = next(1 << wide) << shift;
            let last = (first + next(1 << long)).min(ALL);
            let above = table.nodes_to_raise(last);
            if table.first_mapped(first, last).is_none() {
                let made = table.insert(first, last, first << PAGE_SHIFT, Access::READ).unwrap();
                assert!(made >= above as u64 && made <= Table::nodes_to_insert(first, last));
                nodes += made;
            } else {
                let cuts = table.nodes_to_cut(first, first, last) + table.nodes_to_cut(last, first, last);
                let mut unlinked = Vec::new();
                let (pages, made) = table.remove(first, last, &mut unlinked).unwrap();
                assert!(pages > 0 && made <= cuts as u64 && made <= Table::NODES_TO_REMOVE);
                nodes = nodes + made - free_all(unlinked);
            }
        }
        let mut unlinked = Vec::new();
        table.remove(0, ALL, &mut unlinked).unwrap();
        assert_eq!(nodes - free_all(unlinked), 1, "all but the root");
    }
}
