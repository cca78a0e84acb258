//! Number and limit of the file descriptors of this process.
use rustix::fs::OFlags;
use rustix::process::{Resource, getrlimit};
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

/// Counts open descriptors. Must be created before the sandbox is entered.
#[derive(Debug)]
pub(crate) struct Descriptors(Option<File>);

impl Descriptors {
    pub(crate) fn open() -> Self {
        let directory =
            File::options().read(true).custom_flags(OFlags::DIRECTORY.bits() as i32).open("/proc/self/fd");
        Self(directory.ok())
    }

    /// Number of open descriptors.
    ///
    /// `None`: the kernel does not count them (before Linux 6.2), or /proc is not mounted.
    pub(crate) fn count(&self) -> Option<u64> {
        // stat(2) reports it as the size of the directory.
        let size = self.0.as_ref()?.metadata().ok()?.len();
        (size > 0).then_some(size)
    }
}

/// RLIMIT_NOFILE. `None`: unlimited.
pub(crate) fn limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_counted_where_the_kernel_does() {
        let descriptors = Descriptors::open();
        if let Some(count) = descriptors.count() {
            // At least the three that every process has, and the directory.
            assert!(count >= 4 && limit().is_none_or(|limit| count <= limit), "{count}");
        }
    }
}
