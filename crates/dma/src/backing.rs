//! Backing: the kind of pages that guest RAM consists of.

/// Kind of pages of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Ordinary pages.
    #[default]
    Pages,
    /// 2 MiB pages from the host's pool (`vm.nr_hugepages`).
    HugePages,
}

impl Backing {
    /// Page size in bytes; a region's address and size are multiples of it.
    #[must_use]
    pub const fn page_size(self) -> u64 {
        match self {
            Self::Pages => 4096,
            Self::HugePages => 2 << 20,
        }
    }
}
