//! The limit that stores of chunks share.
use super::chunks::Chunks;
use crate::lock::lock;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Most bytes of some stores together, and who has to give.
#[derive(Debug)]
pub(super) struct Budget {
    /// Most bytes.
    pub(super) limit: u64,
    /// Bytes of what is on its way into a store, and of what is of no store.
    other: AtomicU64,
    stores: Mutex<Vec<Weak<Chunks>>>,
}

impl Budget {
    /// At most `limit` bytes.
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, other: AtomicU64::new(0), stores: Mutex::default() }
    }

    /// Adds a store.
    pub(super) fn add(&self, store: &Arc<Chunks>) {
        let mut stores = lock(&self.stores);
        stores.retain(|store| store.strong_count() > 0);
        stores.push(Arc::downgrade(store));
    }

    /// Removes a store, which is not used any more.
    pub(super) fn remove(&self, store: &Arc<Chunks>) {
        let mut stores = lock(&self.stores);
        stores.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(store)));
    }

    /// The bytes of all, and the store that has most.
    pub(super) fn used(&self) -> (u64, Option<Arc<Chunks>>) {
        let stores = lock(&self.stores);
        let stores: Vec<_> = stores.iter().filter_map(Weak::upgrade).collect();
        let used = stores.iter().map(|store| store.used()).sum::<u64>();
        let most = stores.into_iter().max_by_key(|store| store.used());
        (used + self.other.load(Ordering::Relaxed), most)
    }

    /// Keeps a chunk, and evicts others until all are within the limit.
    ///
    /// # Errors
    /// The chunk is not kept.
    pub(super) fn keep(&self, store: &Arc<Chunks>, chunk: u64, data: &[u8], mark: bool) -> io::Result<()> {
        let len = data.len() as u64;
        self.other.fetch_add(len, Ordering::Relaxed);
        let kept = self.make_room().and_then(|()| match store.keep(chunk, data, mark) {
            // Others have filled the disk: what is here already makes room.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && store.evict().is_some() => {
                store.keep(chunk, data, mark)
            }
            kept => kept,
        });
        self.other.fetch_sub(len, Ordering::Relaxed);
        kept
    }

    /// Evicts chunks until all are within the limit.
    ///
    /// # Errors
    /// There is nothing to evict.
    pub(super) fn make_room(&self) -> io::Result<()> {
        loop {
            let (used, most) = self.used();
            if used <= self.limit {
                return Ok(());
            }
            if most.and_then(|store| store.evict()).is_none() {
                return Err(io::Error::from_raw_os_error(libc::EDQUOT));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Layout;

    #[test]
    fn the_store_that_has_most_gives() {
        let layout = Layout::new(100 * 4096, 4096).unwrap();
        let store = || Arc::new(Chunks::in_memory(layout).unwrap());
        let (one, two, budget) = (store(), store(), Budget::new(10 * 4096));
        budget.add(&one);
        budget.add(&two);
        for chunk in 0..30 {
            budget.keep(&one, chunk, &[1; 4096], false).unwrap();
        }
        assert_eq!((one.used(), one.evicted()), (10 * 4096, 20));
        for chunk in 0..30 {
            budget.keep(&two, chunk, &[1; 4096], false).unwrap();
        }
        assert_eq!(budget.used().0, 10 * 4096);
        assert!(one.used() >= 4 * 4096 && two.used() >= 4 * 4096, "{} {}", one.used(), two.used());
        budget.remove(&one);
        assert_eq!(budget.used().0, two.used());
    }
}
