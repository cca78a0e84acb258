//! Backing: the kind of pages that guest RAM consists of.

/// Kind of pages of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Pages of a memfd, which other processes can map.
    ///
    /// Transparent huge pages are requested; the host grants them by its setting `shmem_enabled`.
    #[default]
    Pages,
    /// Memory of this process only, in transparent huge pages where the host has them.
    ///
    /// Needs no set-up on most hosts. There is no descriptor to send.
    Private,
    /// 2 MiB pages from the host's pool (`vm.nr_hugepages`).
    HugePages,
}

impl Backing {
    /// Page size in bytes; a region's address and size are multiples of it.
    #[must_use]
    pub const fn page_size(self) -> u64 {
        match self {
            Self::Pages | Self::Private => 4096,
            Self::HugePages => 2 << 20,
        }
    }
}
