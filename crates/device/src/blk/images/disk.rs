//! A disk that this process reads and writes itself.
use super::super::block_status::BlockStatus;
use super::super::image::Image;
use super::super::image_file::{ImageFile, Opening};
use super::super::mark;
use super::super::qcow2::{Extent, Qcow2, Recorded};
use super::super::{FileId, Format, Layer, LayerSource, OpenError, OpenReason};
use super::{ImageError, NewImage, create_in, open_file};
use paravane_spec::blk::SECTOR;
use paravane_store::Store;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Bytes of zeroes that are written at once, where nothing else makes zeroes.
const ZEROES: u64 = 256 << 10;
/// Block in which holes of a raw image are looked for and left, in bytes.
const RAW_BLOCK: u64 = 4096;

/// How an image is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// It is read. Others may read it, too.
    Read,
    /// It is read and written. Nobody else may use it.
    Write,
}

/// An open, locked disk.
#[derive(Debug)]
pub struct Disk {
    image: Image,
    has_backing: bool,
    /// What is known of a raw image.
    status: BlockStatus,
}

impl Disk {
    /// Opens an image with its backing files, top first.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(place: &LayerSource, format: Format, backing: &[Layer], how: Use) -> Result<Self, OpenError> {
        Self::of(open_file(place, format, how == Use::Read)?, format, backing)
    }

    /// Opens the backing file of the image at `overlay` for writing, to merge that image into it.
    ///
    /// It may have been frozen by a snapshot: [`merge`](super::merge()) ends that.
    ///
    /// # Errors
    /// See [`OpenError`]; [`OpenReason::Frozen`]: by a snapshot with another overlay.
    pub fn open_base(
        place: &LayerSource,
        format: Format,
        backing: &[Layer],
        overlay: &Path,
    ) -> Result<Self, OpenError> {
        let opening = Opening { frozen: true, ..Opening::cached(format, false) };
        let file = place.image(opening)?;
        if let Some(marked) = file.source.file().and_then(mark::overlay)
            && marked != overlay
            && !matches!((marked.canonicalize(), overlay.canonicalize()), (Ok(one), Ok(other)) if one == other)
        {
            return Err(OpenReason::Frozen { overlay: marked }.at(file.path));
        }
        Self::of(file, format, backing)
    }

    /// Opens a file, block device or store that is there, to be overwritten with an image.
    ///
    /// A raw image takes all of it, and holds what it held before. A qcow2 image is made anew in it; a
    /// file is emptied first.
    ///
    /// # Errors
    /// It is in use, or missing, or cannot be written; a raw image is smaller than `new`. Then
    /// nothing was changed. Or the tables of a qcow2 image cannot be written.
    pub fn overwrite(place: &LayerSource, new: &NewImage) -> Result<Self, ImageError> {
        let format = match new {
            NewImage::Raw(_) => Format::Raw,
            NewImage::Qcow2(_) => Format::Qcow2,
        };
        let mut file = open_file(place, format, false)?;
        new.check().map_err(|reason| ImageError::New { path: file.path.clone(), reason })?;
        match new {
            NewImage::Raw(size) if file.size < *size => {
                return Err(ImageError::Small { path: file.path, target: file.size, source_size: *size });
            }
            NewImage::Raw(_) => {}
            NewImage::Qcow2(_) => {
                let failed = |path: &Path, source| ImageError::Io {
                    path: path.to_owned(),
                    action: "make the image",
                    source,
                };
                if let Some(regular) = file.source.file().filter(|file| is_regular(file)) {
                    regular.set_len(0).map_err(|error| failed(&file.path, error))?;
                }
                create_in(&file.source, &file.path, new)?;
                file.size = file.source.try_size().map_err(|error| failed(&file.path, error))?;
            }
        }
        Ok(Self::of(file, format, &[])?)
    }

    fn of(file: ImageFile, format: Format, backing: &[Layer]) -> Result<Self, OpenError> {
        let image = Image::open(file, format, backing)?;
        Ok(Self { image, has_backing: !backing.is_empty(), status: BlockStatus::default() })
    }

    /// Ends that the image is frozen by a snapshot, whose overlay it has taken in.
    pub(super) fn thaw(&self) {
        if let Some(file) = self.image.file.source.file() {
            mark::clear_overlay_mark(file);
        }
    }

    /// Opens a qcow2 image for reading, without the backing file that it may have.
    ///
    /// [`Disk::extent`] tells what it holds itself.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_alone(place: &LayerSource) -> Result<Self, OpenError> {
        let file = open_file(place, Format::Qcow2, true)?;
        let qcow2 = Qcow2::open_alone(&file)?;
        let image = Image::through(file, qcow2)?;
        Ok(Self { image, has_backing: false, status: BlockStatus::default() })
    }

    /// What the header of a qcow2 image says; `None`: it is none.
    ///
    /// # Errors
    /// The image cannot be read.
    pub fn recorded(&self) -> Result<Option<Recorded>, ImageError> {
        self.named("read the header", Recorded::read(&self.image.file.source))
    }

    /// The file; `None`: the image lies in another store.
    #[must_use]
    pub fn file_id(&self) -> Option<FileId> {
        FileId::of_source(&self.image.file.source)
    }

    /// Path or location.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.image.file.path
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.image.sectors() * SECTOR
    }

    /// Whether it was opened with a backing file.
    #[must_use]
    pub fn has_backing(&self) -> bool {
        self.has_backing
    }

    /// Bytes that are allocated together: a cluster, or a block of a raw image. A power of two.
    #[must_use]
    pub fn grain(&self) -> u64 {
        match &self.image.qcow2 {
            Some(qcow2) => qcow2.cluster(),
            None => RAW_BLOCK,
        }
    }

    /// Block in bytes: what is written and zeroed begins and ends at one, if the image allows it.
    pub(super) fn block(&self) -> u64 {
        let device = self.image.file.source.file().and_then(|file| rustix::fs::ioctl_blksszget(file).ok());
        device.map_or(SECTOR, u64::from).max(self.image.file.block)
    }

    /// What is at `offset`, and for how many bytes: at most `len`, at least 1.
    ///
    /// # Errors
    /// The range is empty or beyond the end, or the image cannot be read.
    pub fn extent(&self, offset: u64, len: u64) -> Result<(Extent, u64), ImageError> {
        let inside = len > 0 && offset.checked_add(len).is_some_and(|end| end <= self.size());
        let found = match (inside, &self.image.qcow2) {
            (false, _) => Err(io::ErrorKind::InvalidInput.into()),
            (true, Some(qcow2)) => qcow2.extent(offset, len),
            (true, None) => {
                let found = self.status.zeroes(&self.image.file.source, offset, len);
                found.map(|(zeroes, len)| (if zeroes { Extent::Hole } else { Extent::Data }, len))
            }
        };
        self.named("find data", found)
    }

    /// Fills `into` from `offset`.
    ///
    /// # Errors
    /// The range is beyond the end, or the image cannot be read.
    pub fn read(&self, into: &mut [u8], offset: u64) -> Result<(), ImageError> {
        let done = match &self.image.qcow2 {
            Some(qcow2) => qcow2.read_at(into, offset),
            None => match self.image.file.source.read_up_to(into, offset) {
                Ok(len) if len < into.len() => Err(io::ErrorKind::UnexpectedEof.into()),
                done => done.map(drop),
            },
        };
        self.named("read", done)
    }

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// The range is beyond the end, the disk was opened for reading, or the storage refuses.
    pub fn write(&self, data: &[u8], offset: u64) -> Result<(), ImageError> {
        let len = data.len() as u64;
        let done = self.may_write(offset, len).and_then(|()| match &self.image.qcow2 {
            Some(qcow2) => qcow2.write_data(data, offset),
            None => {
                self.status.forget(offset, len);
                self.image.file.source.write_all_at(data, offset)
            }
        });
        self.named("write", done)
    }

    /// Makes a range read as zeroes, and frees it where that can be.
    ///
    /// # Errors
    /// As [`Disk::write`].
    pub fn zero(&self, offset: u64, len: u64) -> Result<(), ImageError> {
        let done = self.may_write(offset, len).and_then(|()| match &self.image.qcow2 {
            _ if len == 0 => Ok(()),
            Some(qcow2) => qcow2.zero_range(offset, len, true),
            None => {
                self.status.forget(offset, len);
                zero(&self.image.file.source, offset, len)
            }
        });
        self.named("write zeroes", done)
    }

    /// Makes the disk larger. What is new reads as zeroes.
    ///
    /// # Errors
    /// The storage refuses.
    pub fn grow(&self, size: u64) -> Result<(), ImageError> {
        let old = self.size();
        if size <= old {
            return Ok(());
        }
        let grown = self.image.resize(size).and_then(|()| self.image.look()).map(drop);
        self.named("grow the disk", grown)?;
        // Behind the old end, the last cluster may have data of a larger disk that it once was.
        self.zero(old, old.next_multiple_of(self.grain()).min(size) - old)
    }

    /// Makes all writes durable.
    ///
    /// # Errors
    /// The storage has lost a write.
    pub fn sync(&self) -> Result<(), ImageError> {
        let done = match &self.image.qcow2 {
            Some(qcow2) => qcow2.sync(),
            None => self.image.file.source.sync(),
        };
        self.named("make writes durable", done)
    }

    fn may_write(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.checked_add(len) {
            _ if self.image.file.read_only => Err(io::ErrorKind::PermissionDenied.into()),
            Some(end) if end <= self.size() => Ok(()),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn named<T>(&self, action: &'static str, result: io::Result<T>) -> Result<T, ImageError> {
        result.map_err(|source| ImageError::Io { path: self.image.file.path.clone(), action, source })
    }
}

fn is_regular(file: &File) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.is_file())
}

/// Makes a range read as zeroes, by writes if nothing else makes zeroes.
fn zero(source: &Arc<dyn Store>, offset: u64, len: u64) -> io::Result<()> {
    for unmap in [true, false] {
        match source.zero(offset, len, unmap) {
            // EINVAL: a block device with larger blocks.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {}
            done => return done,
        }
    }
    write_zeroes(source, offset, len)
}

fn write_zeroes(source: &Arc<dyn Store>, offset: u64, len: u64) -> io::Result<()> {
    let zeroes = vec![0; len.min(ZEROES) as usize];
    let mut done = 0;
    while done < len {
        let now = (len - done).min(ZEROES);
        source.write_all_at(&zeroes[..now as usize], offset + done)?;
        done += now;
    }
    Ok(())
}
