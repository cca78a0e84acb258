//! How an object is opened, and why it cannot be.
use crate::{Location, NamedFiles};
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use thiserror::Error;

/// How an object is opened.
#[derive(Clone, Debug)]
pub struct ObjectOptions {
    /// Most connections to the server \[4\].
    pub connections: u16,
    /// How long to wait for a connection \[10 s\].
    pub connect_timeout: Duration,
    /// How long a server may send nothing of an answer that is due \[30 s\].
    pub stall_timeout: Duration,
    /// How long requests wait for a server that fails, before they fail \[60 s\].
    pub retry: Duration,
    /// Files that were read; others that the location names are read now.
    pub files: NamedFiles,
    /// Most bytes of chunks in memory, without a folder \[64 MiB\].
    pub memory_bytes: u64,
}

impl Default for ObjectOptions {
    fn default() -> Self {
        Self {
            connections: 4,
            connect_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(30),
            retry: Duration::from_secs(60),
            files: NamedFiles::default(),
            memory_bytes: 64 << 20,
        }
    }
}

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
