//! ioeventfds of a machine without KVM.
use paravane_notify::{IoEventFds, Notifier, NotifyError};
use std::sync::{PoisonError, RwLock};

struct Doorbell {
    addr: u64,
    datamatch: Option<u32>,
    notifier: Notifier,
}

impl Doorbell {
    fn collides(&self, addr: u64, datamatch: Option<u32>) -> bool {
        let values = self.datamatch.zip(datamatch);
        self.addr == addr && values.is_none_or(|(ours, theirs)| ours == theirs)
    }
}

/// Addresses that signal an eventfd when they are written to. Writers take no lock of a device on the way.
#[derive(Default)]
pub(crate) struct Doorbells {
    table: RwLock<Vec<Doorbell>>,
}

impl Doorbells {
    /// A write of `data` to `addr`: signals what is registered there and says whether something was.
    pub(crate) fn ring(&self, addr: u64, data: &[u8]) -> bool {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        // As KVM has it: a datamatch is of 4 bytes, and without one any width will do.
        let rings = |bell: &&Doorbell| {
            bell.addr == addr && bell.datamatch.is_none_or(|value| value.to_le_bytes() == data)
        };
        match table.iter().find(rings) {
            Some(bell) => {
                bell.notifier.signal();
                true
            }
            None => false,
        }
    }
}

impl IoEventFds for Doorbells {
    fn assign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        let notifier = notifier.try_clone()?;
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        if table.iter().any(|bell| bell.collides(addr, datamatch)) {
            let source = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
            return Err(NotifyError::Os { what: "register an ioeventfd", source });
        }
        table.push(Doorbell { addr, datamatch, notifier });
        Ok(())
    }

    fn deassign(&self, addr: u64, datamatch: Option<u32>, _notifier: &Notifier) -> Result<(), NotifyError> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = table.iter().position(|bell| bell.addr == addr && bell.datamatch == datamatch) else {
            let source = std::io::Error::from(std::io::ErrorKind::NotFound);
            return Err(NotifyError::Os { what: "remove an ioeventfd", source });
        };
        table.swap_remove(at);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_signals_only_what_is_registered_for_its_address_and_value() {
        let bells = Doorbells::default();
        let first = Notifier::new(false).unwrap();
        let any = Notifier::new(false).unwrap();
        bells.assign(0x50, Some(0), &first).unwrap();
        bells.assign(0x1050, None, &any).unwrap();
        assert!(bells.ring(0x50, &[0; 4]));
        assert!(!bells.ring(0x50, &[1, 0, 0, 0]));
        assert!(!bells.ring(0x50, &[0; 2]));
        assert!(!bells.ring(0x54, &[0; 4]));
        assert!(bells.ring(0x1050, &[7, 0]));
        assert_eq!((first.take(), any.take()), (1, 1));
        assert!(bells.assign(0x50, Some(0), &any).is_err());
        bells.deassign(0x50, Some(0), &first).unwrap();
        assert!(!bells.ring(0x50, &[0; 4]));
        assert!(bells.deassign(0x50, Some(0), &first).is_err());
    }
}
