//! I/O engines by the names that operators use.
use crate::choices::Choice;
use paravane_device::blk::EngineChoice;

pub(crate) const ENGINES: &[Choice<EngineChoice>] = &[
    ("auto", "immediate for images in memory (tmpfs), else io_uring, else threads", EngineChoice::Auto),
    ("io_uring", "Asynchronous I/O by the kernel", EngineChoice::IoUring),
    ("threads", "Blocking system calls on a thread pool", EngineChoice::Threads),
    ("immediate", "Blocking system calls on the I/O thread", EngineChoice::Immediate),
];

/// Whether it may be io_uring, depending on the image and the host.
pub(crate) fn may_be_io_uring(engine: EngineChoice) -> bool {
    matches!(engine, EngineChoice::Auto | EngineChoice::IoUring)
}
