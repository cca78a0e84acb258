//! A file system whose writes wait until the test lets them go (FUSE).
//!
//! ```text
//!   daemon --write--> kernel --FUSE_WRITE--> Stalled: done at once, or held
//!                                                      '-- let_go: done, in the order of the call
//! ```
//! It has one file, `a.img`. A write that is held is in the hands of the storage: no signal ends
//! it. A test that fails drops what it holds, so that nothing hangs.
use crate::daemon::{Folder, is_root, patience, skip};
use rustix::fs::{Mode, OFlags};
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size of the file.
pub(crate) const SIZE: usize = 1 << 20;
/// Longest write that the kernel sends at once.
const MAX_WRITE: u32 = 1 << 16;

/// Numbers of linux/fuse.h.
mod op {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
}

/// FUSE_ASYNC_DIO: direct writes wait without a thread, as those of a disk do.
const ASYNC_DIO: u32 = 1 << 15;
/// FOPEN_KEEP_CACHE: to open the file does not wait for pages that are being written.
const KEEP_CACHE: u64 = 1 << 1;

#[derive(FromBytes, KnownLayout, Immutable)]
#[repr(C)]
struct InHeader {
    len: u32,
    opcode: u32,
    unique: u64,
    node: u64,
    owner: [u32; 3],
    more: u32,
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct OutHeader {
    len: u32,
    error: i32,
    unique: u64,
}

/// First fields of `fuse_read_in` and `fuse_write_in`; the data of a write follows.
#[derive(FromBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Transfer {
    handle: u64,
    offset: u64,
    size: u32,
    flags: u32,
    lock_owner: u64,
    more: [u32; 2],
}

#[derive(IntoBytes, Immutable, Default)]
#[repr(C)]
struct InitOut {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
    max_background: u16,
    congestion_threshold: u16,
    max_write: u32,
    time_gran: u32,
    more: [u32; 9],
}

#[derive(IntoBytes, Immutable, Default)]
#[repr(C)]
struct Attributes {
    ino: u64,
    size: u64,
    blocks: u64,
    times: [u64; 3],
    nanoseconds: [u32; 3],
    mode: u32,
    links: u32,
    owner: [u32; 3],
    block: u32,
    flags: u32,
}

/// A write that the kernel waits for. Dropped, it fails.
pub(crate) struct Held {
    fuse: Arc<OwnedFd>,
    unique: u64,
    offset: usize,
    data: Vec<u8>,
    done: bool,
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.done {
            let _ = answer(&self.fuse, self.unique, libc::EIO, &[]);
        }
    }
}

#[derive(Default)]
struct State {
    content: Vec<u8>,
    holds: bool,
    held: Vec<Held>,
}

/// The mounted file system.
pub(crate) struct Stalled {
    at: PathBuf,
    state: Arc<Mutex<State>>,
}

impl Stalled {
    /// Mounts it at `mnt`. `None`: not possible on this host; `test` is skipped.
    pub(crate) fn mount(folder: &Folder, test: &str) -> Option<Self> {
        if !is_root() {
            skip(test, "a file system is mounted by root only");
            return None;
        }
        let fuse = match rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Ok(fuse) => fuse,
            Err(error) => {
                skip(test, format!("/dev/fuse: {error}"));
                return None;
            }
        };
        let at = folder.path("mnt");
        std::fs::create_dir(&at).unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", fuse.as_raw_fd());
        let text = |text: &str| CString::new(text).unwrap();
        let (path, kind, options) = (text(at.to_str().unwrap()), text("fuse"), text(&options));
        // SAFETY: all strings end with a zero and outlive the call.
        let mounted =
            unsafe { libc::mount(kind.as_ptr(), path.as_ptr(), kind.as_ptr(), 0, options.as_ptr().cast()) };
        if mounted != 0 {
            skip(test, format!("mount -t fuse: {}", std::io::Error::last_os_error()));
            return None;
        }
        let state = Arc::new(Mutex::new(State { content: vec![0; SIZE], ..State::default() }));
        let (fuse, served) = (Arc::new(fuse), state.clone());
        std::thread::spawn(move || serve(&fuse, &served));
        Some(Self { at, state })
    }

    /// Holds writes from now on.
    pub(crate) fn hold(&self) {
        self.state.lock().unwrap().holds = true;
    }

    /// Takes the writes that are held, when there are `count`; later ones are done at once.
    pub(crate) fn take(&self, count: usize) -> Vec<Held> {
        let end = Instant::now() + patience();
        loop {
            {
                let mut state = self.state.lock().unwrap();
                if state.held.len() >= count {
                    state.holds = false;
                    return std::mem::take(&mut state.held);
                }
            }
            assert!(Instant::now() < end, "no {count} writes arrive");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Does writes that were held.
    pub(crate) fn let_go(&self, held: Vec<Held>) {
        for mut held in held {
            self.state.lock().unwrap().content[held.offset..][..held.data.len()].copy_from_slice(&held.data);
            held.done = true;
            // The kernel may have given it up.
            let _ = answer(&held.fuse, held.unique, 0, [held.data.len() as u32, 0].as_bytes());
        }
    }

    /// What the storage has.
    pub(crate) fn content(&self) -> Vec<u8> {
        self.state.lock().unwrap().content.clone()
    }
}

impl Drop for Stalled {
    fn drop(&mut self) {
        self.state.lock().unwrap().held.clear();
        let path = CString::new(self.at.to_str().unwrap()).unwrap();
        // SAFETY: the string ends with a zero and outlives the call.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

fn answer(fuse: &OwnedFd, unique: u64, error: i32, body: &[u8]) -> rustix::io::Result<usize> {
    let len = (size_of::<OutHeader>() + body.len()) as u32;
    rustix::io::write(fuse, &[OutHeader { len, error: -error, unique }.as_bytes(), body].concat())
}

fn attributes(node: u64) -> Attributes {
    let attributes = Attributes { ino: node, links: 1, block: 4096, ..Attributes::default() };
    match node {
        1 => Attributes { mode: libc::S_IFDIR | 0o755, ..attributes },
        _ => Attributes {
            mode: libc::S_IFREG | 0o666,
            size: SIZE as u64,
            blocks: SIZE as u64 / 512,
            ..attributes
        },
    }
}

fn serve(fuse: &Arc<OwnedFd>, state: &Mutex<State>) {
    let mut buffer = vec![0; MAX_WRITE as usize + 8192];
    // Seconds for which the kernel may keep names and attributes, and their nanoseconds.
    let valid = |node: u64| [[3600_u64, 0].as_bytes(), attributes(node).as_bytes()].concat();
    loop {
        let len = match rustix::io::read(fuse, &mut buffer) {
            Ok(len) => len,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::NOENT | rustix::io::Errno::AGAIN) => continue,
            // It was unmounted.
            Err(_) => return,
        };
        let (header, body) = InHeader::read_from_prefix(&buffer[..len]).unwrap();
        let reply = |error, body: &[u8]| {
            // The kernel may have given it up.
            let _ = answer(fuse, header.unique, error, body);
        };
        match header.opcode {
            op::INIT => reply(
                0,
                InitOut {
                    major: 7,
                    minor: 31,
                    flags: ASYNC_DIO,
                    max_background: 64,
                    congestion_threshold: 64,
                    max_write: MAX_WRITE,
                    time_gran: 1,
                    ..InitOut::default()
                }
                .as_bytes(),
            ),
            op::LOOKUP if body == b"a.img\0" => {
                let entry = [2_u64, 0, 3600, 3600, 0];
                reply(0, &[entry.as_bytes(), attributes(2).as_bytes()].concat());
            }
            op::LOOKUP => reply(libc::ENOENT, &[]),
            op::GETATTR => reply(0, &valid(header.node)),
            op::OPEN | op::OPENDIR => reply(0, [1_u64, KEEP_CACHE].as_bytes()),
            op::READ => {
                let (read, _) = Transfer::read_from_prefix(body).unwrap();
                let content = &state.lock().unwrap().content;
                let start = SIZE.min(read.offset as usize);
                reply(0, &content[start..SIZE.min(start + read.size as usize)]);
            }
            op::WRITE => {
                let (write, data) = Transfer::read_from_prefix(body).unwrap();
                let (offset, mut state) = (write.offset as usize, state.lock().unwrap());
                if state.holds {
                    let (fuse, unique, data) = (fuse.clone(), header.unique, data.to_vec());
                    state.held.push(Held { fuse, unique, offset, data, done: false });
                } else {
                    state.content[offset..][..data.len()].copy_from_slice(data);
                    reply(0, [data.len() as u32, 0].as_bytes());
                }
            }
            // Sizes of a block, and of a name.
            op::STATFS => reply(0, [0, 0, 0, 0, 0, 255 << 32 | 4096, 4096, 0, 0, 0_u64].as_bytes()),
            op::FLUSH | op::FSYNC | op::RELEASE | op::RELEASEDIR => reply(0, &[]),
            op::FORGET | op::BATCH_FORGET | op::INTERRUPT => {}
            _ => reply(libc::ENOSYS, &[]),
        }
    }
}
