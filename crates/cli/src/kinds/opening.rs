//! Devices that are open, or wait for something.
use super::blk::disk::{ConnectedDisk, UnlockedDisk};
pub(crate) use super::opened::{OpenContext, Opened};
use crate::serve::told::Told;
use anyhow::anyhow;
use paravane_device::blk::FileId;
use paravane_device::net::LinkEnd;
use std::any::Any;
use std::collections::HashMap;
use std::os::fd::OwnedFd;

/// A device that is open, or waits for another process to release something.
pub(crate) enum Opening {
    Device(Opened),
    /// Its image is open and not locked: a dead process has requests in flight for it.
    Unlocked(Box<UnlockedDisk>),
    /// Its store is open, which the daemon that serves it still has, too.
    Ahead(Box<ConnectedDisk>),
    /// Can be opened only when the daemon that serves it has closed it.
    ///
    /// With the facts that its guest would read, as far as they are known.
    Late(Told),
}

impl From<Opened> for Opening {
    fn from(opened: Opened) -> Self {
        Self::Device(opened)
    }
}

impl Opening {
    /// Takes the guard that delays traffic of linked devices.
    pub(crate) fn hold(&mut self) -> Option<Box<dyn Any + Send>> {
        match self {
            Self::Device(opened) => opened.hold.take(),
            _ => None,
        }
    }

    /// The device.
    ///
    /// # Errors
    /// It waits for its image.
    pub(crate) fn opened(self) -> Result<Opened, anyhow::Error> {
        match self {
            Self::Device(opened) => Ok(opened),
            Self::Unlocked(disk) => Err(disk.in_flight()),
            Self::Ahead(disk) => disk.open(),
            Self::Late(_) => Err(anyhow!("internal error: the device is not open")),
        }
    }

    /// Locks the image of a disk, unless requests are still in flight.
    ///
    /// # Errors
    /// The image cannot be locked, or not be used.
    pub(crate) fn locked(disk: UnlockedDisk) -> Result<Self, anyhow::Error> {
        Ok(disk.lock()?.map_or_else(|disk| Self::Unlocked(Box::new(disk)), Self::Device))
    }

    /// Goes on with a device that another process may have released: its servers are asked, its image locked.
    ///
    /// # Errors
    /// The image cannot be used.
    pub(crate) fn go_on(self, context: &OpenContext) -> Result<Self, anyhow::Error> {
        match self {
            Self::Unlocked(mut disk) => {
                disk.connect(context)?;
                Self::locked(*disk)
            }
            Self::Ahead(disk) => disk.open().map(Into::into),
            opening => Ok(opening),
        }
    }

    /// See [`UnlockedDisk::keep`]. A device that is open keeps nothing.
    pub(crate) fn keep(&mut self, told: &Told) {
        match self {
            Self::Unlocked(disk) => disk.keep(told),
            Self::Ahead(disk) => disk.keep(told),
            Self::Device(_) | Self::Late(_) => {}
        }
    }

    /// Adds the facts that the guest would read, as far as the device is open.
    ///
    /// # Errors
    /// The image cannot be such a disk.
    pub(crate) fn told(&self, told: &mut Told) -> Result<(), anyhow::Error> {
        match self {
            Self::Device(opened) => opened.observer.told(told),
            Self::Unlocked(disk) => disk.told(told)?,
            Self::Ahead(disk) => disk.told(told)?,
            Self::Late(known) => told.extend(known),
        }
        Ok(())
    }

    /// Numbers of the file of its image, if it is open.
    pub(crate) fn file_id(&self) -> Option<FileId> {
        match self {
            Self::Unlocked(disk) => disk.file_id(),
            Self::Device(opened) => opened.observer.snapshots()?.image_id().file,
            _ => None,
        }
    }

    /// Whether its image would show that a snapshot has replaced it.
    pub(crate) fn has_marks(&self) -> bool {
        match self {
            Self::Unlocked(disk) => disk.has_marks(),
            Self::Device(opened) => opened.observer.snapshots().is_none_or(|snapshots| snapshots.has_marks()),
            _ => true,
        }
    }
}

/// What an earlier daemon had of a device.
#[derive(Debug, Default)]
pub(crate) struct Earlier {
    /// Descriptors of the device.
    pub(crate) fds: Vec<OwnedFd>,
    /// Facts that its guest has read.
    pub(crate) told: Told,
}

/// Unclaimed ends of links whose other end is in use, by link name.
#[derive(Debug, Default)]
pub(crate) struct LinkEnds(pub(crate) HashMap<String, LinkEnd>);
