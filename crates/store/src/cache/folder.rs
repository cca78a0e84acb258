//! The files of a folder, and who has them.
use super::Layout;
use super::budget::Budget;
use super::chunks::Chunks;
use crate::lock::lock;
use rustix::fs::FlockOperation;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::SystemTime;

/// Endings of the two files of an object.
const MAP: &str = "map";
const DATA: &str = "chunks";

/// A folder, as one process uses it.
#[derive(Debug)]
pub(super) struct Folder {
    /// Where it is.
    pub(super) path: PathBuf,
    /// The limit of all that this process has in it.
    pub(super) budget: Budget,
    files: Mutex<Files>,
}

#[derive(Debug, Default)]
struct Files {
    /// Names of those that this process has locked, with their stores.
    taken: Vec<(String, Weak<Chunks>)>,
    /// Those that no process had locked when they were looked at, the oldest first.
    left: Vec<Left>,
}

/// Files that no process uses.
#[derive(Debug)]
struct Left {
    name: String,
    bytes: u64,
    changed: SystemTime,
}

/// Files of one object that are to be locked.
#[derive(Debug)]
pub(super) struct Waiting {
    name: String,
    key: [u8; 32],
    map: File,
    data: File,
}

/// The folders that this process uses.
static FOLDERS: Mutex<Vec<Weak<Folder>>> = Mutex::new(Vec::new());

impl Folder {
    /// Opens a folder. All users of it in this process share one, with the limit of the first.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn open(path: &Path, limit: u64) -> io::Result<Arc<Self>> {
        let path = path.canonicalize()?;
        let mut folders = lock(&FOLDERS);
        folders.retain(|folder| folder.strong_count() > 0);
        if let Some(folder) = folders.iter().filter_map(Weak::upgrade).find(|folder| folder.path == path) {
            return Ok(folder);
        }
        let left = left_in(&path)?;
        let files = Mutex::new(Files { taken: Vec::new(), left });
        let folder = Arc::new(Self { path, budget: Budget::new(limit), files });
        folders.push(Arc::downgrade(&folder));
        Ok(folder)
    }

    /// Opens or makes the files of an object.
    ///
    /// # Errors
    /// The folder refuses.
    pub(super) fn files(&self, layout: Layout, key: [u8; 32]) -> io::Result<Waiting> {
        use std::fmt::Write;
        let mut name = String::new();
        for byte in &key[..16] {
            let _ = write!(name, "{byte:02x}");
        }
        // The size of a chunk may change from one start to the next.
        let _ = write!(name, "-{}", layout.chunk_bytes() >> 10);
        Ok(Waiting { map: open(&self.path, &name, MAP)?, data: open(&self.path, &name, DATA)?, name, key })
    }

    /// Locks the files of an object and takes up their chunks. `None`: another process has them.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub(super) fn take(&self, files: &mut Waiting, layout: Layout) -> io::Result<Option<Arc<Chunks>>> {
        if !lock_file(&files.map)? {
            return Ok(None);
        }
        if files.map.metadata()?.nlink() == 0 || files.data.metadata()?.nlink() == 0 {
            // Another process has removed them to make room, before this one had the lock.
            *files = self.files(layout, files.key)?;
            if !lock_file(&files.map)? {
                return Ok(None);
            }
        }
        let (data, map) = (files.data.try_clone()?, files.map.try_clone()?);
        let chunks = Arc::new(Chunks::in_files(layout, data, map, files.key)?);
        self.budget.add(&chunks);
        let mut all = lock(&self.files);
        all.left.retain(|left| left.name != files.name);
        all.taken.push((files.name.clone(), Arc::downgrade(&chunks)));
        drop(all);
        // The limit may be lower than it was.
        self.make_room(0);
        self.budget.make_room()?;
        Ok(Some(chunks))
    }

    /// Leaves the files of a store that is not used any more.
    pub(super) fn leave(&self, store: &Arc<Chunks>) {
        self.budget.remove(store);
        let mut files = lock(&self.files);
        let (bytes, changed) = (store.used(), SystemTime::now());
        let is_it = |taken: &(String, Weak<Chunks>)| std::ptr::eq(taken.1.as_ptr(), Arc::as_ptr(store));
        if let Some(index) = files.taken.iter().position(is_it) {
            let name = files.taken.swap_remove(index).0;
            files.left.push(Left { name, bytes, changed });
        }
    }

    /// Keeps a chunk, and removes the oldest files that no process has if they are in the way.
    ///
    /// # Errors
    /// The chunk is not kept.
    pub(super) fn keep(&self, store: &Arc<Chunks>, chunk: u64, data: &[u8], mark: bool) -> io::Result<()> {
        self.make_room(data.len() as u64);
        self.budget.keep(store, chunk, data, mark)
    }

    fn make_room(&self, bytes: u64) {
        let mut files = lock(&self.files);
        while !files.left.is_empty() {
            let left = files.left.iter().map(|left| left.bytes).sum::<u64>();
            if self.budget.used().0 + left + bytes <= self.budget.limit {
                return;
            }
            let oldest = files.left.remove(0);
            if let Err(error) = remove(&self.path, &oldest.name) {
                tracing::debug!("{}: {} stays: {error}", self.path.display(), oldest.name);
            }
        }
    }
}

/// Tries to lock a file for this process. It is unlocked when its last descriptor is closed.
fn lock_file(file: &File) -> io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn open(folder: &Path, name: &str, ending: &str) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    regular(&mut options, &folder.join(name).with_extension(ending))
}

/// Opens a regular file: no link, and nothing that would wait for another process.
fn regular(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let wrong = |what: &str| {
        let name = path.file_name().unwrap_or_default().display();
        io::Error::new(io::ErrorKind::InvalidInput, format!("{name}: {what}; remove it"))
    };
    let file = match options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::EISDIR | libc::ENXIO)) => {
            return Err(wrong("is not a regular file"));
        }
        file => file?,
    };
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(wrong("is not a regular file")),
    }
}

/// The files that no process has locked, the oldest first.
fn left_in(folder: &Path) -> io::Result<Vec<Left>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str()).filter(|name| is_ours(name));
        if path.extension().is_none_or(|ending| ending != MAP) {
            continue;
        }
        let Some(name) = name else { continue };
        let Ok(map) = regular(OpenOptions::new().read(true), &path) else { continue };
        if !lock_file(&map)? {
            continue;
        }
        let data = fs::symlink_metadata(path.with_extension(DATA));
        let changed = map.metadata()?.modified()?;
        let bytes = data.map_or(0, |data| data.blocks() * 512);
        found.push(Left { name: name.into(), bytes, changed });
    }
    found.sort_by_key(|left| left.changed);
    Ok(found)
}

/// Whether a name is one that [`Folder::files`] makes.
fn is_ours(name: &str) -> bool {
    let Some((key, kib)) = name.split_once('-') else { return false };
    key.len() == 32
        && key.bytes().all(|byte| byte.is_ascii_hexdigit())
        && kib.bytes().all(|byte| byte.is_ascii_digit())
}

/// Removes the files of an object, if no process has them.
fn remove(folder: &Path, name: &str) -> io::Result<()> {
    let path = folder.join(name).with_extension(MAP);
    let map = regular(OpenOptions::new().read(true), &path)?;
    if !lock_file(&map)? {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    fs::remove_file(path.with_extension(DATA))?;
    fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn layout() -> Layout {
        Layout::new(64 * 4096, 4096).unwrap()
    }

    fn take(folder: &Folder, key: u8) -> Option<Arc<Chunks>> {
        let mut files = folder.files(layout(), [key; 32]).unwrap();
        folder.take(&mut files, layout()).unwrap()
    }

    #[test]
    fn files_have_one_owner() {
        let path = TempDir::new().unwrap();
        let folder = Folder::open(path.path(), 1 << 20).unwrap();
        let chunks = take(&folder, 1).unwrap();
        assert!(take(&folder, 1).is_none());
        assert!(take(&folder, 2).is_some());
        folder.leave(&chunks);
        drop(chunks);
        assert!(take(&folder, 1).is_some());
    }

    #[test]
    fn the_oldest_files_without_an_owner_make_room() {
        let path = TempDir::new().unwrap();
        let folder = Folder::open(path.path(), 10 * 4096).unwrap();
        for key in 1..=3 {
            let chunks = take(&folder, key).unwrap();
            (0..4).for_each(|chunk| folder.keep(&chunks, chunk, &[key; 4096], false).unwrap());
            folder.leave(&chunks);
        }
        let names = || {
            let mut names: Vec<_> = fs::read_dir(path.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap()[..2].to_owned())
                .collect();
            names.sort();
            names
        };
        assert_eq!(names(), ["02", "02", "03", "03"]);
        // A file that is not ours is left alone.
        fs::write(path.path().join("x.map"), "").unwrap();
        let chunks = take(&folder, 4).unwrap();
        (0..10).for_each(|chunk| folder.keep(&chunks, chunk, &[4; 4096], false).unwrap());
        assert_eq!(names(), ["04", "04", "x."]);
    }

    #[test]
    fn what_is_no_regular_file_is_left_alone_and_waits_for_nobody() {
        let path = TempDir::new().unwrap();
        let outside = path.path().join("outside");
        fs::write(&outside, "precious").unwrap();
        let fifo = |at: &Path| {
            let kind = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, at, kind, 0o600.into(), 0).unwrap();
        };
        let link = |at: &Path| std::os::unix::fs::symlink(&outside, at).unwrap();
        let directory = |at: &Path| fs::create_dir(at).unwrap();
        for (number, make) in [&fifo as &dyn Fn(&Path), &link, &directory].into_iter().enumerate() {
            for ending in [MAP, DATA] {
                let folder = path.path().join(format!("{number}-{ending}"));
                fs::create_dir(&folder).unwrap();
                let name = format!("{}-4", "01".repeat(16));
                make(&folder.join(name).with_extension(ending));
                let all = Folder::open(&folder, 1 << 20).unwrap();
                let error = all.files(layout(), [1; 32]).unwrap_err();
                assert!(error.to_string().contains("is not a regular file; remove it"), "{error}");
                // The disk does without.
                let config = super::super::CacheConfig::new(&folder);
                let cache = super::super::Cache::open(layout(), [1; 32], Some(&config), 1 << 20).unwrap();
                assert!(cache.trouble().unwrap().contains("chunks are kept in memory"));
                // Another object has its files.
                assert!(take(&all, 2).is_some());
            }
        }
        assert_eq!(fs::read(outside).unwrap(), b"precious");
    }

    #[test]
    fn users_of_a_folder_share_it() {
        let path = TempDir::new().unwrap();
        let folder = Folder::open(path.path(), 1).unwrap();
        assert!(Arc::ptr_eq(&folder, &Folder::open(&path.path().join("."), 2).unwrap()));
        assert!(Folder::open(&path.path().join("missing"), 1).is_err());
    }
}
