//! How an object is opened.
use crate::NamedFiles;
use std::time::Duration;

/// How an object is opened.
#[derive(Clone, Debug)]
pub struct ObjectOptions {
    /// Most connections to the server \[4\].
    pub connections: u16,
    /// How long to wait for a connection \[10 s\].
    pub connect_timeout: Duration,
    /// How long the server may take to say what the object is. [as long as the others allow]
    pub open_timeout: Option<Duration>,
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
            open_timeout: None,
            stall_timeout: Duration::from_secs(30),
            retry: Duration::from_secs(60),
            files: NamedFiles::default(),
            memory_bytes: 64 << 20,
        }
    }
}
