//! Opens the store of a location.
use crate::nbd::{Nbd, NbdOptions};
use crate::{Connector, Location, NamedFiles, NbdLocation, Store, Target};
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Time for a server to answer while it has another client.
const AHEAD: Duration = Duration::from_secs(2);

/// Shortest limit for opening a store: requests may be meant to fail at once where it is lost.
const SHORTEST_OPEN: Duration = Duration::from_secs(1);

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Open it for reading only [`false`].
    pub read_only: bool,
    /// Lock it against other writers, where the store can [`true`].
    pub lock: bool,
    /// Most connections, where the server accepts several \[1\].
    pub connections: u16,
    /// How long jobs wait for a connection that was lost, before they fail \[60 s\].
    pub timeout: Duration,
    /// A thread may wait some microseconds for bytes without sleeping [`true`].
    pub polls: bool,
    /// Keeps chunks of HTTP and S3 objects [64 MiB in memory].
    pub cache: Option<CacheFolder>,
    /// Files that were read; others that the location names are read now.
    pub files: NamedFiles,
}

/// A folder that keeps chunks of objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheFolder {
    /// An existing folder.
    pub folder: PathBuf,
    /// Most bytes of chunks in it.
    pub limit_bytes: u64,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            lock: true,
            connections: 1,
            timeout: Duration::from_secs(60),
            polls: true,
            cache: None,
            files: NamedFiles::default(),
        }
    }
}

/// A store cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// It is a file, which is opened otherwise.
    #[error("{0}: is a file")]
    File(String),
    /// This program was built without it.
    #[error("{location}: this program is built without {what}")]
    NotBuilt {
        /// The location.
        location: String,
        /// The kind of store.
        what: &'static str,
    },
    /// The store takes no writes.
    #[error("{0}: is read-only; serve it with --read-only")]
    ReadOnly(String),
    /// The store cannot be used.
    #[error("{location}: {source}")]
    Unusable {
        /// The location.
        location: String,
        /// Cause.
        source: Box<dyn Error + Send + Sync>,
    },
}

/// Opens the store of a location that is no file.
///
/// Blocks until its server has answered.
///
/// # Errors
/// See [`StoreError`].
pub fn open(
    location: &Location,
    options: &OpenOptions,
    connector: Arc<dyn Connector>,
) -> Result<Arc<dyn Store>, StoreError> {
    match location {
        Location::File(_) => Err(StoreError::File(location.to_string())),
        Location::Http(_) | Location::S3(_) if !options.read_only => {
            Err(StoreError::ReadOnly(location.to_string()))
        }
        Location::Nbd(nbd) => Ok(Arc::new(open_nbd(nbd, options, connector, None)?)),
        #[cfg(feature = "rbd")]
        Location::Rbd(rbd) => Ok(Arc::new(open_rbd(rbd, options)?)),
        #[cfg(not(feature = "rbd"))]
        Location::Rbd(_) => not_built(location, "Ceph RBD (feature rbd)"),
        #[cfg(feature = "http")]
        Location::Http(_) | Location::S3(_) => Ok(Arc::new(open_object(location, options, connector)?)),
        #[cfg(not(feature = "http"))]
        Location::Http(_) | Location::S3(_) => not_built(location, "HTTP (feature http)"),
    }
}

/// Opens the store of a location that another process uses, which is about to close it.
///
/// Nothing is written and no lock is asked for. `None`: it must be opened afterwards, because only
/// then it shows what that process has written, or because the server has one client at a time.
///
/// # Errors
/// See [`StoreError`]. A server that lets its clients wait does not answer, either.
pub fn open_ahead(
    location: &Location,
    options: &OpenOptions,
    connector: Arc<dyn Connector>,
) -> Result<Option<Arc<dyn Store>>, StoreError> {
    match location {
        Location::Nbd(nbd) => {
            let nbd = open_nbd(nbd, options, connector, Some(AHEAD))?;
            // A server that takes so many clients and no more has room for all connections later.
            let usable = nbd.is_coherent() && nbd.has_all_connections();
            Ok(if usable { Some(Arc::new(nbd)) } else { None })
        }
        Location::Http(_) | Location::S3(_) => open(location, options, connector).map(Some),
        // An image of Ceph would be without its lock, and a file has locks of its own.
        Location::Rbd(_) | Location::File(_) => Ok(None),
    }
}

#[cfg(not(all(feature = "rbd", feature = "http")))]
fn not_built(location: &Location, what: &'static str) -> Result<Arc<dyn Store>, StoreError> {
    Err(StoreError::NotBuilt { location: location.to_string(), what })
}

/// The server that a location needs connections to by a [`Connector`].
///
/// `None`: it is a file, or has connections of its own (Ceph).
#[must_use]
pub fn target(location: &Location) -> Option<Target> {
    match location {
        Location::Nbd(nbd) => Some(nbd.target.clone()),
        #[cfg(feature = "http")]
        Location::Http(_) | Location::S3(_) => crate::Object::target(location).ok(),
        _ => None,
    }
}

#[cfg(feature = "rbd")]
fn open_rbd(location: &crate::RbdLocation, options: &OpenOptions) -> Result<crate::rbd::Rbd, StoreError> {
    let options = crate::rbd::RbdOptions {
        read_only: options.read_only,
        lock: options.lock,
        ..crate::rbd::RbdOptions::default()
    };
    crate::rbd::Rbd::open(location, &options).map_err(|source| StoreError::Unusable {
        location: location.to_string(),
        source: source.reason.into(),
    })
}

#[cfg(feature = "http")]
fn open_object(
    location: &Location,
    options: &OpenOptions,
    connector: Arc<dyn Connector>,
) -> Result<crate::Object, StoreError> {
    let cache = options.cache.as_ref().map(|cache| crate::CacheConfig {
        limit_bytes: cache.limit_bytes,
        ..crate::CacheConfig::new(&cache.folder)
    });
    let options = crate::ObjectOptions {
        retry: options.timeout,
        open_timeout: Some(options.timeout.max(SHORTEST_OPEN)),
        files: options.files.clone(),
        ..crate::ObjectOptions::default()
    };
    crate::Object::open(location, &options, cache.as_ref(), connector)
        .map_err(|source| StoreError::Unusable { location: location.to_string(), source: source.into() })
}

fn open_nbd(
    location: &NbdLocation,
    options: &OpenOptions,
    connector: Arc<dyn Connector>,
    open_timeout: Option<Duration>,
) -> Result<Nbd, StoreError> {
    let files = &options.files;
    let default = NbdOptions::default();
    let opens_in = default.connect_timeout.min(options.timeout.max(SHORTEST_OPEN));
    let options = NbdOptions {
        linger: if options.polls { default.linger } else { Duration::ZERO },
        read_only: options.read_only,
        connections: options.connections,
        request_timeout: options.timeout,
        open_timeout: Some(open_timeout.unwrap_or(opens_in)),
        ..default
    };
    Nbd::open(location, options, connector, files)
        .map_err(|source| StoreError::Unusable { location: location.to_string(), source: source.into() })
}
