//! ioeventfds of a guest that runs in this process, without KVM.
use paravane_notify::{IoEventFds, Notifier, NotifyError};
use parking_lot::RwLock;

struct Registration {
    addr: u64,
    datamatch: Option<u32>,
    notifier: Notifier,
}

impl Registration {
    fn collides(&self, addr: u64, datamatch: Option<u32>) -> bool {
        let values = self.datamatch.zip(datamatch);
        self.addr == addr && values.is_none_or(|(ours, theirs)| ours == theirs)
    }
}

/// Addresses that signal an eventfd when they are written to.
///
/// A VMM of one's own passes each write to [`LocalIoEventFds::signal`] before it looks for a
/// device: no lock of a device is taken on the way.
#[derive(Default)]
pub struct LocalIoEventFds {
    table: RwLock<Vec<Registration>>,
}

impl LocalIoEventFds {
    /// Signals what is registered for a write of `data` to `addr`. `false`: nothing is.
    pub fn signal(&self, addr: u64, data: &[u8]) -> bool {
        let table = self.table.read();
        // As in KVM: a datamatch needs 4 bytes, and without one any width will do.
        let matches = |one: &&Registration| {
            one.addr == addr && one.datamatch.is_none_or(|value| value.to_le_bytes() == data)
        };
        match table.iter().find(matches) {
            Some(one) => {
                one.notifier.signal();
                true
            }
            None => false,
        }
    }
}

impl IoEventFds for LocalIoEventFds {
    fn assign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        let notifier = notifier.try_clone()?;
        let mut table = self.table.write();
        if table.iter().any(|one| one.collides(addr, datamatch)) {
            let source = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
            return Err(NotifyError::Os { what: "register an ioeventfd", source });
        }
        table.push(Registration { addr, datamatch, notifier });
        Ok(())
    }

    fn deassign(&self, addr: u64, datamatch: Option<u32>, _notifier: &Notifier) -> Result<(), NotifyError> {
        let mut table = self.table.write();
        let Some(at) = table.iter().position(|one| one.addr == addr && one.datamatch == datamatch) else {
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
        let fds = LocalIoEventFds::default();
        let first = Notifier::new(false).unwrap();
        let any = Notifier::new(false).unwrap();
        fds.assign(0x50, Some(0), &first).unwrap();
        fds.assign(0x1050, None, &any).unwrap();
        assert!(fds.signal(0x50, &[0; 4]));
        assert!(!fds.signal(0x50, &[1, 0, 0, 0]));
        assert!(!fds.signal(0x50, &[0; 2]));
        assert!(!fds.signal(0x54, &[0; 4]));
        assert!(fds.signal(0x1050, &[7, 0]));
        assert_eq!((first.take(), any.take()), (1, 1));
        assert!(fds.assign(0x50, Some(0), &any).is_err());
        fds.deassign(0x50, Some(0), &first).unwrap();
        assert!(!fds.signal(0x50, &[0; 4]));
        assert!(fds.deassign(0x50, Some(0), &first).is_err());
    }
}
