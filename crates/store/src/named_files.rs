//! Files that locations name: certificates, keys and digests. Each is read once.
//!
//! ```text
//!   read(location) --> kept by path --> identity(folder), credentials(file), digests(file)
//!      before a sandbox closes the files     '-- not kept: read now
//! ```
#[cfg(any(feature = "tls", feature = "http"))]
mod identity;

use crate::Location;
#[cfg(feature = "http")]
use crate::object::{Digests, ObjectError, read_credentials, read_digests};
#[cfg(any(feature = "tls", feature = "http"))]
pub(crate) use identity::Identity;
#[cfg(feature = "http")]
use rusty_s3::Credentials;
#[cfg(any(feature = "tls", feature = "http"))]
use {
    kept::Kept,
    std::path::{Path, PathBuf},
    std::sync::Arc,
};

/// Files that were read for locations that name them.
///
/// Clones share them. A file that changes later is not read again.
#[derive(Clone, Debug, Default)]
pub struct NamedFiles {
    /// By folder; the authorities of this host have none.
    #[cfg(any(feature = "tls", feature = "http"))]
    identities: Kept<Option<PathBuf>, Identity>,
    #[cfg(feature = "http")]
    credentials: Kept<PathBuf, Credentials>,
    #[cfg(feature = "http")]
    digests: Kept<PathBuf, Digests>,
}

impl NamedFiles {
    /// Reads what connections to a location need, and what its data must be.
    ///
    /// # Errors
    /// A file cannot be read, or is malformed.
    pub fn read(&self, location: &Location) -> Result<(), String> {
        #[cfg(any(feature = "tls", feature = "http"))]
        match location {
            Location::Nbd(nbd) => {
                if let Some(files) = &nbd.tls {
                    self.identity(files.folder.as_deref())?;
                }
            }
            Location::Http(http) => self.read_object(&http.files, http.url.scheme() == "https")?,
            Location::S3(s3) => {
                let tls = s3.endpoint.as_ref().is_none_or(|url| url.scheme() == "https");
                self.read_object(&s3.files, tls)?;
                #[cfg(feature = "http")]
                if let Some(file) = &s3.credentials {
                    self.credentials(file).map_err(|error| error.to_string())?;
                }
            }
            Location::File(_) | Location::Rbd(_) => {}
        }
        #[cfg(not(any(feature = "tls", feature = "http")))]
        let _ = location;
        Ok(())
    }

    #[cfg(any(feature = "tls", feature = "http"))]
    fn read_object(&self, files: &crate::ObjectFiles, tls: bool) -> Result<(), String> {
        if tls {
            self.identity(files.certificates.as_deref())?;
        }
        #[cfg(feature = "http")]
        if let Some(file) = &files.digests {
            self.digests(file).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// What is in a folder of certificates, or the authorities of this host.
    #[cfg(any(feature = "tls", feature = "http"))]
    pub(crate) fn identity(&self, folder: Option<&Path>) -> Result<Arc<Identity>, String> {
        self.identities.get(folder.map(Path::to_owned), |folder| Identity::read(folder.as_deref()))
    }

    /// The keys for S3 in a file.
    #[cfg(feature = "http")]
    pub(crate) fn credentials(&self, file: &Path) -> Result<Arc<Credentials>, ObjectError> {
        self.credentials.get(file.to_owned(), |file| read_credentials(file))
    }

    /// The digests in a file.
    #[cfg(feature = "http")]
    pub(crate) fn digests(&self, file: &Path) -> Result<Arc<Digests>, ObjectError> {
        self.digests.get(file.to_owned(), |file| read_digests(file))
    }
}

#[cfg(any(feature = "tls", feature = "http"))]
mod kept {
    use crate::lock::lock;
    use std::collections::HashMap;
    use std::fmt;
    use std::hash::Hash;
    use std::sync::{Arc, Mutex};

    /// Contents of files, by their names. It shows neither: some are secret.
    pub(super) struct Kept<K, V>(Arc<Mutex<HashMap<K, Arc<V>>>>);

    impl<K: Eq + Hash, V> Kept<K, V> {
        /// What was read of `key`, or what `read` reads now.
        pub(super) fn get<E>(&self, key: K, read: impl FnOnce(&K) -> Result<V, E>) -> Result<Arc<V>, E> {
            let mut kept = lock(&self.0);
            if let Some(value) = kept.get(&key) {
                return Ok(value.clone());
            }
            let value = Arc::new(read(&key)?);
            kept.insert(key, value.clone());
            Ok(value)
        }
    }

    impl<K, V> Clone for Kept<K, V> {
        fn clone(&self) -> Self {
            Self(self.0.clone())
        }
    }

    impl<K, V> Default for Kept<K, V> {
        fn default() -> Self {
            Self(Arc::default())
        }
    }

    impl<K, V> fmt::Debug for Kept<K, V> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Kept").finish_non_exhaustive()
        }
    }
}

#[cfg(all(test, feature = "http"))]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_once_and_their_secrets_are_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("keys");
        std::fs::write(&keys, "[default]\naws_access_key_id=K\naws_secret_access_key=hidden\n").unwrap();
        let list = folder.path().join("list");
        std::fs::write(&list, "ab".repeat(32)).unwrap();
        let query = format!("credentials={}&digests={}", keys.display(), list.display());
        let location: Location = format!("s3://b/k?endpoint=http://h&{query}").parse().unwrap();
        let files = NamedFiles::default();
        files.read(&location).unwrap();
        std::fs::remove_file(&keys).unwrap();
        std::fs::remove_file(&list).unwrap();
        files.read(&location).unwrap();
        assert_eq!(files.clone().credentials(&keys).unwrap().secret(), "hidden");
        assert!(!format!("{files:?}").contains("hidden"));
        let error = NamedFiles::default().read(&location).unwrap_err();
        assert!(error.starts_with(&list.display().to_string()), "{error}");
    }
}
