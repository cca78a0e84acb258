//! The bytes of an image, below its tables: everything that is read and written of it goes through here.
//!
//! Reads beyond the end are zeroes. Many threads that ask for [`Io::sync`] at the same time share one.
use super::super::block_status::BlockStatus;
use crate::callback::Callback;
use paravane_store::Store;
use paravane_store::lock;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Bytes of zeroes that are written at once, where the storage cannot zero.
const ZEROES: u64 = 256 << 10;

/// See the module.
#[derive(Debug)]
pub(crate) struct Io {
    source: Arc<dyn Store>,
    /// Alignment of transfers in bytes; a power of two.
    block: u64,
    /// A regular file.
    is_file: bool,
    /// The storage has refused to grow.
    is_fixed: AtomicBool,
    /// Locked while a block is read, changed and written.
    partial: Mutex<()>,
    syncs: Syncs,
    /// What is known of bytes that nobody writes.
    status: BlockStatus,
    /// Called with a range of the file before it is freed.
    on_free: Callback<dyn Fn(Range<u64>) + Send + Sync>,
}

impl Io {
    pub(super) fn new(source: Arc<dyn Store>) -> io::Result<Self> {
        let block = u64::from(source.limits().block).max(1);
        let metadata = source.file().map(File::metadata).transpose()?;
        let is_file = metadata.as_ref().is_some_and(Metadata::is_file);
        let is_fixed = metadata.is_some() && !is_file;
        let (is_fixed, partial) = (AtomicBool::new(is_fixed), Mutex::default());
        let (syncs, status, on_free) = (Syncs::default(), BlockStatus::default(), Callback::default());
        Ok(Self { source, block, is_file, is_fixed, partial, syncs, status, on_free })
    }

    /// Sets what is called with a range before it is freed, once.
    pub(super) fn on_free(&self, call: impl Fn(Range<u64>) + Send + Sync + 'static) {
        self.on_free.set(Box::new(call));
    }

    fn before_free(&self, offset: u64, len: u64) {
        if let Some(call) = self.on_free.get() {
            call(offset..offset.saturating_add(len));
        }
    }

    /// Size in bytes.
    pub(super) fn size(&self) -> io::Result<u64> {
        self.source.try_size()
    }

    /// The file, if it is a regular one.
    pub(super) fn regular_file(&self) -> Option<&File> {
        self.source.file().filter(|_| self.is_file)
    }

    /// Whether the bytes at `offset` read as zeroes, and how many are alike: at most `len`, at least 1.
    ///
    /// The answer is kept: for bytes that nobody writes.
    pub(super) fn zeroes(&self, offset: u64, len: u64) -> io::Result<(bool, u64)> {
        self.status.zeroes(&self.source, offset, len)
    }

    /// Whether the storage cannot grow.
    pub(super) fn is_fixed(&self) -> bool {
        // Relaxed: whoever misses it is told so by `grow`.
        self.is_fixed.load(Ordering::Relaxed)
    }

    /// Fills `into`, with zeroes beyond the end.
    pub(super) fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let (from, end) = (offset, offset.saturating_add(into.len() as u64));
        if (from | end) & (self.block - 1) == 0 {
            return self.read_blocks(into, offset);
        }
        let start = from & !(self.block - 1);
        let mut whole = vec![0; (end.next_multiple_of(self.block) - start) as usize];
        self.read_blocks(&mut whole, start)?;
        into.copy_from_slice(&whole[(from - start) as usize..][..into.len()]);
        Ok(())
    }

    fn read_blocks(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let known = match self.source.file() {
            Some(_) => into.len(),
            None => self.source.size().saturating_sub(offset).min(into.len() as u64) as usize,
        };
        let done = self.source.read_up_to(&mut into[..known], offset)?;
        into[done..].fill(0);
        Ok(())
    }

    /// Writes all bytes.
    pub(super) fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        if self.block <= 1 {
            return self.source.write_all_at(data, offset);
        }
        let end = offset.checked_add(data.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        let start = offset & !(self.block - 1);
        let _alone = lock(&self.partial);
        if (offset | end) & (self.block - 1) == 0 {
            return self.source.write_all_at(data, offset);
        }
        let mut whole = vec![0; (end.next_multiple_of(self.block) - start) as usize];
        self.read_blocks(&mut whole, start)?;
        whole[(offset - start) as usize..][..data.len()].copy_from_slice(data);
        self.source.write_all_at(&whole, start)
    }

    /// Makes whole clusters read as zeroes; `unmap`: frees them where the storage can.
    pub(super) fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.before_free(offset, len);
        match self.source.zero(offset, len, unmap) {
            Err(error) if is_unable(&error) => {}
            done => return done,
        }
        let zeroes = vec![0; len.min(ZEROES) as usize];
        let mut done = 0;
        while done < len {
            let now = (len - done).min(ZEROES);
            self.write(&zeroes[..now as usize], offset + done)?;
            done += now;
        }
        Ok(())
    }

    /// Frees whole clusters that nothing uses, where the storage can.
    pub(super) fn free(&self, offset: u64, len: u64) -> io::Result<()> {
        self.before_free(offset, len);
        match self.source.zero(offset, len, true) {
            Err(error) if is_unable(&error) => match self.source.discard(offset, len) {
                Err(error) if is_unable(&error) => Ok(()),
                done => done,
            },
            done => done,
        }
    }

    /// Makes the storage hold `end` bytes. What is new may read as anything.
    ///
    /// # Errors
    /// ENOSPC: it cannot grow.
    pub(super) fn grow(&self, end: u64) -> io::Result<()> {
        if self.size()? >= end {
            return Ok(());
        }
        let full = || Err(io::Error::from_raw_os_error(libc::ENOSPC));
        if self.is_fixed() {
            return full();
        }
        match self.source.set_size(end) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                self.is_fixed.store(true, Ordering::Relaxed);
                full()
            }
            done => done,
        }
    }

    /// Makes all writes durable that have ended.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.syncs.run(|| self.source.sync())
    }
}

/// Whether only writes can do it.
fn is_unable(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EOPNOTSUPP)
}

/// Syncs of many threads, of which those that wait share the next one.
#[derive(Debug, Default)]
struct Syncs {
    state: Mutex<SyncState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct SyncState {
    begun: u64,
    ended: u64,
    is_running: bool,
    /// The last one that failed, and its error.
    failed: (u64, i32),
}

impl Syncs {
    /// Returns when a sync has ended that began after this call.
    fn run(&self, sync: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let mut state = lock(&self.state);
        let wanted = state.begun + 1;
        while state.ended < wanted {
            if state.is_running {
                state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.is_running = true;
            state.begun += 1;
            drop(state);
            let done = sync();
            state = lock(&self.state);
            state.is_running = false;
            state.ended = state.begun;
            if let Err(error) = done {
                state.failed = (state.begun, error.raw_os_error().unwrap_or(libc::EIO));
            }
            self.ended.notify_all();
        }
        // An error of a later one may be reported, too: that is on the safe side.
        match state.failed {
            (failed, number) if failed >= wanted => Err(io::Error::from_raw_os_error(number)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn threads_that_wait_share_a_sync() {
        let (syncs, count) = (Syncs::default(), AtomicU64::new(0));
        let open = Mutex::new(());
        let closed = open.lock().unwrap();
        let sync = || {
            count.fetch_add(1, Ordering::SeqCst);
            drop(open.lock().unwrap());
            Ok(())
        };
        std::thread::scope(|scope| {
            scope.spawn(|| syncs.run(sync).unwrap());
            while count.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let waiting: Vec<_> = (0..8).map(|_| scope.spawn(|| syncs.run(sync).unwrap())).collect();
            drop(closed);
            waiting.into_iter().for_each(|thread| thread.join().unwrap());
        });
        // The first, and at least one that began after the others had asked.
        assert!((2..=9).contains(&count.load(Ordering::SeqCst)));
        let failing = || Err(io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!(syncs.run(failing).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        assert!(syncs.run(|| Ok(())).is_ok(), "only whoever waited for it is told");
    }
}
