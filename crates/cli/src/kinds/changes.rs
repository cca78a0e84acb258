//! Settings that differ between two specifications of a device.
use paravane_device::RateLimit;

/// When a setting takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Effect {
    InPlace,
    Restart,
    /// The session ends.
    Session,
}

/// Settings that differ.
#[derive(Default)]
pub(crate) struct Differences(pub(crate) Vec<(&'static str, Effect)>);

impl Differences {
    pub(crate) fn add(&mut self, key: &'static str, effect: Effect, differs: bool) {
        if differs {
            self.0.push((key, effect));
        }
    }

    pub(crate) fn limit(&mut self, old: RateLimit, new: RateLimit) {
        let RateLimit { bytes, ops } = old;
        let keys = [
            (bytes, new.bytes, "bytes-per-second", "burst-bytes"),
            (ops, new.ops, "ops-per-second", "burst-ops"),
        ];
        for (old, new, rate, burst) in keys {
            let (old, new) =
                (old.map(|one| (one.per_second, one.burst)), new.map(|one| (one.per_second, one.burst)));
            let is_rate = old.map(|(rate, _)| rate) != new.map(|(rate, _)| rate);
            self.add(rate, Effect::InPlace, is_rate);
            // The default follows the rate.
            self.add(burst, Effect::InPlace, !is_rate && old != new);
        }
    }
}

/// Adds the fields in which two specifications differ, with key and effect.
///
/// A field that is added has to be listed, at the end if it is compared elsewhere.
macro_rules! differences {
    ($all:expr, $type:ident, $served:expr, $wanted:expr,
     $($field:ident $key:literal $effect:ident),*; but $($other:ident)*) => {
        let $type { $($field,)* $($other: _),* } = $served;
        $($all.add($key, $crate::kinds::changes::Effect::$effect, *$field != $wanted.$field);)*
    };
}
pub(crate) use differences;
