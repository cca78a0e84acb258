//! An open image: its lock, its size, its settings.
use super::connection::{Connection, Names, check};
use super::discard::{Stripes, discard_block};
use super::error::RbdReason;
use super::library::{self, Library, Setting};
use super::options::RbdOptions;
use crate::lock::lock;
use std::ffi::{CStr, CString, c_void};
use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
const EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `RBD_FEATURE_FAST_DIFF`.
const FAST_DIFF: u64 = 1 << 4;
/// `RBD_FEATURE_JOURNALING`.
const JOURNALING: u64 = 1 << 6;
/// `RBD_FEATURE_MIGRATING`.
const MIGRATING: u64 = 1 << 9;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
const EXCLUSIVE: libc::c_int = 0;
/// Most settings that librbd is asked for; Ceph 16 has 60.
const SETTINGS: usize = 1024;
/// Most owners of a lock. An exclusive one has one.
const OWNERS: usize = 8;

/// An image that is open.
#[derive(Debug)]
pub(super) struct RbdImage {
    pub(super) handle: library::ImageHandle,
    connection: Connection,
    pub(super) read_only: bool,
    /// Bytes of the smallest discard that frees space.
    pub(super) discard_block: u32,
    features: u64,
}

// SAFETY: an image may be used by any thread.
unsafe impl Send for RbdImage {}
// SAFETY: and by several at once.
unsafe impl Sync for RbdImage {}

impl RbdImage {
    /// Opens the image that `names` names.
    pub(super) fn open(
        connection: Connection,
        names: &Names,
        options: &RbdOptions,
    ) -> Result<Self, RbdReason> {
        let library = connection.library;
        let read_only = options.read_only || names.snapshot.is_some();
        let snapshot = names.snapshot.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        let mut image =
            Self { handle: ptr::null_mut(), connection, read_only, discard_block: 0, features: 0 };
        // An image that librbd has open for reading only is not told of changes. That takes a user
        // who may not write.
        let opens: &[_] = if names.snapshot.is_some() {
            &[library.rbd_open_read_only]
        } else if read_only {
            &[library.rbd_open, library.rbd_open_read_only]
        } else {
            &[library.rbd_open]
        };
        let mut opened = Ok(());
        for open in opens {
            // SAFETY: the pool is valid while the connection lives, the strings end with NUL, and
            // librbd writes the handle.
            opened = check(unsafe {
                open(image.connection.pool, names.image.as_ptr(), &mut image.handle, snapshot)
            });
            match &opened {
                Ok(()) => break,
                // What it wrote is no handle.
                Err(_) => image.handle = ptr::null_mut(),
            }
        }
        opened.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => RbdReason::Unknown { snapshot: names.snapshot.is_some() },
            Some(libc::EPERM | libc::EACCES) => {
                RbdReason::Right { user: names.user.clone(), pool: names.pool.clone() }
            }
            _ => RbdReason::Image { action: "open it", error },
        })?;
        // SAFETY: the handle is valid; librbd writes the features.
        check(unsafe { (library.rbd_get_features)(image.handle, &mut image.features) })
            .map_err(|error| RbdReason::Image { action: "tell its features", error })?;
        if !read_only {
            image.check_settings()?;
        }
        let stripes =
            image.stripes().map_err(|error| RbdReason::Image { action: "tell its stripes", error })?;
        image.discard_block = discard_block(image.setting("rbd_discard_granularity_bytes"), stripes);
        Ok(image)
    }

    pub(super) fn library(&self) -> &'static Library {
        self.connection.library
    }

    /// Whether the image has an exclusive lock.
    pub(super) fn has_lock(&self) -> bool {
        self.features & EXCLUSIVE_LOCK != 0
    }

    /// Whether writes pass a journal before they are in place.
    pub(super) fn has_journal(&self) -> bool {
        self.features & JOURNALING != 0
    }

    /// The value of a setting, as it holds for this image.
    pub(super) fn setting(&self, option: &str) -> Option<String> {
        self.settings().ok()?.into_iter().find_map(|(name, value)| (name == option).then_some(value))
    }

    /// Refuses settings that the image or its pool overrides, if they are not safe.
    fn check_settings(&self) -> Result<(), RbdReason> {
        for (name, value) in
            self.settings().map_err(|error| RbdReason::Image { action: "tell its settings", error })?
        {
            match (name.as_str(), value.as_str()) {
                ("rbd_cache", "true") => return Err(RbdReason::Unsafe { option: "rbd_cache", value }),
                ("rbd_blocklist_on_break_lock", "false") => {
                    tracing::warn!(
                        "rbd_blocklist_on_break_lock is false: writes of a dead client may still arrive"
                    );
                }
                _ => (),
            }
        }
        Ok(())
    }

    /// All settings, as they hold for this image.
    fn settings(&self) -> io::Result<Vec<(String, String)>> {
        let library = self.library();
        let mut found: Vec<Setting> = Vec::with_capacity(SETTINGS);
        let mut count = SETTINGS as libc::c_int;
        // SAFETY: the handle is valid, and librbd writes no more than `count` entries.
        check(unsafe { (library.rbd_config_image_list)(self.handle, found.as_mut_ptr(), &mut count) })?;
        let count = usize::try_from(count).unwrap_or(0).min(SETTINGS);
        // SAFETY: librbd has written so many.
        unsafe { found.set_len(count) };
        // SAFETY: each has two strings that end with NUL.
        let text = |text: *mut libc::c_char| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        let settings = found.iter().map(|setting| (text(setting.name), text(setting.value))).collect();
        // SAFETY: frees the strings, which have been copied.
        unsafe { (library.rbd_config_image_list_cleanup)(found.as_mut_ptr(), count as libc::c_int) };
        Ok(settings)
    }

    /// Takes the exclusive lock, and keeps it until the image is closed.
    ///
    /// Waits for the end of a dead client, 30 s, whom librbd then fences off.
    pub(super) fn lock(&self, dead_owner: Option<&str>) -> Result<(), RbdReason> {
        let library = self.library();
        if let Some(dead) = dead_owner
            && self.lock_owner().as_deref() == Some(dead)
            && let Ok(name) = CString::new(dead)
        {
            // SAFETY: the handle is valid, the string ends with NUL.
            check(unsafe { (library.rbd_lock_break)(self.handle, EXCLUSIVE, name.as_ptr()) })
                .map_err(|error| RbdReason::Image { action: "break the lock of a dead client", error })?;
        }
        // SAFETY: the handle is valid.
        check(unsafe { (library.rbd_lock_acquire)(self.handle, EXCLUSIVE) }).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::EROFS) => RbdReason::InUse {
                    owner: self.lock_owner().unwrap_or_else(|| "an unknown address".into()),
                },
                _ => RbdReason::Image { action: "take its exclusive lock", error },
            }
        })
    }

    /// The client that holds the exclusive lock.
    pub(super) fn lock_owner(&self) -> Option<String> {
        let library = self.library();
        let mut owners = [ptr::null_mut(); OWNERS];
        let (mut mode, mut count) = (0, owners.len());
        // SAFETY: the handle is valid, and librbd writes no more than `count` pointers.
        let found =
            unsafe { (library.rbd_lock_get_owners)(self.handle, &mut mode, owners.as_mut_ptr(), &mut count) };
        if found < 0 {
            return None;
        }
        let count = count.min(owners.len());
        let first = owners[..count].first().filter(|owner| !owner.is_null());
        // SAFETY: a string that ends with NUL.
        let name = first.map(|&owner| unsafe { CStr::from_ptr(owner) }.to_string_lossy().into_owned());
        // SAFETY: frees the strings, the first of which has been copied.
        unsafe { (library.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        name
    }

    /// Size in bytes. Waits for the cluster if librbd knows that the image has changed.
    pub(super) fn size(&self) -> io::Result<u64> {
        let mut size = 0;
        // SAFETY: the handle is valid; librbd writes the size.
        check(unsafe { (self.library().rbd_get_size)(self.handle, &mut size) })?;
        Ok(size)
    }

    /// How its bytes are dealt out to objects.
    pub(super) fn stripes(&self) -> io::Result<Stripes> {
        let library = self.library();
        let mut info = library::Info::default();
        // SAFETY: the handle is valid; librbd writes no more than the size that it is told.
        check(unsafe { (library.rbd_stat)(self.handle, &mut info, size_of::<library::Info>()) })?;
        let (mut unit, mut count) = (0, 0);
        // SAFETY: the handle is valid; librbd writes the number.
        check(unsafe { (library.rbd_get_stripe_unit)(self.handle, &mut unit) })?;
        // SAFETY: likewise.
        check(unsafe { (library.rbd_get_stripe_count)(self.handle, &mut count) })?;
        Ok(Stripes { object: info.obj_size, unit, count })
    }

    /// Parts of a range that exist. All else reads as zeroes. Waits for the cluster.
    ///
    /// `None`: librbd cannot tell for sure. Of a clone or an image on its way to another pool, it would
    /// have to compare with objects of another size, which Ceph 16 gets wrong.
    ///
    /// With the feature `fast-diff`, whole objects are reported, from a map that librbd has. Without it,
    /// librbd asks the OSD of each object.
    pub(super) fn data(&self, range: Range<u64>) -> io::Result<Option<Vec<Range<u64>>>> {
        let library = self.library();
        let mut overlap = 0;
        // SAFETY: the handle is valid; librbd writes the number.
        check(unsafe { (library.rbd_get_overlap)(self.handle, &mut overlap) })?;
        if overlap > 0 || self.features & MIGRATING != 0 {
            return Ok(None);
        }
        unsafe extern "C" fn note(at: u64, len: libc::size_t, exists: libc::c_int, list: *mut c_void) -> i32 {
            // SAFETY: what was passed to librbd below: a list that outlives the call.
            let list = unsafe { &*list.cast::<Mutex<Vec<Range<u64>>>>() };
            if exists != 0 {
                let part = at..at.saturating_add(len as u64);
                lock(list).push(part);
            }
            0
        }
        let found = Mutex::new(Vec::new());
        let whole_objects = u8::from(self.features & FAST_DIFF != 0);
        // SAFETY: the handle is valid, no name is the difference to nothing, and the list lives until
        // librbd has made its last call of `note`, when it returns.
        check(unsafe {
            (library.rbd_diff_iterate2)(
                self.handle,
                ptr::null(),
                range.start,
                range.end - range.start,
                0,
                whole_objects,
                note,
                (&raw const found).cast_mut().cast(),
            )
        })?;
        Ok(Some(found.into_inner().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Grows or shrinks the image, and waits for the end.
    pub(super) fn resize(&self, size: u64) -> io::Result<()> {
        if self.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        unsafe extern "C" fn progress(_: u64, _: u64, _: *mut c_void) -> libc::c_int {
            0
        }
        // SAFETY: the handle is valid; the function takes no pointer.
        check(unsafe { (self.library().rbd_resize2)(self.handle, size, true, progress, ptr::null_mut()) })
    }
}

impl Drop for RbdImage {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: the handle is valid and used no more. librbd waits for requests in flight,
            // releases the lock, and ends its callbacks.
            let closed = check(unsafe { (self.library().rbd_close)(self.handle) });
            if let Err(error) = closed {
                tracing::warn!(%error, "an image of Ceph was not closed properly");
            }
        }
    }
}
