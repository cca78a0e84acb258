//! TLS of connections to a server.
use super::error::ObjectError;
use crate::NamedFiles;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::path::Path;
use std::sync::Arc;

/// What a connection needs for TLS: settings, and the name in the server's certificate.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    pub(super) config: Arc<ClientConfig>,
    pub(super) name: ServerName<'static>,
}

impl Tls {
    /// For the server `host`, with the certificates of a folder, or the authorities of this host.
    ///
    /// # Errors
    /// There are no authorities, or the name cannot be in a certificate.
    pub(super) fn new(host: &str, folder: Option<&Path>, files: &NamedFiles) -> Result<Self, ObjectError> {
        let identity = files.identity(folder).map_err(ObjectError::Invalid)?;
        let mut config = identity.config().map_err(ObjectError::Invalid)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| ObjectError::Invalid(format!("{host}: cannot be the name in a certificate")))?;
        Ok(Self { config: Arc::new(config), name })
    }
}
