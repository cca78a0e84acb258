//! Driver side of a packed queue against a hostile device.
use crate::arena::Arena;
use crate::driver_rig::{Layout, Rig, Ring};
use arbitrary::{Result, Unstructured};
use paravane_spec::feature;
use paravane_spec::packed::{DESC_F_AVAIL, DESC_F_USED, DESC_F_WRITE, DESC_SIZE, EVENT_SIZE};
use std::ops::Range;

/// Runs one input.
pub fn packed_driver(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(rig) = Rig::<Packed>::new(&mut u) else { return };
    rig.run(&mut u);
}

#[derive(Default)]
struct Packed {
    /// Descriptors that an honest device has used so far: position of the next one.
    next_used: usize,
}

impl Layout for Packed {
    fn features(bits: u8) -> u64 {
        feature::RING_PACKED | if bits & 12 == 12 { feature::IN_ORDER } else { 0 }
    }

    fn honest(what: u8) -> bool {
        what >= 2
    }

    /// The device event suppression area. Used descriptors share the driver's area.
    fn device(&self, ring: Ring) -> Range<usize> {
        ring.device()..ring.device() + EVENT_SIZE
    }

    fn write(&mut self, ring: Ring, arena: &mut Arena, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 6 {
            0 => {
                let (id, len) = (u.arbitrary::<u8>()? % 70, u.arbitrary()?);
                self.use_buffer(ring, arena, id.into(), len, 1);
            }
            1 => self.use_buffer(ring, arena, u.arbitrary::<u16>()?.into(), u.arbitrary()?, 1),
            2 => {
                let event = ring.device();
                arena.poke(event, &u.arbitrary::<u32>()?.to_le_bytes());
            }
            3 => {
                // Flags of a random descriptor.
                let at = usize::from(u.arbitrary::<u8>()?) % ring.size() * DESC_SIZE + 14;
                arena.poke(at, &u.arbitrary::<u16>()?.to_le_bytes());
            }
            _ => {
                let at = usize::from(u.arbitrary::<u16>()?) % arena.len();
                arena.poke(at, &u.arbitrary::<u32>()?.to_le_bytes());
            }
        }
        Ok(())
    }

    /// Marks the next descriptor used, as the device, and advances by `descriptors`.
    fn use_buffer(&mut self, ring: Ring, arena: &mut Arena, id: u32, len: u32, descriptors: usize) {
        let at = self.next_used % ring.size() * DESC_SIZE + 8;
        let lap = self.next_used / ring.size();
        let state = if lap.is_multiple_of(2) { DESC_F_AVAIL | DESC_F_USED } else { 0 };
        // Identifiers have 16 bits here.
        let id = u64::from(id as u16);
        let word = u64::from(len) | id << 32 | u64::from(state | DESC_F_WRITE) << 48;
        arena.poke(at, &word.to_le_bytes());
        self.next_used += descriptors;
    }
}
