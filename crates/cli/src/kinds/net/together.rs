//! Network cards that are connected to each other.
use super::spec::Net;
use crate::kinds::checked::OptionError;
use crate::kinds::kind::Spec;
use std::any::Any;
use std::collections::HashMap;

/// Checks that each link connects two cards that fit.
///
/// # Errors
/// One does not: the number of its last card, and why.
pub(super) fn check(devices: &[(usize, &dyn Spec)]) -> Result<(), (usize, OptionError)> {
    let mut links: HashMap<&str, Vec<(usize, &Net)>> = HashMap::new();
    for (device, spec) in devices {
        if let (Some(name), Some(card)) = (spec.link(), (*spec as &dyn Any).downcast_ref()) {
            links.entry(name).or_default().push((*device, card));
        }
    }
    for (name, ends) in links {
        let last = ends[ends.len() - 1].0;
        let fault = |what| Err((last, ("link", what)));
        let [(_, one), (_, other)] = ends.as_slice() else {
            return fault(format!("{name:?} connects two cards, but {} have it", ends.len()));
        };
        if one.queues != other.queues {
            let (one, other) = (one.queues, other.queues);
            return fault(format!(
                "{name:?} connects cards with {one} and {other} queue pairs: use the same number"
            ));
        }
        // Ethernet's default without `mtu`.
        let [one, other] = [one, other].map(|net| net.mtu.unwrap_or(1500));
        if one != other {
            return fault(format!(
                "{name:?} connects cards with MTUs of {one} and {other} bytes: use the same MTU"
            ));
        }
    }
    Ok(())
}
