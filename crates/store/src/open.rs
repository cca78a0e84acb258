//! Opens the store of a location.
use crate::nbd::{Nbd, NbdOptions};
use crate::{Connector, Location, NbdLocation, Store};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

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
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { read_only: false, lock: true, connections: 1, timeout: Duration::from_secs(60) }
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
    let not_built = |what| Err(StoreError::NotBuilt { location: location.to_string(), what });
    match location {
        Location::File(_) => Err(StoreError::File(location.to_string())),
        Location::Http(_) | Location::S3(_) if !options.read_only => {
            Err(StoreError::ReadOnly(location.to_string()))
        }
        Location::Nbd(nbd) => Ok(Arc::new(open_nbd(nbd, options, connector)?)),
        Location::Rbd(_) => not_built("Ceph RBD"),
        Location::Http(_) | Location::S3(_) => not_built("HTTP"),
    }
}

fn open_nbd(
    location: &NbdLocation,
    options: &OpenOptions,
    connector: Arc<dyn Connector>,
) -> Result<Nbd, StoreError> {
    let options = NbdOptions {
        read_only: options.read_only,
        connections: options.connections,
        request_timeout: options.timeout,
        ..NbdOptions::default()
    };
    Nbd::open(location, options, connector)
        .map_err(|source| StoreError::Unusable { location: location.to_string(), source: source.into() })
}
