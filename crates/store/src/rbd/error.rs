//! Why an image of Ceph cannot be opened.
use super::library::LibraryError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// An image of Ceph cannot be opened.
#[derive(Debug, Error)]
#[error("{location}: {reason}")]
pub struct RbdError {
    /// The image, for example `rbd:pool/image@snapshot`.
    pub location: String,
    /// Why not, and the way out.
    pub reason: RbdReason,
}

/// Why an image of Ceph cannot be opened.
#[derive(Debug, Error)]
pub enum RbdReason {
    /// The libraries of Ceph are missing or too old.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A name that Ceph cannot take.
    #[error("{0:?} holds a NUL character")]
    Name(String),
    /// The configuration file is missing or malformed.
    #[error("cannot read {conf}: {error}; name another file with :conf=FILE", conf = conf.display())]
    Configuration {
        /// The file.
        conf: PathBuf,
        /// What librados says.
        error: io::Error,
    },
    /// librados refuses a setting.
    #[error("librados refuses {option}={value}: {error}")]
    Setting {
        /// Name of the setting.
        option: &'static str,
        /// Its value.
        value: String,
        /// What librados says.
        error: io::Error,
    },
    /// There is no keyring.
    #[error("client.{user} needs a key, and there is no keyring at {keyring}; set keyring= in {conf}", conf = conf.display())]
    Keyring {
        /// The user, without `client.`.
        user: String,
        /// Files that were searched.
        keyring: String,
        /// Configuration file.
        conf: PathBuf,
    },
    /// The cluster does not accept the key, or there is none.
    #[error(
        "the cluster refuses client.{user} ({error}): {keyring} has no key of it, or not the one that `ceph auth get client.{user}` prints"
    )]
    Refused {
        /// The user, without `client.`.
        user: String,
        /// Files that were searched.
        keyring: String,
        /// What librados says.
        error: io::Error,
    },
    /// The cluster does not answer.
    #[error(
        "no answer after {seconds} s from the monitors {monitors} or an OSD; check their addresses in {conf} and `ceph status`",
        conf = conf.display()
    )]
    Unreachable {
        /// Seconds waited.
        seconds: u64,
        /// Addresses of the monitors, as configured.
        monitors: String,
        /// Configuration file.
        conf: PathBuf,
    },
    /// Another error of librados while it connects.
    #[error("cannot connect to the cluster of {conf}: {error}", conf = conf.display())]
    Connect {
        /// Configuration file.
        conf: PathBuf,
        /// What librados says.
        error: io::Error,
    },
    /// The pool cannot be used.
    #[error("cannot use the pool {pool}: {error}; `ceph osd pool ls` lists the pools")]
    Pool {
        /// Name of the pool.
        pool: String,
        /// What librados says.
        error: io::Error,
    },
    /// There is no such image, namespace or snapshot.
    #[error("there is no such image{}; `rbd ls` and `rbd snap ls` list them", if *snapshot { " or snapshot" } else { "" })]
    Unknown {
        /// A snapshot was asked for.
        snapshot: bool,
    },
    /// The user may not use the image.
    #[error(
        "client.{user} has no right to it; `ceph auth caps client.{user} mon 'profile rbd' osd 'profile rbd pool={pool}'` grants it"
    )]
    Right {
        /// The user, without `client.`.
        user: String,
        /// Name of the pool.
        pool: String,
    },
    /// Another error of librbd.
    #[error("librbd cannot {action}: {error}")]
    Image {
        /// What it was asked for.
        action: &'static str,
        /// What it says.
        error: io::Error,
    },
    /// Another client has the image's lock.
    #[error(
        "in use: the client at {owner} holds the exclusive lock; stop it, or open the image read-only or without the lock"
    )]
    InUse {
        /// Address of the client.
        owner: String,
    },
    /// A setting of the pool or image would lose writes that have been acknowledged.
    #[error(
        "{option} is {value} for this image: writes that have been acknowledged would be lost with this process; remove the setting: rbd config image rm IMAGE {option} (or: rbd config pool rm POOL {option})"
    )]
    Unsafe {
        /// Name of the setting.
        option: &'static str,
        /// Its value.
        value: String,
    },
    /// The host refuses a thread or descriptor.
    #[error("the host refuses a resource: {0}")]
    Host(io::Error),
}
