//! Whose a subject is.

/// Whose a subject is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Paravane, or a variant of it.
    Ours,
    /// Another build of Paravane.
    OtherBuild,
    /// Someone else's implementation, measured in the same rounds.
    Peer,
    /// What the machine itself needs: a copy of memory, a reading of a clock.
    Yardstick,
    /// Figures that someone else published.
    Published,
}

/// Subjects that are someone else's, up to the first `/`.
const PEERS: [&str; 8] = [
    "virtio-queue",
    "virtio-driver",
    "virtio-drivers",
    "vm-memory",
    "ringtest",
    "qemu-storage-daemon",
    "spdk-vhost",
    "dpdk-vhost",
];
const YARDSTICKS: [&str; 2] = ["memcpy", "clock"];

impl Kind {
    /// The kind of the subject with this name.
    pub(crate) fn of(subject: &str) -> Self {
        match root(subject) {
            "published" => Self::Published,
            name if PEERS.contains(&name) => Self::Peer,
            name if YARDSTICKS.contains(&name) => Self::Yardstick,
            _ if subject == crate::subject::OTHER_BUILD => Self::OtherBuild,
            _ => Self::Ours,
        }
    }

    /// Whether changes of Paravane leave its figures alone.
    pub(crate) fn is_control(self) -> bool {
        matches!(self, Self::Peer | Self::Yardstick)
    }
}

/// The part of a name before the first `/`: the program that variants share.
pub(crate) fn root(subject: &str) -> &str {
    subject.split('/').next().unwrap_or(subject)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_are_told_apart() {
        let all = |subjects: &[&str], kind| subjects.iter().all(|subject| Kind::of(subject) == kind);
        assert!(all(&["paravane", "paravane/local", "paravane/iova+log", "mmio-msi"], Kind::Ours));
        assert!(all(&["paravane/other"], Kind::OtherBuild));
        assert!(all(&["ringtest/virtio_ring_0_9", "vm-memory/iommu"], Kind::Peer));
        assert!(all(&["memcpy/pages"], Kind::Yardstick));
        assert!(all(&["published/unmodified"], Kind::Published));
    }
}
