//! Devices that are open, and what they are opened with.
use super::observe::Observe;
use crate::serve::sandbox::paths::AllowedPaths;
use paravane_device::Device;
use paravane_store::{CacheFolder, Connector, Direct, NamedFiles};
use std::any::Any;
use std::sync::Arc;

/// A device ready to be served.
pub(crate) struct Opened {
    pub(crate) device: Box<dyn Device>,
    pub(crate) observer: Box<dyn Observe>,
    /// Description of the back end, for `paravane status`.
    pub(crate) back_end: String,
    /// Delays traffic until it is dropped: once all devices of the link are served.
    pub(crate) hold: Option<Box<dyn Any + Send>>,
}

/// Environment in which devices are opened.
#[derive(Clone, Debug)]
pub(crate) struct OpenContext {
    /// `None`: no sandbox.
    pub(crate) allowed: Option<Arc<AllowedPaths>>,
    /// Connects to the servers of images.
    pub(crate) connector: Arc<dyn Connector>,
    /// Keeps chunks of objects.
    pub(crate) cache: Option<CacheFolder>,
    /// Files that locations name, read before the sandbox closed.
    pub(crate) files: NamedFiles,
}

impl Default for OpenContext {
    fn default() -> Self {
        Self { allowed: None, connector: Arc::new(Direct), cache: None, files: NamedFiles::default() }
    }
}
