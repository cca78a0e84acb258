//! The device that a thread works for, to be named in the log lines of all crates.
//!
//! A new thread does not inherit the name: read it by [`LogDevice::current`] before the spawn, and
//! enter it in the thread.
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

thread_local! {
    static CURRENT: RefCell<Option<Arc<str>>> = const { RefCell::new(None) };
}

/// Names the device in the log lines of the calling thread until it is dropped.
#[derive(Debug)]
pub struct LogDevice {
    before: Option<Arc<str>>,
    /// Belongs to its thread.
    _not_send: PhantomData<*const ()>,
}

impl LogDevice {
    /// Sets the device's name. With `None`, log lines name no device.
    #[must_use = "the name is forgotten when this is dropped"]
    pub fn enter(name: Option<Arc<str>>) -> Self {
        let before = CURRENT.with(|current| current.replace(name));
        Self { before, _not_send: PhantomData }
    }

    /// Sets the device's name for as long as the thread lives, or until the next call.
    pub fn set(name: Option<Arc<str>>) {
        CURRENT.with(|current| drop(current.replace(name)));
    }

    /// Name of the device in the calling thread.
    #[must_use]
    pub fn current() -> Option<Arc<str>> {
        // Thread-local storage is gone when a thread ends.
        CURRENT.try_with(|current| current.try_borrow().ok()?.clone()).ok()?
    }
}

impl Drop for LogDevice {
    fn drop(&mut self) {
        let before = self.before.take();
        let _ = CURRENT.try_with(|current| current.replace(before));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_lasts_as_long_as_the_guard() {
        assert_eq!(LogDevice::current(), None);
        let outer = LogDevice::enter(Some("vm0".into()));
        {
            let _inner = LogDevice::enter(Some("vm1".into()));
            assert_eq!(LogDevice::current().as_deref(), Some("vm1"));
        }
        assert_eq!(LogDevice::current().as_deref(), Some("vm0"));
        let other = std::thread::spawn(LogDevice::current);
        assert_eq!(other.join().unwrap(), None, "threads do not share it");
        LogDevice::set(Some("vm2".into()));
        assert_eq!(LogDevice::current().as_deref(), Some("vm2"));
        drop(outer);
        assert_eq!(LogDevice::current(), None);
    }
}
