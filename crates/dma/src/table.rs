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
use std::ptr::{null_mut, without_provenance_mut};
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
    fn new() -> *mut Self {
        #[cfg(not(loom))]
        {
            // SAFETY: a node is an array of pointers, and null is all zeroes.
            Box::into_raw(unsafe { Box::<Self>::new_zeroed().assume_init() })
        }
        #[cfg(loom)]
        Box::into_raw(Box::new(Self { entries: std::array::from_fn(|_| AtomicPtr::new(null_mut())) }))
    }

    fn is_empty(&self) -> bool {
        // Relaxed: for the one who holds the domain's lock, under which all stores are made.
        self.entries.iter().all(|entry| entry.load(Relaxed).is_null())
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
        // A page number has 52 bits, so nothing overflows; a root of full height has entries for more.
        let below = |page: u64| page.checked_sub(start).map(|at| at >> (BITS * level));
        let from = below(first).unwrap_or(0) as usize;
        let to = below(last).map_or(0, |to| (to as usize + 1).min(ENTRIES));
        // SAFETY: nodes in the tree live until they are unlinked, and only the caller, who changes the tree, does
        // that; it does not use an entry of a node that it has unlinked.
        let entries = unsafe { &(*node).entries };
        entries.iter().enumerate().take(to).skip(from).map(move |(index, entry)| {
            let start = start + index as u64 * span(level);
            (entry, start, first.max(start), last.min(start + (span(level) - 1)))
        })
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
    pub(crate) fn insert(&self, first: u64, last: u64, gpa: u64, allows: Access) -> u64 {
        let leaf = gpa as usize | (allows.bits() as usize & ALLOWS) << ALLOWS_SHIFT | LEAF;
        let mut made = self.raise(last);
        let (root, height) = split(self.root.load(Relaxed));
        Self::insert_below(root, height - 1, 0, Change { first, leaf }, (first, last), &mut made);
        made
    }

    /// Puts nodes above the root until `last` is below it.
    fn raise(&self, last: u64) -> u64 {
        let mut made = 0;
        loop {
            let old = self.root.load(Relaxed);
            let (root, height) = split(old);
            if height == MAX_HEIGHT || (height > 0 && last >> (BITS * height) == 0) {
                return made;
            }
            let new = Node::new();
            made += 1;
            // SAFETY: just made, and nobody else's yet.
            unsafe { &(*new).entries[0] }.store(root, Relaxed);
            // The first root has the height that is wanted: nodes between it and nothing would only be in the way.
            let high = (1..MAX_HEIGHT).find(|high| last >> (BITS * high) == 0).unwrap_or(MAX_HEIGHT);
            let height = if height == 0 { high } else { height + 1 };
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
        made: &mut u64,
    ) {
        for (entry, start, first, last) in Self::entries(node, level, start, first, last) {
            let whole = first == start && last - start == span(level) - 1;
            if whole && level <= MAX_LEAF && entry.load(Relaxed).is_null() {
                // Release: pairs with the Acquire load in `find`.
                entry.store(change.at(start), Release);
                continue;
            }
            let mut child = entry.load(Relaxed);
            if child.is_null() {
                child = Node::new();
                *made += 1;
                // Release: as above, for a child without entries.
                entry.store(child, Release);
            }
            Self::insert_below(child, level - 1, start, change, (first, last), made);
        }
    }

    /// Removes what translates pages `first..=last`, in whatever pieces it was mapped; a leaf that reaches beyond them
    /// is cut. Nodes that are left empty are appended to `unlinked`. Returns the pages that were mapped, and how many
    /// nodes were made.
    pub(crate) fn remove(&self, first: u64, last: u64, unlinked: &mut Vec<Unlinked>) -> (u64, u64) {
        let (root, height) = split(self.root.load(Relaxed));
        let (mut pages, mut made) = (0, 0);
        if height > 0 {
            Self::remove_below(root, height - 1, 0, (first, last), &mut pages, &mut made, unlinked);
        }
        (pages, made)
    }

    fn remove_below(
        node: *mut Node,
        level: u32,
        start: u64,
        (first, last): (u64, u64),
        pages: &mut u64,
        made: &mut u64,
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
                child = Node::new();
                *made += 1;
                for index in 0..ENTRIES {
                    // SAFETY: just made, and nobody else's yet.
                    let entry = unsafe { &(*child).entries[index] };
                    entry.store(whole.at(start + index as u64 * below), Relaxed);
                }
                // Release: pairs with the Acquire load in `find`, which then sees the leaves.
                entry.store(child, Release);
            }
            Self::remove_below(child, level - 1, start, (first, last), pages, made, unlinked);
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
        assert_eq!(table.remove(0, ALL, &mut unlinked), (0, 0));
        assert!(unlinked.is_empty());
    }

    #[test]
    fn aligned_ranges_become_large_leaves() {
        let table = Table::new();
        // 4 KiB, then 2 MiB minus one page, then 2 MiB: from page 511 to page 1535.
        table.insert(511, 1535, 0x5000, Access::READ);
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
        let made = table.insert(first, ALL, first << PAGE_SHIFT, Access::all());
        assert!(made <= Table::nodes_to_insert(first, ALL));
        let start = first << PAGE_SHIFT;
        for addr in [start, start + (1 << 20), start + (1 << 47), start + (1 << 48), u64::MAX] {
            let block = find(&table, addr).expect("mapped");
            assert_eq!(block.gpa, block.start, "{addr:#x}");
            assert_eq!(block.size, 1 << 48);
            assert_eq!(block.allows, Access::READ | Access::WRITE);
        }
        let mut unlinked = Vec::new();
        let (pages, cut) = table.remove(first, ALL, &mut unlinked);
        assert_eq!((pages, cut), (ALL - first + 1, 0));
        assert_eq!(free_all(unlinked), made - 1, "all but the root");
    }

    #[test]
    fn a_page_in_the_middle_of_a_large_leaf_is_cut_out() {
        let table = Table::new();
        let pages = 1 << 20;
        table.insert(0, pages - 1, 1 << 40, Access::WRITE);
        assert_eq!(find(&table, 0).map(|block| block.size), Some(1 << 30));
        let mut unlinked = Vec::new();
        assert_eq!(table.remove(1000, 1000, &mut unlinked), (1, 2));
        assert!(unlinked.is_empty());
        assert_eq!(find(&table, 1000 << 12), None);
        for (page, size) in [(999, 4096), (1001, 4096), (0, 2 << 20), (1024, 2 << 20)] {
            let block = find(&table, page << 12).expect("mapped");
            assert_eq!((block.size, block.gpa - block.start), (size, 1 << 40));
            assert_eq!(block.allows, Access::WRITE);
        }
        assert_eq!(table.first_mapped(1000, 1000), None);
        assert_eq!(table.first_mapped(1000, ALL), Some(1001));
        assert_eq!(table.remove(0, ALL, &mut unlinked), (pages - 1, 0));
        free_all(unlinked);
        assert_eq!(table.first_mapped(0, ALL), None);
    }

    #[test]
    fn a_tree_grows_above_what_is_there() {
        let table = Table::new();
        let mut made = table.insert(3, 3, 0x3000, Access::READ);
        assert_eq!(made, 1);
        made += table.insert(ALL, ALL, 0x8000, Access::READ);
        assert_eq!(find(&table, 3 << 12).map(|block| block.gpa), Some(0x3000));
        assert_eq!(find(&table, u64::MAX).map(|block| block.gpa), Some(0x8000));
        let mut unlinked = Vec::new();
        assert_eq!(table.remove(0, ALL - 1, &mut unlinked).0, 1);
        assert_eq!(table.remove(ALL, ALL, &mut unlinked).0, 1);
        assert_eq!(free_all(unlinked), made - 1);
    }
}
