//! I/O engines by the names that operators use.
use clap::ValueEnum;
use paravane_device::blk::EngineChoice;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// immediate for images in memory (tmpfs), else io_uring, else threads
    Auto,
    /// Asynchronous I/O by the kernel
    #[value(name = "io_uring")]
    IoUring,
    /// Blocking system calls on a thread pool
    Threads,
    /// Blocking system calls on the I/O thread
    Immediate,
}

impl Engine {
    /// Whether it may be io_uring, depending on the image and the host.
    pub(crate) fn may_be_io_uring(self) -> bool {
        matches!(self, Self::Auto | Self::IoUring)
    }
}

impl From<Engine> for EngineChoice {
    fn from(engine: Engine) -> Self {
        match engine {
            Engine::Auto => Self::Auto,
            Engine::IoUring => Self::IoUring,
            Engine::Threads => Self::Threads,
            Engine::Immediate => Self::Immediate,
        }
    }
}
