//! Certificates and keys of TLS, read once.
//!
//! ```text
//!   read(location) --> kept by folder --> identity(folder): each connection to a server of it
//!      before a sandbox closes the files         '-- not kept: read now
//! ```
use crate::Location;
#[cfg(any(feature = "tls", feature = "http"))]
pub(crate) use identity::Identity;
#[cfg(any(feature = "tls", feature = "http"))]
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// Certificates and keys that were read.
///
/// Clones share them. A file that changes later is not read again.
#[derive(Clone, Debug, Default)]
pub struct Certificates {
    /// By folder; those of this host have none.
    #[cfg(any(feature = "tls", feature = "http"))]
    read: Arc<Mutex<HashMap<Option<PathBuf>, Arc<Identity>>>>,
}

impl Certificates {
    /// Reads what connections to a location need; nothing if they have no TLS.
    ///
    /// # Errors
    /// A file cannot be read, or is none of PEM.
    pub fn read(&self, location: &Location) -> Result<(), String> {
        #[cfg(any(feature = "tls", feature = "http"))]
        match location {
            Location::Nbd(nbd) => {
                if let Some(files) = &nbd.tls {
                    self.identity(files.folder.as_deref())?;
                }
            }
            Location::Http(url) if url.scheme() == "https" => _ = self.identity(None)?,
            Location::S3(s3) if s3.endpoint.as_ref().is_none_or(|url| url.scheme() == "https") => {
                self.identity(None)?;
            }
            _ => {}
        }
        #[cfg(not(any(feature = "tls", feature = "http")))]
        let _ = location;
        Ok(())
    }

    /// What is in a folder, or the authorities of this host.
    #[cfg(any(feature = "tls", feature = "http"))]
    pub(crate) fn identity(&self, folder: Option<&Path>) -> Result<Arc<Identity>, String> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let key = folder.map(Path::to_owned);
        if let Some(identity) = read.get(&key) {
            return Ok(identity.clone());
        }
        let identity = Arc::new(Identity::read(folder)?);
        read.insert(key, identity.clone());
        Ok(identity)
    }
}

#[cfg(any(feature = "tls", feature = "http"))]
mod identity {
    use rustls::RootCertStore;
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use std::path::Path;

    /// Whom this side believes, and who it is.
    pub(crate) struct Identity {
        pub(crate) roots: RootCertStore,
        /// Certificates of this side, its own first, and its key.
        #[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "only NBD has certificates of clients"))]
        own: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    }

    impl std::fmt::Debug for Identity {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Identity").field("authorities", &self.roots.len()).finish_non_exhaustive()
        }
    }

    impl Identity {
        /// Reads `ca-cert.pem`, `client-cert.pem` and `client-key.pem` of a folder.
        ///
        /// Without one: the authorities of this host.
        pub(super) fn read(folder: Option<&Path>) -> Result<Self, String> {
            let mut roots = RootCertStore::empty();
            let Some(folder) = folder else {
                // What cannot be read is left out; the rest may do.
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                if roots.is_empty() {
                    return Err("this host has no certificates of authorities: install ca-certificates, \
                                or name some"
                        .into());
                }
                return Ok(Self { roots, own: None });
            };
            let path = folder.join("ca-cert.pem");
            for certificate in certificates(&path)? {
                roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
            }
            let (certificate, key) = (folder.join("client-cert.pem"), folder.join("client-key.pem"));
            if !certificate.exists() {
                return Ok(Self { roots, own: None });
            }
            let wrong = |error| format!("{}: {error}", key.display());
            let own = (certificates(&certificate)?, PrivateKeyDer::from_pem_file(&key).map_err(wrong)?);
            Ok(Self { roots, own: Some(own) })
        }

        /// The certificates of this side and its key, if it has any.
        #[cfg(feature = "tls")]
        pub(crate) fn own(&self) -> Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
            self.own.as_ref().map(|(chain, key)| (chain.clone(), key.clone_key()))
        }
    }

    fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
        let wrong = |error| format!("{}: {error}", path.display());
        let found = CertificateDer::pem_file_iter(path).map_err(wrong)?;
        let found: Vec<_> = found.collect::<Result<_, _>>().map_err(wrong)?;
        if found.is_empty() {
            return Err(format!("{}: holds no certificate", path.display()));
        }
        Ok(found)
    }
}
