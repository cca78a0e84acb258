//! Why an object cannot be opened.
use crate::Location;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// An object cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// It is no object.
    #[error("{0}: is no object; one has the scheme http, https or s3")]
    NoObject(Box<Location>),
    /// The location or an option is wrong.
    #[error("{0}")]
    Invalid(String),
    /// A file cannot be used.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The server is out of reach, or fails.
    #[error("{0}")]
    Unreachable(String),
    /// The server refuses, or cannot serve ranges of the object.
    #[error("{0}")]
    Refused(String),
    /// The cache cannot be used.
    #[error("cache {path}: {source}")]
    Cache {
        /// The folder.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The host refuses a thread or a descriptor.
    #[error("the host refuses a resource: {0}")]
    Host(#[from] io::Error),
}
