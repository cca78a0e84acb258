//! A connection to a cluster: settings, credentials, and a pool.
//!
//! One for each image: a client that is fenced off one image is fenced off all that share its
//! connection.
use super::error::RbdReason;
use super::library::{self, Library};
use crate::RbdLocation;
use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Duration;

/// Where the configuration lies if the location names no file.
const CONF: &str = "/etc/ceph/ceph.conf";
/// The user if the location names none.
const USER: &str = "admin";

/// Settings that a connection has, whatever the configuration says.
///
/// - `rbd_cache`: librbd's cache acknowledges writes that it has not sent yet. They would be lost
///   with this process while the guest lives on.
/// - `rbd_disable_zero_copy_writes`: a request that has ended has no reference to memory of ours.
/// - `rbd_blocklist_on_break_lock`: the client whose lock is broken is fenced off.
/// - No logs, and no socket: the process that opens images has its own.
const SETTINGS: &[(&str, &str)] = &[
    ("rbd_cache", "false"),
    ("rbd_disable_zero_copy_writes", "true"),
    ("rbd_blocklist_on_break_lock", "true"),
    ("admin_socket", ""),
    ("log_file", ""),
    ("log_to_file", "false"),
    ("log_to_stderr", "false"),
    ("err_to_stderr", "false"),
    ("log_to_syslog", "false"),
    ("err_to_syslog", "false"),
    ("log_to_journald", "false"),
    ("err_to_journald", "false"),
];

/// Names of an image as Ceph takes them, and its configuration.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) pool: String,
    pub(super) user: String,
    pub(super) image: CString,
    pub(super) snapshot: Option<CString>,
    conf: PathBuf,
    c_pool: CString,
    c_namespace: Option<CString>,
    c_client: CString,
}

impl Names {
    pub(super) fn new(location: &RbdLocation) -> Result<Self, RbdReason> {
        let user = location.id.clone().unwrap_or_else(|| USER.into());
        Ok(Self {
            pool: location.pool.clone(),
            image: c_string(&location.image)?,
            snapshot: location.snapshot.as_deref().map(c_string).transpose()?,
            conf: location.conf.clone().unwrap_or_else(|| CONF.into()),
            c_pool: c_string(&location.pool)?,
            c_namespace: location.namespace.as_deref().map(c_string).transpose()?,
            c_client: c_string(format!("client.{user}"))?,
            user,
        })
    }
}

fn c_string(name: impl AsRef<OsStr>) -> Result<CString, RbdReason> {
    let name = name.as_ref();
    CString::new(name.as_bytes()).map_err(|_| RbdReason::Name(name.to_string_lossy().into_owned()))
}

/// The error of a call that returned `code`, 0 or a negative error number.
pub(super) fn check(code: libc::c_int) -> io::Result<()> {
    if code < 0 { Err(io::Error::from_raw_os_error(-code)) } else { Ok(()) }
}

/// A pool of a cluster that is connected. Both end with it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) library: &'static Library,
    cluster: library::Cluster,
    pub(super) pool: library::Pool,
    /// Addresses of the monitors, for errors.
    pub(super) monitors: String,
}

// SAFETY: handles of librados may be used by any thread.
unsafe impl Send for Connection {}
// SAFETY: and by several at once.
unsafe impl Sync for Connection {}

impl Connection {
    /// Connects as `names` say. Waits up to `timeout` for the monitors, and then without a bound
    /// for the map of the OSDs.
    pub(super) fn open(
        library: &'static Library,
        names: &Names,
        timeout: Duration,
    ) -> Result<Self, RbdReason> {
        let mut connection =
            Self { library, cluster: ptr::null_mut(), pool: ptr::null_mut(), monitors: String::new() };
        // SAFETY: the strings end with NUL; librados writes the handle.
        let created = unsafe {
            (library.rados_create2)(&mut connection.cluster, c"ceph".as_ptr(), names.c_client.as_ptr(), 0)
        };
        let conf = || names.conf.clone();
        check(created).map_err(|error| RbdReason::Connect { conf: conf(), error })?;
        connection.configure(&names.conf, timeout)?;
        connection.monitors = connection.setting(c"mon_host");
        // SAFETY: the handle was made above.
        check(unsafe { (library.rados_connect)(connection.cluster) })
            .map_err(|error| connection.not_connected(error, names, timeout))?;
        // SAFETY: as above; librados writes the handle of the pool.
        let found = unsafe {
            (library.rados_ioctx_create)(connection.cluster, names.c_pool.as_ptr(), &mut connection.pool)
        };
        check(found).map_err(|error| RbdReason::Pool { pool: names.pool.clone(), error })?;
        if let Some(namespace) = &names.c_namespace {
            // SAFETY: the handle was made above, the string ends with NUL.
            unsafe { (library.rados_ioctx_set_namespace)(connection.pool, namespace.as_ptr()) };
        }
        Ok(connection)
    }

    fn configure(&self, conf: &Path, timeout: Duration) -> Result<(), RbdReason> {
        let file = c_string(conf)?;
        // SAFETY: the handle is valid, the string ends with NUL.
        check(unsafe { (self.library.rados_conf_read_file)(self.cluster, file.as_ptr()) })
            .map_err(|error| RbdReason::Configuration { conf: conf.into(), error })?;
        let seconds = timeout.as_secs().max(1).to_string();
        let timeouts =
            ["client_mount_timeout", "rados_mon_op_timeout"].map(|option| (option, seconds.as_str()));
        for (option, value) in SETTINGS.iter().copied().chain(timeouts) {
            let (name, text) = (c_string(option)?, c_string(value)?);
            // SAFETY: as above.
            let set = unsafe { (self.library.rados_conf_set)(self.cluster, name.as_ptr(), text.as_ptr()) };
            match check(set) {
                // Not every release has every log.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) && option.contains("_to_") => (),
                Err(error) => return Err(RbdReason::Setting { option, value: value.into(), error }),
                Ok(()) => (),
            }
        }
        Ok(())
    }

    /// The value of a setting; empty if it has none.
    fn setting(&self, option: &CStr) -> String {
        let mut value = [0_u8; 4096];
        // SAFETY: the handle is valid; librados writes no more than the length, and ends with NUL.
        let got = unsafe {
            let buffer = value.as_mut_ptr().cast();
            (self.library.rados_conf_get)(self.cluster, option.as_ptr(), buffer, value.len())
        };
        let text = CStr::from_bytes_until_nul(&value).ok().filter(|_| got >= 0);
        text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    }

    fn not_connected(&self, error: io::Error, names: &Names, timeout: Duration) -> RbdReason {
        let (user, conf) = (names.user.clone(), names.conf.clone());
        let keyring = self.setting(c"keyring");
        let exists = keyring.split(',').any(|file| Path::new(file.trim()).exists());
        match error.raw_os_error() {
            // Which of these a missing keyring is depends on the release.
            Some(libc::ENOENT | libc::EACCES | libc::EPERM) if !exists => {
                RbdReason::Keyring { user, keyring, conf }
            }
            Some(libc::EACCES | libc::EPERM) => RbdReason::Refused { user, keyring, error },
            Some(libc::ETIMEDOUT) => self.unreachable(names, timeout),
            _ => RbdReason::Connect { conf, error },
        }
    }

    fn unreachable(&self, names: &Names, timeout: Duration) -> RbdReason {
        RbdReason::Unreachable {
            seconds: timeout.as_secs(),
            monitors: self.monitors.clone(),
            conf: names.conf.clone(),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: the handles are valid, and nothing uses them any more: images keep the connection.
        unsafe {
            if !self.pool.is_null() {
                (self.library.rados_ioctx_destroy)(self.pool);
            }
            if !self.cluster.is_null() {
                (self.library.rados_shutdown)(self.cluster);
            }
        }
    }
}

impl RbdReason {
    /// The reason of a call that did not return in time, when there is no connection to ask.
    pub(super) fn no_answer(names: &Names, timeout: Duration) -> Self {
        Self::Unreachable {
            seconds: timeout.as_secs(),
            monitors: "that it names".into(),
            conf: names.conf.clone(),
        }
    }
}
