//! Translation table of a domain: a radix tree over page numbers.
//!
//! It changes while other threads walk it.
//!
//! ```text
//! root (height 0 to 6) --> node: 512 entries --> node ... --> leaf: guest page, permissions
//!                                     '--> leaf: 512 pages (or 512^2 ...) that a mapping covers
//! ```
//! An entry is one word: nothing, a child, or a leaf. Walkers load it; the holder of the domain's
//! lock stores it. So a walker sees each page's translation before or after a change and nothing in
//! between. The tree is as high as the highest address requires: two loads for devices that use
//! less than a gigabyte of addresses.
//!
//! Reasons for a tree: the cost of a change depends on its range, not on the number of mappings (a
//! sorted array would be copied); a million single pages take 8 MiB of leaves; neighbours share a
//! cache line; nothing is hashed or probed.
//!
//! A node that a removal has emptied is unlinked at once and returned to the caller, which frees it
//! once no walker can be in it.
use crate::Access;
use crate::sync::AtomicPtr;
use std::ptr::{NonNull, null_mut, without_provenance_mut};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Base-2 logarithm of the smallest page.
pub(crate) const PAGE_SHIFT: u32 = 12;
/// Number of bits of the page number that one node resolves.
///
/// Models have tiny nodes, since each atomic is expensive there.
const BITS: u32 = if cfg!(loom) { 1 } else { 9 };
const ENTRIES: usize = 1 << BITS;
/// Height that resolves every 64-bit address.
const MAX_HEIGHT: u32 = (64 - PAGE_SHIFT).div_ceil(BITS);
/// Highest level of a leaf: one of 2^48 bytes, so that sizes stay far below 2^64.
const MAX_LEAF: u32 = 36 / BITS;

/// Bit 0 of an entry distinguishes a leaf from a child, which is aligned.
///
/// The device's permissions follow.
const LEAF: usize = 1;
const ALLOWS_SHIFT: u32 = 1;
const ALLOWS: usize = (Access::READ.bits() | Access::WRITE.bits()) as usize;

const _: () = assert!(size_of::<usize>() == 8, "a leaf holds a 64-bit guest address");
const _: () = assert!(BITS * (MAX_HEIGHT - 1) < 64 && ALLOWS < 8);

/// Child, leaf or nothing.
///
/// In the root pointer, the low bits hold the number of bits of the page number that the root
/// leaves to the nodes below it.
type Entry = AtomicPtr<Node>;

/// Node of the tree.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Node {
    entries: [Entry; ENTRIES],
}

impl Node {
    /// `None` if the host has no memory.
    fn new() -> Option<Box<Self>> {
        #[cfg(not(loom))]
        {
            // SAFETY: a node has a size, and is an array of pointers, for which zeroes are null.
            let node = unsafe { std::alloc::alloc_zeroed(std::alloc::Layout::new::<Self>()) }.cast::<Self>();
            // SAFETY: if it is not null, it was allocated by the global allocator with the layout
            // of a node, and is valid.
            (!node.is_null()).then(|| unsafe { Box::from_raw(node) })
        }
        #[cfg(loom)]
        Some(Box::new(Self { entries: std::array::from_fn(|_| AtomicPtr::new(null_mut())) }))
    }

    fn is_empty(&self) -> bool {
        // Relaxed: for the holder of the domain's lock, under which all stores are made.
        self.entries.iter().all(|entry| entry.load(Relaxed).is_null())
    }
}

/// Nodes that a change will put into the tree.
///
/// All are made before the change begins, so that it cannot fail half-way.
#[derive(Debug, Default)]
pub(crate) struct Spares(Vec<Box<Node>>);

impl Spares {
    /// Makes `count` nodes. `None` if the host has no memory.
    pub(crate) fn new(count: usize) -> Option<Self> {
        let mut nodes = Vec::new();
        nodes.try_reserve_exact(count).ok()?;
        for _ in 0..count {
            nodes.push(Node::new()?);
        }
        Some(Self(nodes))
    }

    fn take(&mut self) -> *mut Node {
        Box::into_raw(self.0.pop().expect("the change needs no more nodes than were counted"))
    }

    /// Number of nodes that were not taken.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Node outside of the tree, with nothing below it.
#[derive(Debug)]
pub(crate) struct Unlinked(*mut Node);

// SAFETY: this owns the node, except that walkers may still read its atomics.
unsafe impl Send for Unlinked {}

impl Unlinked {
    /// Frees the node.
    ///
    /// # Safety
    /// Every walk that began before it was unlinked has ended.
    pub(crate) unsafe fn free(self) {
        // SAFETY: made by `Node::new`, unlinked once, and by the caller's promise out of use.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Result of a walk: the largest aligned block that one entry translates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// First device address.
    pub(crate) start: u64,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Guest-physical address of `start`.
    pub(crate) gpa: u64,
    /// Allowed directions.
    pub(crate) allows: Access,
}

impl Block {
    /// Block of the leaf at `addr`; `below` bits of the page number are below the leaf.
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

/// Lowest node that a walk ended in: leaves beside the one found need no walk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Near {
    node: *const Node,
    /// Its first page, without the bits that it resolves.
    number: u64,
}

impl Near {
    /// No node: no page has this number.
    #[inline(always)]
    pub(crate) fn nowhere() -> Self {
        Self { node: std::ptr::null(), number: u64::MAX }
    }
}

/// Range of pages that becomes leaves.
#[derive(Clone, Copy)]
struct Change {
    first: u64,
    /// Leaf of the first page.
    leaf: usize,
}

impl Change {
    /// Leaf of `page`.
    fn at(&self, page: u64) -> *mut Node {
        without_provenance_mut(self.leaf + (((page - self.first) as usize) << PAGE_SHIFT))
    }
}

/// Translation table. Call its changing methods from one thread at a time.
#[derive(Debug)]
pub(crate) struct Table {
    root: Entry,
}

/// Number of pages below one entry of a node at `level` (0 is the lowest).
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

/// Whether `first..=last` can be one leaf in an entry from page `start` on.
///
/// It must be all that the entry covers.
fn is_whole(level: u32, start: u64, first: u64, last: u64) -> bool {
    level <= MAX_LEAF && first == start && last - start == span(level) - 1
}

/// Entries of a node that overlap `first..=last`.
///
/// The node covers pages from `start` on.
///
/// Yields the index of each, the first page that it covers, and its part of the range.
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

    /// Block around `addr`.
    ///
    /// Uses the node that an earlier walk left in `near`, if `addr` is in it.
    ///
    /// # Safety
    /// No node that was unlinked after the first walk with `near` began is freed before the last
    /// one ends.
    #[inline]
    pub(crate) unsafe fn find(&self, addr: u64, near: &mut Near) -> Option<Block> {
        if addr >> (PAGE_SHIFT + BITS) == near.number {
            // SAFETY: a walk has found the node, and the caller ensures that it stays. Acquire: as
            // in `walk`.
            let entry = unsafe { &*near.node }.entries[index(addr >> PAGE_SHIFT, 0)].load(Acquire);
            if is_leaf(entry) {
                return Some(Block::of(addr, entry, 0));
            }
            // No leaf: but the node may have been replaced since.
        }
        // SAFETY: the caller's promise.
        unsafe { self.walk(addr, near) }
    }

    /// [`Table::find`], from the root.
    ///
    /// # Safety
    /// As [`Table::find`].
    #[inline]
    unsafe fn walk(&self, addr: u64, near: &mut Near) -> Option<Block> {
        let page = addr >> PAGE_SHIFT;
        // Acquire, here and below: pairs with the Release stores in `insert` and `remove`. A
        // child's entries, and what the mapping thread did before, are seen with it.
        let root = self.root.load(Acquire);
        // Bits of the page number below those that the node resolves. Above those of the root there
        // are none.
        let mut below = (root.addr() & 63) as u32;
        if root.is_null() || page >> below >= ENTRIES as u64 {
            return None;
        }
        let mut node = root.map_addr(|addr| addr & !63);
        loop {
            // SAFETY: a root and a child are nodes, and the caller ensures that they stay. Nodes
            // that leave no bits have no children, so that this ends there.
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

    /// First page in `first..=last` that is mapped.
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

    /// Entries of a node that overlap `first..=last`.
    ///
    /// The node covers pages from `start` on.
    ///
    /// Yields each with the first page that it covers, and its part of the range.
    fn entries<'a>(
        node: *mut Node,
        level: u32,
        start: u64,
        first: u64,
        last: u64,
    ) -> impl Iterator<Item = (&'a Entry, u64, u64, u64)> {
        // SAFETY: nodes in the tree live until they are unlinked, and only the caller, who changes
        // the tree, does that; it does not use an entry of a node that it has unlinked.
        let entries = unsafe { &(*node).entries };
        let each = move |(index, start, first, last)| (&entries[index], start, first, last);
        spans(level, start, first, last).map(each)
    }

    /// Most nodes that [`Table::insert`] makes.
    ///
    /// Only the paths to the two ends need any, and each 512 pages of the largest leaf size.
    pub(crate) fn nodes_to_insert(first: u64, last: u64) -> u64 {
        2 * u64::from(MAX_HEIGHT) + ((last - first) >> (BITS * (MAX_LEAF + 1)))
    }

    /// Most nodes that [`Table::remove`] makes: it may split a leaf at either end.
    pub(crate) const NODES_TO_REMOVE: u64 = 2 * MAX_LEAF as u64;

    /// Translates pages `first..=last` to guest memory from `gpa` on.
    ///
    /// None of them may be mapped. Returns the number of nodes made.
    ///
    /// # Errors
    /// The host has no memory: no page is translated. The nodes made until then stay in the tree;
    /// the error is their number.
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

    /// Number of nodes that [`Table::raise`] makes.
    fn nodes_to_raise(&self, last: u64) -> usize {
        let height = split(self.root.load(Relaxed)).1;
        match (height, height_for(last)) {
            (0, _) => 1,
            (height, wanted) => wanted.saturating_sub(height) as usize,
        }
    }

    /// Number of nodes that [`Table::insert_below`] makes.
    ///
    /// `node` is null where there is none yet.
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
            // SAFETY: just made, and not shared yet.
            unsafe { &(*new).entries[0] }.store(root, Relaxed);
            // The first root gets its final height: nodes between it and nothing would be useless.
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

    /// Number of nodes that splitting a leaf at `page` takes.
    ///
    /// `page` is an end of `first..=last`; 0 if the range has all of the leaf.
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

    /// Removes the translation of pages `first..=last`.
    ///
    /// Splits leaves that reach beyond them.
    ///
    /// Appends emptied nodes to `unlinked`, which must have room for all nodes. Returns the number
    /// of pages that were mapped, and of nodes made. `None` if the host has no memory to split
    /// leaves: nothing was changed.
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
                    // Relaxed: the domain's change number, which is stored with Release after this,
                    // brings it.
                    entry.store(null_mut(), Relaxed);
                    continue;
                }
                // Split: the same translations, one level lower. A walker finds either.
                let below = span(level - 1);
                let whole = Change { first: start, leaf: child.addr() };
                child = spares.take();
                for index in 0..ENTRIES {
                    // SAFETY: just made, and not shared yet.
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
    /// Nothing else uses the tree any more.
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
            // SAFETY: `&mut self`: no thread walks or changes the tree.
            unsafe { Self::free(root) };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ALL: u64 = u64::MAX >> PAGE_SHIFT;

    fn find(table: &Table, addr: u64) -> Option<Block> {
        // SAFETY: one thread, and only `free_all` below frees nodes.
        unsafe { table.find(addr, &mut Near::nowhere()) }
    }

    fn free_all(unlinked: Vec<Unlinked>) -> u64 {
        let count = unlinked.len() as u64;
        for node in unlinked {
            // SAFETY: one thread: there are no walks.
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
        // 128 subtrees below the root, each with 512 leaves. Miri, which is slow, gets the last
        // two.
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
