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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Change {
    /// Names of their options.
    pub(crate) keys: Vec<&'static str>,
    /// The strongest one; `None`: nothing differs.
    pub(crate) effect: Option<Effect>,
}

impl Change {
    pub(crate) fn add(&mut self, key: &'static str, effect: Effect, differs: bool) {
        if differs {
            self.effect = self.effect.max(Some(effect));
            self.keys.extend((!self.keys.contains(&key)).then_some(key));
        }
    }

    pub(crate) fn limit(&mut self, old: RateLimit, new: RateLimit) {
        let RateLimit { bytes, ops } = old;
        let keys = [
            (bytes, new.bytes, "bytes-per-second", "burst-bytes"),
            (ops, new.ops, "ops-per-second", "burst-ops"),
        ];
        for (old, new, rate, burst) in keys {
            let is_rate = old.map(|one| one.per_second) != new.map(|one| one.per_second);
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
