//! Certificates and keys of TLS.
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use std::path::Path;
use std::sync::Arc;

/// Whom this side believes, and who it is.
pub(crate) struct Identity {
    roots: RootCertStore,
    /// Certificates of this side, its own first, and its key.
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

    /// Settings of connections.
    ///
    /// # Errors
    /// The certificate and the key of this side do not fit.
    pub(crate) fn config(&self) -> Result<ClientConfig, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(self.roots.clone());
        match &self.own {
            Some((chain, key)) => config
                .with_client_auth_cert(chain.clone(), key.clone_key())
                .map_err(|error| format!("client-cert.pem, client-key.pem: {error}")),
            None => Ok(config.with_no_client_auth()),
        }
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
