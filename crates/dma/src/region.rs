//! One piece of guest RAM: a memfd, mapped.
use crate::MemoryError;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// What kind of pages a region has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Ordinary pages.
    #[default]
    Pages,
    /// 2 MiB pages from the host's pool (`vm.nr_hugepages`).
    HugePages,
}

/// A region to be made.
#[derive(Clone, Copy, Debug)]
pub struct RegionConfig {
    /// Guest-physical address of the first byte.
    pub gpa: u64,
    /// Bytes, a multiple of 4096 (of 2 MiB with huge pages).
    pub size: u64,
    /// Kind of pages.
    pub backing: Backing,
    /// Whether devices may write to it.
    pub writable: bool,
}

/// Mapped guest RAM. Unmapped when the last holder lets go.
#[derive(Debug)]
pub struct Region {}

impl Region {
    /// Makes a memfd and maps it shared.
    ///
    /// # Errors
    /// Misaligned, or the host has no such memory (the error says what to do about huge pages).
    pub fn new(config: RegionConfig) -> Result<Arc<Self>, MemoryError> {
        let _ = config;
        todo!()
    }

    /// Guest-physical address of the first byte.
    #[must_use]
    pub fn gpa(&self) -> u64 {
        todo!()
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        todo!()
    }

    /// Where the region is mapped in this process.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        todo!()
    }

    /// Whether devices may write to it.
    #[must_use]
    pub fn writable(&self) -> bool {
        todo!()
    }

    /// The memfd.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        let _: Option<&dyn AsFd> = None;
        todo!()
    }
}
