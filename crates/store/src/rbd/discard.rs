//! The smallest discard that frees space.
//!
//! librbd takes an aligned part of each object out of a discard and drops the rest, so that OSDs
//! are not asked for what frees nothing: `rbd_discard_granularity_bytes`, 64 KiB. Less than an object
//! is enough: OSDs punch holes. The kernel's client has the same default (`alloc_size`).

/// A block that the OSDs write without reading before: BlueStore's unit of allocation.
pub(super) const PHYSICAL_BLOCK: u32 = 4096;

/// Default of the setting in Ceph 16.
const GRANULARITY: u64 = 64 << 10;

/// How the bytes of an image are dealt out to objects.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stripes {
    /// Bytes of an object.
    pub(super) object: u64,
    /// Bytes in one object before the next one gets some.
    pub(super) unit: u64,
    /// Objects that take turns.
    pub(super) count: u64,
}

/// Bytes of the smallest discard that frees space.
///
/// `setting` is the value of `rbd_discard_granularity_bytes`.
pub(super) fn discard_block(setting: Option<String>, stripes: Stripes) -> u32 {
    smallest(setting.and_then(|value| value.parse().ok()).unwrap_or(GRANULARITY), stripes)
}

/// Bytes of a range of which each object has at least `setting` bytes, or all of it.
fn smallest(setting: u64, stripes: Stripes) -> u32 {
    let block = PHYSICAL_BLOCK.into();
    let part = setting.min(stripes.object).max(block).checked_next_multiple_of(block).unwrap_or(block);
    // Stripes that are smaller deal a range out to several objects.
    let objects = if stripes.unit < part { stripes.count.max(1) } else { 1 };
    let whole = part.saturating_mul(objects);
    // An image that would take gigabytes at once: what is smaller frees some of it at least.
    u32::try_from(whole).unwrap_or(part.try_into().unwrap_or(PHYSICAL_BLOCK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_object_gets_enough() {
        let plain = |object| Stripes { object, unit: object, count: 1 };
        assert_eq!(smallest(64 << 10, plain(4 << 20)), 64 << 10);
        assert_eq!(smallest(64 << 10, plain(16 << 10)), 16 << 10, "an object is less");
        assert_eq!(smallest(32 << 20, plain(4 << 20)), 4 << 20, "a whole object is enough");
        // Without a limit, OSDs free their blocks.
        assert_eq!(smallest(0, plain(4 << 20)), 4096);
        assert_eq!(smallest(5000, plain(4 << 20)), 8192);
        let striped = |unit| Stripes { object: 4 << 20, unit, count: 16 };
        assert_eq!(smallest(64 << 10, striped(4096)), 1 << 20, "16 objects with 64 KiB each");
        assert_eq!(smallest(64 << 10, striped(64 << 10)), 64 << 10, "a stripe is enough");
        assert_eq!(smallest(64 << 10, Stripes { count: u64::MAX, ..striped(4096) }), 64 << 10);
        assert_eq!(smallest(u64::MAX, Stripes { object: 0, unit: 0, count: 0 }), 4096);
        assert_eq!(smallest(u64::MAX, plain(u64::MAX)), 4096);
    }
}
