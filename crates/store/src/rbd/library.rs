//! Functions of librbd and librados, found when the first image is opened.
//!
//! The libraries are no dependency of a build: a host without Ceph has no need of them. They stay
//! loaded until the process ends, because librados has threads and handlers of its own.
//!
//! Signatures are those of `rbd/librbd.h` and `rados/librados.h` of Ceph 16, which later releases
//! have kept.
use crate::lock::lock;
use libc::{c_char, c_int, c_void, size_t, ssize_t};
use libloading::os::unix::{Library as Object, RTLD_LOCAL, RTLD_NOW};
use std::sync::Mutex;
use thiserror::Error;

/// `rados_t`: a connection to a cluster.
pub(super) type Cluster = *mut c_void;
/// `rados_ioctx_t`: a pool of a cluster, and a namespace in it.
pub(super) type Pool = *mut c_void;
/// `rbd_image_t`: an open image.
pub(super) type ImageHandle = *mut c_void;
/// `rbd_completion_t`: one request in flight.
pub(super) type Completion = *mut c_void;
/// `rbd_callback_t`: a request has ended.
pub(super) type EndedRequests = unsafe extern "C" fn(Completion, *mut c_void);
/// `rbd_update_callback_t`: an image has changed.
pub(super) type Changed = unsafe extern "C" fn(*mut c_void);
/// `librbd_progress_fn_t`: how far an operation is.
pub(super) type Progress = unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int;

/// The callback of `rbd_diff_iterate2`: a part of an image exists, or does not any more.
pub(super) type Differs = unsafe extern "C" fn(u64, size_t, c_int, *mut c_void) -> c_int;

/// `rbd_config_option_t`: a setting as an image uses it.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Setting {
    pub(super) name: *mut c_char,
    pub(super) value: *mut c_char,
    pub(super) source: c_int,
}

/// `rbd_image_info_t`: what librbd tells of an image.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Info {
    size: u64,
    /// Bytes of an object.
    pub(super) obj_size: u64,
    num_objs: u64,
    order: c_int,
    block_name_prefix: [u8; 24],
    parent_pool: i64,
    parent_name: [[u8; 32]; 3],
}

/// librbd and librados cannot be used on this host.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LibraryError {
    /// A library is not installed, or cannot be loaded.
    #[error("images of Ceph need {file}: {reason}; install it (Debian: apt-get install {package})")]
    Missing {
        /// Name of the library.
        file: String,
        /// What the loader says.
        reason: String,
        /// Package that has it.
        package: &'static str,
    },
    /// A library lacks a function.
    #[error("{file} is older than Ceph 16: it has no {name}; install a newer {package}")]
    Old {
        /// Name of the library.
        file: String,
        /// Name of the function.
        name: &'static str,
        /// Package that has it.
        package: &'static str,
    },
}

/// A library of Ceph, and the Debian package that has it.
struct CephLibrary {
    file: &'static str,
    package: &'static str,
}

const RADOS: CephLibrary = CephLibrary { file: "librados.so.2", package: "librados2" };
const RBD: CephLibrary = CephLibrary { file: "librbd.so.1", package: "librbd1" };

impl CephLibrary {
    fn load(&self) -> Result<Object, LibraryError> {
        // SAFETY: loading runs the initializers of the library, as it would if the program were
        // linked with it. It is a library of the host that is as trusted as the C library.
        unsafe { Object::open(Some(self.file), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
            LibraryError::Missing { file: self.file.into(), reason: error.to_string(), package: self.package }
        })
    }
}

/// Declares [`Library`] with one function pointer a line, and how they are found.
macro_rules! functions {
    ($($source:ident $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions.
        #[derive(Debug)]
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn find(rados: &Object, rbd: &Object) -> Result<Self, LibraryError> {
                Ok(Self {
                    $($name: {
                        let (object, source) = functions!(@$source rados, rbd);
                        // SAFETY: the signature is that of the header.
                        let found = unsafe { object.get(concat!(stringify!($name), "\0")) };
                        *found.map_err(|_| LibraryError::Old {
                            file: source.file.into(),
                            name: stringify!($name),
                            package: source.package,
                        })?
                    },)*
                })
            }
        }
    };
    (@rados $rados:ident, $rbd:ident) => { ($rados, &RADOS) };
    (@rbd $rados:ident, $rbd:ident) => { ($rbd, &RBD) };
}

functions! {
    rados rados_create2(*mut Cluster, *const c_char, *const c_char, u64) -> c_int;
    rados rados_conf_read_file(Cluster, *const c_char) -> c_int;
    rados rados_conf_set(Cluster, *const c_char, *const c_char) -> c_int;
    rados rados_conf_get(Cluster, *const c_char, *mut c_char, size_t) -> c_int;
    rados rados_connect(Cluster) -> c_int;
    rados rados_shutdown(Cluster);
    rados rados_ioctx_create(Cluster, *const c_char, *mut Pool) -> c_int;
    rados rados_ioctx_set_namespace(Pool, *const c_char);
    rados rados_ioctx_destroy(Pool);
    rbd rbd_open(Pool, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    rbd rbd_open_read_only(Pool, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    rbd rbd_close(ImageHandle) -> c_int;
    rbd rbd_get_size(ImageHandle, *mut u64) -> c_int;
    rbd rbd_get_features(ImageHandle, *mut u64) -> c_int;
    rbd rbd_stat(ImageHandle, *mut Info, size_t) -> c_int;
    rbd rbd_get_stripe_unit(ImageHandle, *mut u64) -> c_int;
    rbd rbd_get_stripe_count(ImageHandle, *mut u64) -> c_int;
    rbd rbd_get_overlap(ImageHandle, *mut u64) -> c_int;
    rbd rbd_diff_iterate2(ImageHandle, *const c_char, u64, u64, u8, u8, Differs, *mut c_void) -> c_int;
    rbd rbd_resize2(ImageHandle, u64, bool, Progress, *mut c_void) -> c_int;
    rbd rbd_lock_acquire(ImageHandle, c_int) -> c_int;
    rbd rbd_lock_get_owners(ImageHandle, *mut c_int, *mut *mut c_char, *mut size_t) -> c_int;
    rbd rbd_lock_get_owners_cleanup(*mut *mut c_char, size_t);
    rbd rbd_lock_break(ImageHandle, c_int, *const c_char) -> c_int;
    rbd rbd_update_watch(ImageHandle, *mut u64, Changed, *mut c_void) -> c_int;
    rbd rbd_update_unwatch(ImageHandle, u64) -> c_int;
    rbd rbd_config_image_list(ImageHandle, *mut Setting, *mut c_int) -> c_int;
    rbd rbd_config_image_list_cleanup(*mut Setting, c_int);
    rbd rbd_aio_create_completion(*mut c_void, EndedRequests, *mut Completion) -> c_int;
    rbd rbd_aio_get_return_value(Completion) -> ssize_t;
    rbd rbd_aio_release(Completion);
    rbd rbd_aio_read(ImageHandle, u64, size_t, *mut c_char, Completion) -> c_int;
    rbd rbd_aio_write(ImageHandle, u64, size_t, *const c_char, Completion) -> c_int;
    rbd rbd_aio_flush(ImageHandle, Completion) -> c_int;
    rbd rbd_aio_discard(ImageHandle, u64, u64, Completion) -> c_int;
    rbd rbd_aio_write_zeroes(ImageHandle, u64, size_t, Completion, c_int, c_int) -> c_int;
}

impl Library {
    /// The functions, once for all images of this process.
    ///
    /// A failure is not remembered: the next call finds what has been installed meanwhile.
    pub(super) fn get() -> Result<&'static Self, LibraryError> {
        static LOADED: Mutex<Option<&'static Library>> = Mutex::new(None);
        let mut loaded = lock(&LOADED);
        if let Some(library) = *loaded {
            return Ok(library);
        }
        let (rados, rbd) = (RADOS.load()?, RBD.load()?);
        let library: &'static Self = Box::leak(Box::new(Self::find(&rados, &rbd)?));
        // Never unloaded.
        std::mem::forget((rados, rbd));
        *loaded = Some(library);
        Ok(library)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_names_its_package() {
        let error = CephLibrary { file: "librbd-of-nowhere.so.1", package: "librbd1" }.load().unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("images of Ceph need librbd-of-nowhere.so.1: "), "{text}");
        assert!(text.ends_with("(Debian: apt-get install librbd1)"), "{text}");
    }

    #[test]
    fn a_library_without_the_functions_is_too_old() {
        let libc = CephLibrary { file: "libc.so.6", package: "libc6" }.load().expect("the C library");
        let error = Library::find(&libc, &libc).unwrap_err();
        assert_eq!(
            error.to_string(),
            "librados.so.2 is older than Ceph 16: it has no rados_create2; install a newer librados2"
        );
    }
}
