//! TLS of connections to a server.
use super::options::ObjectError;
use crate::Certificates;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::path::Path;
use std::sync::Arc;

/// What a connection needs for TLS: settings, and the name in the server's certificate.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    pub(super) config: Arc<ClientConfig>,
    pub(super) name: ServerName<'static>,
}

impl Tls {
    /// Trusts the authorities of a file, or those of this host, for the server `host`.
    ///
    /// # Errors
    /// There are no authorities, or the name cannot be in a certificate.
    pub(super) fn new(
        host: &str,
        ca_file: Option<&Path>,
        certificates: &Certificates,
    ) -> Result<Self, ObjectError> {
        let mut roots = RootCertStore::empty();
        match ca_file {
            Some(path) => {
                let wrong = |why: String| ObjectError::File { path: path.into(), why };
                let found = CertificateDer::pem_file_iter(path).map_err(|error| wrong(error.to_string()))?;
                for certificate in found {
                    let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
                    roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
                }
                if roots.is_empty() {
                    return Err(wrong("has no certificate in PEM".into()));
                }
            }
            None => roots = certificates.identity(None).map_err(ObjectError::Invalid)?.roots.clone(),
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| ObjectError::Invalid(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| ObjectError::Invalid(format!("{host}: cannot be the name in a certificate")))?;
        Ok(Self { config: Arc::new(config), name })
    }
}
