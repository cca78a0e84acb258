//! What disks need of a host.
use super::args::Blk;
use crate::doctor::finding::Finding;
use rustix::process::{Resource, getrlimit};

/// Whether the memory of a VMM can be pinned, if a disk pins it.
pub(super) fn memlock(disk: &Blk) -> Option<Finding> {
    disk.registered_buffers.then(|| judge(disk.queues, getrlimit(Resource::Memlock).maximum))
}

fn judge(queues: u16, limit: Option<u64>) -> Finding {
    match limit {
        None => Finding::ok("memlock", "unlimited"),
        Some(bytes) => Finding::warn(
            "memlock",
            format!(
                "limit of {} MiB; registered-buffers pins the memory of the VMM once for each of {queues} queues",
                bytes >> 20
            ),
            "LimitMEMLOCK=infinity, or the memory of the VMM times the queues",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    #[test]
    fn a_limit_of_pinned_memory_is_a_loss() {
        assert_eq!(judge(4, Some(64 << 20)).level, Level::Warn);
        assert_eq!(judge(4, None).level, Level::Ok);
    }
}
