//! Driver side of a split queue against a hostile device.
use crate::arena::Arena;
use crate::driver_rig::{Layout, Rig, Ring};
use arbitrary::{Result, Unstructured};
use paravane_ring::Segment;
use paravane_spec::split::{
    AVAIL_ENTRY, AVAIL_IDX, AVAIL_RING, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_SIZE, USED_ENTRY,
    USED_FLAGS, USED_IDX, USED_RING,
};
use std::ops::Range;

/// Runs one input.
pub fn split_driver(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(rig) = Rig::<Split>::new(&mut u) else { return };
    rig.run(&mut u);
}

#[derive(Default)]
struct Split {
    /// Buffers added so far.
    added: u16,
    /// Whether the device has lied.
    lied: bool,
}

impl Layout for Split {
    fn features(_bits: u8) -> u64 {
        0
    }

    fn honest(what: u8) -> bool {
        what == 4
    }

    fn device(&self, ring: Ring) -> Range<usize> {
        ring.device()..ring.device() + USED_RING + ring.size() * USED_ENTRY + 2
    }

    fn write(&mut self, ring: Ring, arena: &mut Arena, u: &mut Unstructured<'_>) -> Result<()> {
        self.lied = true;
        let used = ring.device();
        match u.arbitrary::<u8>()? % 8 {
            0 => {
                let (id, len) = (u.arbitrary::<u8>()? % 70, u.arbitrary()?);
                self.use_buffer(ring, arena, id.into(), len, 1);
            }
            1 => self.use_buffer(ring, arena, u.arbitrary()?, u.arbitrary()?, 1),
            2 => {
                let idx = arena.u16_at(used + USED_IDX).wrapping_add(u.arbitrary::<u8>()?.into());
                arena.poke(used + USED_IDX, &idx.to_le_bytes());
            }
            3 => arena.poke(used + USED_IDX, &u.arbitrary::<u16>()?.to_le_bytes()),
            4 => arena.poke(used + USED_FLAGS, &[u.arbitrary()?, 0]),
            5 => {
                let event = used + USED_RING + ring.size() * USED_ENTRY;
                arena.poke(event, &u.arbitrary::<u16>()?.to_le_bytes());
            }
            _ => {
                // Descriptors, available ring, indirect tables: the device must not write them, but
                // can.
                let at = usize::from(u.arbitrary::<u16>()?) % arena.len();
                arena.poke(at, &u.arbitrary::<u32>()?.to_le_bytes());
            }
        }
        Ok(())
    }

    /// Writes the next used entry, as the device, and advances the index.
    fn use_buffer(&mut self, ring: Ring, arena: &mut Arena, id: u32, len: u32, _descriptors: usize) {
        let used = ring.device();
        let idx = arena.u16_at(used + USED_IDX);
        let at = used + USED_RING + usize::from(idx) % ring.size() * USED_ENTRY;
        arena.poke(at, &(u64::from(len) << 32 | u64::from(id)).to_le_bytes());
        arena.poke(used + USED_IDX, &idx.wrapping_add(1).to_le_bytes());
    }

    /// Checks the newest available entry and its chain, before its publication.
    fn added(&mut self, ring: Ring, arena: &Arena, id: u16, readable: usize, segments: &[Segment]) {
        let avail = ring.offset(ring.addresses.driver);
        let slot = usize::from(self.added) % ring.size();
        self.added = self.added.wrapping_add(1);
        assert_eq!(arena.u16_at(avail + AVAIL_RING + slot * AVAIL_ENTRY), id);
        let memory = arena.expected();
        let (mut table, mut index) = (ring.offset(ring.addresses.desc), usize::from(id));
        for (i, segment) in segments.iter().enumerate() {
            let mut desc = &memory[table + index * DESC_SIZE..][..DESC_SIZE];
            let word = |desc: &[u8], at| u64::from_le_bytes(desc[at..at + 8].try_into().expect("8 bytes"));
            if i == 0 && word(desc, 8) >> 32 & u64::from(DESC_F_INDIRECT) != 0 {
                assert_eq!(word(desc, 8) as u32 as usize, segments.len() * DESC_SIZE);
                table = ring.offset(word(desc, 0));
                desc = &memory[table..][..DESC_SIZE];
            }
            let flags = (word(desc, 8) >> 32) as u16;
            assert_eq!(word(desc, 0), segment.addr);
            assert_eq!(word(desc, 8) as u32, segment.len);
            assert_eq!(flags & DESC_F_WRITE != 0, i >= readable);
            assert_eq!(flags & DESC_F_NEXT != 0, i + 1 < segments.len());
            index = (word(desc, 8) >> 48) as usize;
        }
    }

    fn published(&mut self, ring: Ring, arena: &Arena) {
        assert_eq!(arena.u16_at(ring.offset(ring.addresses.driver) + AVAIL_IDX), self.added);
    }

    fn nothing(&self, ring: Ring, arena: &Arena, consumed: u64) {
        assert_eq!(arena.u16_at(ring.device() + USED_IDX), consumed as u16, "something is there");
    }

    fn polled(&self, ring: Ring, arena: &Arena, news: bool, then: u64, consumed: u64) {
        let came = consumed != then || arena.u16_at(ring.device() + USED_IDX) != then as u16;
        // A device that takes back a used index has still changed it.
        assert!(news == came || news && self.lied, "{news} after {then}, at {consumed}");
    }
}
