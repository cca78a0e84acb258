//! How devices share the room of a descriptor store.
//!
//! ```text
//!   limit:  | share | share | share |  for all  ................ |
//!           '-- half, in equal parts --'-- first come, first served
//! ```
//! A device below its share is never refused because of others: they had to leave it room.
use std::collections::HashMap;

/// The room of a store, and what each device has of it.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// Number of descriptors that the store takes; `None`: it does not tell.
    pub(super) limit: Option<usize>,
    /// Number of devices. If there are more than before, shares are smaller; what is stored stays.
    pub(super) devices: usize,
    used: HashMap<String, usize>,
}

impl Shares {
    /// Counts a descriptor that the store has already.
    pub(super) fn found(&mut self, device: &str) {
        *self.used.entry(device.to_owned()).or_default() += 1;
    }

    /// Counts one more descriptor of a device.
    ///
    /// # Errors
    /// There is no room for it.
    pub(super) fn take(&mut self, device: &str) -> Result<(), String> {
        let used = self.used.get(device).copied().unwrap_or(0);
        if let Some(limit) = self.limit {
            let share = limit / 2 / self.devices.max(1);
            let beyond: usize = self.used.values().map(|used| used.saturating_sub(share)).sum();
            if used >= share && beyond >= limit - share * self.devices.max(1) {
                return Err(format!(
                    "the device has {used} descriptors in the holder, which is its share of {share} or more, and \
                     others have the rest of {limit}: raise --max-descriptors of the holder"
                ));
            }
        }
        self.used.insert(device.to_owned(), used + 1);
        Ok(())
    }

    /// Counts one less.
    pub(super) fn give_back(&mut self, device: &str) {
        if let Some(used) = self.used.get_mut(device) {
            *used = used.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_below_its_share_is_never_refused() {
        for (limit, devices) in [(40, 4), (41, 4), (7, 3), (8, 1), (100, 9)] {
            let mut shares = Shares { limit: Some(limit), devices, ..Shares::default() };
            let names: Vec<_> = (0..devices).map(|number| number.to_string()).collect();
            let greedy = names.iter().skip(1);
            // All but one take what they get.
            let mut total = 0;
            for name in greedy.cycle().take(4 * limit) {
                total += usize::from(shares.take(name).is_ok());
            }
            let share = limit / 2 / devices;
            assert!((0..share).all(|_| shares.take("0").is_ok()), "{limit} for {devices}");
            assert!(total + share <= limit, "{limit} for {devices}: {total}");
            assert!(devices == 1 || shares.take("0").is_err());
            if devices > 1 {
                shares.give_back("1");
                shares.take("0").unwrap();
            }
        }
    }

    #[test]
    fn what_was_stored_before_counts_and_a_store_may_tell_no_limit() {
        let mut shares = Shares { devices: 2, ..Shares::default() };
        (0..1000).for_each(|_| shares.found("a"));
        shares.take("a").unwrap();
        shares.limit = Some(100);
        shares.take("a").unwrap_err();
        // More than the limit: the store itself refuses.
        shares.take("b").unwrap();
        assert_eq!(shares.used["b"], 1);
        shares.give_back("unknown");
    }
}
