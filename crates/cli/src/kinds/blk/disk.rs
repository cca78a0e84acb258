//! Disks on their way: open and not locked, or with an open store.
use super::args::Blk;
use super::observer::DiskObserver;
use super::told;
use crate::images::Backing;
use crate::kinds::opened::{OpenContext, Opened};
use crate::serve::told::Told;
use paravane_device::Limiter;
use paravane_device::blk::{self, BlkConfig, FileId, Layer, LayerSource, OpenReason, UnlockedBlk};
use paravane_store::{OpenOptions, Store};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A disk whose image is open and not locked: a dead process has requests in flight for it.
pub(crate) struct UnlockedDisk {
    disk: UnlockedBlk,
    image: PathBuf,
    limiter: Arc<Limiter>,
    stores: Vec<Arc<dyn Store>>,
    /// The stores of its layers are still to be opened.
    lacks_stores: Option<Box<Blk>>,
}

/// A disk whose store is open, and nothing was read from it.
pub(crate) struct ConnectedDisk {
    image: String,
    store: Arc<dyn Store>,
    config: BlkConfig,
    layers: Vec<Arc<dyn Store>>,
    limiter: Arc<Limiter>,
}

impl ConnectedDisk {
    pub(super) fn new(
        name: &str,
        blk: &Blk,
        context: &OpenContext,
        store: Arc<dyn Store>,
    ) -> Result<Self, anyhow::Error> {
        let limiter = Limiter::new(blk.limit.rates());
        let (config, layers) = disk_config(name, blk, context, &limiter)?;
        Ok(Self { image: blk.image.to_string(), store, config, layers, limiter })
    }

    /// Opens it. Reads and writes its store if a format needs that.
    ///
    /// # Errors
    /// The image cannot be used.
    pub(crate) fn open(self) -> Result<Opened, anyhow::Error> {
        let Self { image, store, config, layers, limiter } = self;
        let device = blk::Blk::over(store.clone(), config)?;
        Ok(opened(device, &image, limiter, [vec![store], layers].concat()))
    }

    /// As [`UnlockedDisk::keep`].
    pub(crate) fn keep(&mut self, told: &Told) {
        self.config.block_size = self.config.block_size.or(told::block(told));
    }

    /// As [`UnlockedDisk::told`].
    ///
    /// # Errors
    /// The image cannot be such a disk.
    pub(crate) fn told(&self, told: &mut Told) -> Result<(), anyhow::Error> {
        told::geometry(self.config.geometry_of_store(&self.store)?, told);
        Ok(())
    }
}

impl UnlockedDisk {
    /// Opens the stores of its layers, if that is still to be done.
    ///
    /// # Errors
    /// A server does not answer, or has no such image.
    pub(crate) fn connect(&mut self, context: &OpenContext) -> Result<(), anyhow::Error> {
        if let Some(blk) = &self.lacks_stores {
            let (backing, stores) = layers(blk, context)?;
            self.disk.set_backing(backing, blk.force_layers);
            (self.stores, self.lacks_stores) = (stores, None);
        }
        Ok(())
    }

    /// Locks the image, unless the requests are still in flight.
    ///
    /// # Errors
    /// The image cannot be locked, or not be used.
    pub(crate) fn lock(self) -> Result<Result<Opened, Self>, anyhow::Error> {
        let Self { disk, image, limiter, stores, lacks_stores } = self;
        Ok(match disk.lock()? {
            Ok(device) => Ok(opened(device, &image.display().to_string(), limiter, stores)),
            Err(disk) => Err(Self { disk, image, limiter, stores, lacks_stores }),
        })
    }

    /// The error for a caller that cannot wait.
    pub(crate) fn in_flight(&self) -> anyhow::Error {
        OpenReason::RequestsInFlight.at(&self.image).into()
    }

    pub(crate) fn file_id(&self) -> Option<FileId> {
        self.disk.file_id()
    }

    /// Whether its image would show that a snapshot has replaced it.
    pub(crate) fn has_marks(&self) -> bool {
        self.disk.has_marks()
    }

    /// Keeps the block size that a guest was `told`, unless the specification names another.
    pub(crate) fn keep(&mut self, told: &Told) {
        if let Some(block) = told::block(told) {
            self.disk.keep_block(block);
        }
    }

    /// Adds the facts that its guest would read.
    ///
    /// # Errors
    /// The image cannot be such a disk.
    pub(crate) fn told(&self, told: &mut Told) -> Result<(), anyhow::Error> {
        told::geometry(self.disk.geometry()?, told);
        Ok(())
    }
}

/// How the store of a disk's image is opened.
pub(super) fn image_options(blk: &Blk, context: &OpenContext) -> OpenOptions {
    OpenOptions { read_only: blk.read_only, lock: !blk.no_lock, ..store_options(blk, context) }
}

/// How the stores of a disk are opened.
fn store_options(blk: &Blk, context: &OpenContext) -> OpenOptions {
    OpenOptions {
        connections: blk.queues,
        timeout: Duration::from_secs(blk.store_timeout.into()),
        polls: blk.polls,
        cache: context.cache.clone(),
        files: context.files.clone(),
        ..OpenOptions::default()
    }
}

/// An open disk.
fn opened(device: blk::Blk, image: &str, limiter: Arc<Limiter>, stores: Vec<Arc<dyn Store>>) -> Opened {
    let back_end = format!("{image} ({})", device.engine());
    let observer = Box::new(DiskObserver::new(&device, limiter, stores));
    Opened { device: Box::new(device), observer, back_end, hold: None }
}

/// Opens a file. Without a context, its layers are still to be opened, and compared when they are there.
pub(super) fn unlocked(
    name: &str,
    blk: &Blk,
    image: &Path,
    context: Option<&OpenContext>,
) -> Result<UnlockedDisk, anyhow::Error> {
    let limiter = Limiter::new(blk.limit.rates());
    let lacks_stores = context.is_none().then(|| Box::new(blk.clone()));
    let (config, stores) = match context {
        Some(context) => disk_config(name, blk, context, &limiter)?,
        None => (BlkConfig { force_layers: true, ..config_without_layers(name, blk, &limiter) }, Vec::new()),
    };
    let disk = blk::Blk::prepare(BlkConfig { path: image.to_owned(), ..config })?;
    Ok(UnlockedDisk { disk, image: image.to_owned(), limiter, stores, lacks_stores })
}

/// The configuration of a disk without its path, and the stores of its layers.
fn disk_config(
    name: &str,
    blk: &Blk,
    context: &OpenContext,
    limiter: &Arc<Limiter>,
) -> Result<(BlkConfig, Vec<Arc<dyn Store>>), anyhow::Error> {
    let (backing, stores) = layers(blk, context)?;
    Ok((BlkConfig { backing, ..config_without_layers(name, blk, limiter) }, stores))
}

/// Backing files of a disk, top first, and those of them that are stores.
type Layers = (Vec<Layer>, Vec<Arc<dyn Store>>);

fn layers(blk: &Blk, context: &OpenContext) -> Result<Layers, anyhow::Error> {
    let mut stores = Vec::new();
    let mut layer = |layer: &Backing| {
        let source = match layer.location.path() {
            Some(path) => LayerSource::Path(path.to_owned()),
            None => {
                let options = OpenOptions { read_only: true, ..store_options(blk, context) };
                let store = paravane_store::open(&layer.location, &options, context.connector.clone())?;
                stores.push(store.clone());
                LayerSource::Store(store)
            }
        };
        Ok::<_, anyhow::Error>(Layer { source, format: layer.format })
    };
    let layers = blk.backing.iter().map(&mut layer).collect::<Result<_, _>>()?;
    Ok((layers, stores))
}

fn config_without_layers(name: &str, blk: &Blk, limiter: &Arc<Limiter>) -> BlkConfig {
    BlkConfig {
        name: Some(name.to_owned()),
        force_layers: blk.force_layers,
        registered_buffers: blk.registered_buffers,
        queues: blk.queues,
        queue_size: blk.queue_size,
        engine: blk.engine,
        serial: blk.serial.clone(),
        limiter: Some(limiter.clone()),
        on_full: blk.on_full,
        ..image_config(blk, Path::new(""))
    }
}

/// The part of a disk's configuration that its image alone is checked against.
pub(super) fn image_config(blk: &Blk, image: &Path) -> BlkConfig {
    BlkConfig {
        format: blk.format,
        read_only: blk.read_only,
        lock: !blk.no_lock,
        direct: blk.direct,
        block_size: blk.block_size,
        ..BlkConfig::new(image)
    }
}
