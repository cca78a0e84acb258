//! Why an image cannot be opened.
use super::{Format, HeaderError, OVERLAY_MARK, RefcountError};
use std::path::PathBuf;
use thiserror::Error;

/// An image cannot be opened. It has not been changed.
#[derive(Debug, Error)]
#[error("{}: {reason}", path.display())]
pub struct OpenError {
    /// Path or location of the image, or of one of its backing files.
    pub path: PathBuf,
    /// Cause.
    #[source]
    pub reason: OpenReason,
}

/// Why an image cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenReason {
    /// A system call failed.
    #[error("cannot open the image: {source}")]
    Os {
        /// Cause.
        source: std::io::Error,
    },
    /// The path is a directory.
    #[error("is a directory; a disk image is a regular file or a block device")]
    Directory,
    /// The path is a character device, a FIFO or a socket.
    #[error("is neither a regular file nor a block device")]
    Kind,
    /// A raw image does not end at a block, and begins like an image of another format.
    #[error(
        "size of {size} bytes is not that of a raw image, and it begins like {like}: if it is that, use --format \
         qcow2, or make a raw image with `qemu-img convert -O raw`"
    )]
    OtherFormat {
        /// Size of the image in bytes.
        size: u64,
        /// Name of the format.
        like: &'static str,
    },
    /// A raw image does not end at a block.
    #[error("size of {size} bytes is not a multiple of {block}; `truncate -s %{block}` rounds it up")]
    Size {
        /// Size of the image in bytes.
        size: u64,
        /// Block size in bytes: 512, or the alignment that direct I/O demands.
        block: u64,
    },
    /// A raw image in a store does not end at a block.
    #[error(
        "size of {size} bytes is not a multiple of {block}; have the server round it up (`nbdkit \
         --filter=truncate ... round-up={block}`), or use a copy in a file"
    )]
    StoreSize {
        /// Size of the store in bytes.
        size: u64,
        /// Block size in bytes.
        block: u64,
    },
    /// The disk of a format does not end at a block.
    #[error(
        "disk of {size} bytes is not a multiple of its block size, {block}; use another block size, or \
         `qemu-img resize`"
    )]
    DiskSize {
        /// Size of the disk in bytes.
        size: u64,
        /// Block size in bytes.
        block: u64,
    },
    /// [`BlkConfig::block_size`](super::BlkConfig) that the image cannot have.
    #[error("block size of {block} bytes; the image takes a power of two from {least} to 4096")]
    Block {
        /// Block size in bytes.
        block: u64,
        /// Least block size in bytes.
        least: u64,
    },
    /// The file system lacks direct I/O, or demands more than 4096 bytes of alignment.
    #[error("direct I/O (O_DIRECT) is not supported here: {source}; use the page cache")]
    Direct {
        /// Cause.
        source: std::io::Error,
    },
    /// `direct` with a format other than raw.
    #[error("direct I/O (O_DIRECT) needs a raw image; a qcow2 image uses the page cache")]
    DirectOfFormat,
    /// `registered_buffers` with another engine than io_uring.
    #[error("registered buffers need the io_uring engine; the image uses {engine}")]
    BuffersOfEngine {
        /// Engine of the image; see [`Blk::engine`](super::Blk::engine).
        engine: String,
    },
    /// The disk would have no sectors.
    #[error("the image is empty; `truncate -s SIZE` or `qemu-img resize` gives it a size")]
    Empty,
    /// The store or block device takes no writes, and the disk is not to be read-only.
    #[error("is read-only; serve it with --read-only")]
    ReadOnly,
    /// [`EngineChoice`](super::EngineChoice) other than `Auto`, with a store that is no file.
    #[error("engines are for files; use engine auto")]
    EngineOfStore,
    /// The lock is held elsewhere, or the block device is mounted.
    #[error("in use by another process, or configured twice (the image is locked)")]
    InUse,
    /// An image is to be read, and another program has it open for writing, or lets nobody read.
    #[error(
        "in use by a program with QEMU's locks, which writes to it or lets nobody read: end that program first"
    )]
    Written,
    /// The path names another file than before the wait for the lock.
    #[error("has become another file while its lock was waited for; try again")]
    Replaced,
    /// The file was deleted before its lock was there.
    #[error("was deleted while its lock was waited for")]
    Deleted,
    /// The image has become the backing file of an overlay while it was served.
    #[error(
        "is the backing file of {}: serve that with --format qcow2, and this with --backing; to give up the \
         overlay and what was written since, run `setfattr -x {OVERLAY_MARK}` on the image",
        overlay.display()
    )]
    Frozen {
        /// Path of the overlay.
        overlay: PathBuf,
    },
    /// A dead process has requests in flight for the image: its kernel still does them.
    #[error("requests of a process that is gone are in flight for the image; wait for its storage")]
    RequestsInFlight,
    /// The tables of a qcow2 image are invalid, or reading them failed.
    #[error("cannot open the qcow2 image: {source}")]
    Qcow2 {
        /// Cause.
        source: std::io::Error,
    },
    /// The header of a qcow2 image is invalid, or needs an unsupported feature.
    #[error("{source}")]
    Header {
        /// Cause.
        source: Box<HeaderError>,
    },
    /// The reference counts of a qcow2 image are wrong.
    #[error("cannot be opened for writing: {source}")]
    Refcounts {
        /// Cause.
        source: RefcountError,
    },
    /// A backing file is missing from [`BlkConfig::backing`](super::BlkConfig).
    #[error("has backing file {name:?}; pass --backing FORMAT:PATH")]
    Backing {
        /// Name stored in the image. A guest may have written it.
        name: String,
    },
    /// [`BlkConfig::backing`](super::BlkConfig) has more files than the images.
    #[error("has no backing file, but one was passed; remove it")]
    NoBacking,
    /// A layer is not the backing file that the image names.
    #[error(
        "has backing file {name:?} ({}), not {} ({}); pass that one, or --force-layers if it was moved",
        format.as_deref().unwrap_or("unknown format"), layer.display(), layer_format.name()
    )]
    Layer {
        /// Name stored in the image. A guest may have written it.
        name: String,
        /// Format stored in the image.
        format: Option<String>,
        /// Path or location of the layer.
        layer: PathBuf,
        /// Format of the layer.
        layer_format: Format,
    },
    /// The data of a qcow2 image is in another file.
    #[error(
        "has an external data file, which is not supported; `qemu-img convert -O qcow2` makes a copy without"
    )]
    DataFile,
    /// [`EngineChoice::IoUring`](super::EngineChoice) where the host does not allow it.
    #[error("this host refuses io_uring: {source}; use engine auto or threads")]
    Engine {
        /// Cause; see [`io_uring_available`](super::io_uring_available).
        source: std::io::Error,
    },
}

impl OpenReason {
    /// The error of the image at `path`.
    pub fn at(self, path: impl Into<PathBuf>) -> OpenError {
        OpenError { path: path.into(), reason: self }
    }
}
