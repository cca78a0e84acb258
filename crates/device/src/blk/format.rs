//! Formats of images.

/// The format of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// The disk's bytes.
    #[default]
    Raw,
    /// QEMU's qcow2, versions 2 and 3, without encryption and external data file.
    Qcow2,
}

impl Format {
    /// Name in options, and in the headers of images.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}
