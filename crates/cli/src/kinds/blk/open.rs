//! Opens disks.
use super::observer::DiskObserver;
use super::spec::Blk;
use super::told;
use crate::images::Backing;
use crate::kinds::opening::{Ahead, OpenContext, Opened, Opening, Unlocked};
use crate::serve::told::Told;
use paravane_device::Limiter;
use paravane_device::blk::{self, BlkConfig, FileId, Layer, LayerSource, OpenReason, UnlockedBlk};
use paravane_store::{Location, OpenOptions, Store};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A disk whose image is open and not locked: a dead process has requests in flight for it.
struct UnlockedDisk {
    disk: UnlockedBlk,
    image: PathBuf,
    limiter: Arc<Limiter>,
    stores: Vec<Arc<dyn Store>>,
    /// The stores of its layers are still to be opened.
    lacks_stores: Option<Box<Blk>>,
}

/// A disk whose stores are open.
struct ConnectedDisk {
    image: String,
    store: Arc<dyn Store>,
    config: BlkConfig,
    layers: Vec<Arc<dyn Store>>,
    limiter: Arc<Limiter>,
}

impl ConnectedDisk {
    fn new(
        name: &str,
        blk: &Blk,
        context: &OpenContext,
        store: Arc<dyn Store>,
    ) -> Result<Self, anyhow::Error> {
        let limiter = Limiter::new(blk.limit);
        let (config, layers) = disk_config(name, blk, context, &limiter)?;
        Ok(Self { image: blk.image.to_string(), store, config, layers, limiter })
    }
}

impl Ahead for ConnectedDisk {
    fn open(self: Box<Self>) -> Result<Opened, anyhow::Error> {
        let Self { image, store, config, layers, limiter } = *self;
        let device = blk::Blk::over(store.clone(), config)?;
        Ok(opened(device, &image, limiter, [vec![store], layers].concat()))
    }

    fn keep(&mut self, told: &Told) {
        self.config.block_size = self.config.block_size.or(told::block(told));
    }

    fn told(&self, told: &mut Told) -> Result<(), anyhow::Error> {
        told::geometry(self.config.geometry_of_store(&self.store)?, told);
        Ok(())
    }
}

impl Unlocked for UnlockedDisk {
    fn connect(&mut self, context: &OpenContext) -> Result<(), anyhow::Error> {
        if let Some(blk) = &self.lacks_stores {
            let (backing, stores) = layers(blk, context)?;
            self.disk.set_backing(backing, blk.force_layers);
            (self.stores, self.lacks_stores) = (stores, None);
        }
        Ok(())
    }

    fn lock(self: Box<Self>) -> Result<Opening, anyhow::Error> {
        let Self { disk, image, limiter, stores, lacks_stores } = *self;
        let device = match disk.lock()? {
            Ok(device) => device,
            Err(disk) => {
                return Ok(Opening::Unlocked(Box::new(Self { disk, image, limiter, stores, lacks_stores })));
            }
        };
        Ok(opened(device, &image.display().to_string(), limiter, stores).into())
    }

    fn in_flight(&self) -> anyhow::Error {
        OpenReason::RequestsInFlight.at(&self.image).into()
    }

    fn file_id(&self) -> Option<FileId> {
        self.disk.file_id()
    }

    fn has_marks(&self) -> bool {
        self.disk.has_marks()
    }

    fn keep(&mut self, told: &Told) {
        if let Some(block) = told::block(told) {
            self.disk.keep_block(block);
        }
    }

    fn told(&self, told: &mut Told) -> Result<(), anyhow::Error> {
        told::geometry(self.disk.geometry()?, told);
        Ok(())
    }
}

/// Opens a disk, which keeps this block in bytes unless its specification names one.
///
/// # Errors
/// The image cannot be opened.
pub(super) fn disk(
    name: &str,
    blk: &Blk,
    context: &OpenContext,
    block: Option<u32>,
) -> Result<Opening, anyhow::Error> {
    if let Some(image) = blk.image.path() {
        let mut disk = unlocked(name, blk, context, image)?;
        if let Some(block) = block {
            disk.disk.keep_block(block);
        }
        return Box::new(disk).lock();
    }
    let store = paravane_store::open(&blk.image, &image_options(blk, context), context.connector.clone())?;
    let mut disk = ConnectedDisk::new(name, blk, context, store)?;
    disk.config.block_size = disk.config.block_size.or(block);
    Ok(Box::new(disk).open()?.into())
}

/// Opens the store of a disk ahead, if that can be.
fn ahead(name: &str, blk: &Blk, context: &OpenContext) -> Result<Opening, anyhow::Error> {
    match paravane_store::open_ahead(&blk.image, &image_options(blk, context), context.connector.clone()) {
        Ok(Some(store)) => Ok(Opening::Ahead(Box::new(ConnectedDisk::new(name, blk, context, store)?))),
        Ok(None) => Ok(Opening::Late(Told::default())),
        Err(error) => {
            // A server that has one client at a time lets this one wait.
            tracing::info!("opened when the running daemon has closed it: {error}");
            Ok(Opening::Late(Told::default()))
        }
    }
}

/// How the store of a disk's image is opened.
fn image_options(blk: &Blk, context: &OpenContext) -> OpenOptions {
    OpenOptions { read_only: blk.read_only, lock: blk.lock, ..store_options(blk, context) }
}

/// How the stores of a disk are opened.
fn store_options(blk: &Blk, context: &OpenContext) -> OpenOptions {
    OpenOptions {
        connections: blk.queues,
        timeout: blk.store_timeout,
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

/// Opens what can be open in two daemons at once.
///
/// # Errors
/// The image cannot be opened.
pub(super) fn prepare(name: &str, blk: &Blk, context: &OpenContext) -> Result<Opening, anyhow::Error> {
    let is_block_device = |path: &Path| {
        let is = |file: std::fs::Metadata| FileTypeExt::is_block_device(&file.file_type());
        std::fs::metadata(path).is_ok_and(is)
    };
    match blk.image.path() {
        Some(image) if !is_block_device(image) => {
            Ok(Opening::Unlocked(Box::new(unlocked(name, blk, context, image)?)))
        }
        // Claimed by the daemon that serves it.
        Some(image) => {
            let mut known = Told::default();
            told::geometry(image_config(blk, image).geometry_of_device()?, &mut known);
            if blk.block_size.is_none() {
                // It is opened when the other daemon has closed it, and keeps its block then.
                known.remove(told::BLOCK);
            }
            Ok(Opening::Late(known))
        }
        None => ahead(name, blk, context),
    }
}

fn unlocked(
    name: &str,
    blk: &Blk,
    context: &OpenContext,
    image: &Path,
) -> Result<UnlockedDisk, anyhow::Error> {
    let limiter = Limiter::new(blk.limit);
    let (config, stores) = disk_config(name, blk, context, &limiter)?;
    let disk = blk::Blk::prepare(BlkConfig { path: image.to_owned(), ..config })?;
    Ok(UnlockedDisk { disk, image: image.to_owned(), limiter, stores, lacks_stores: None })
}

/// Opens what needs no server, for a disk that others must not wait for.
///
/// # Errors
/// A file cannot be opened.
pub(super) fn without_servers(
    name: &str,
    blk: &Blk,
    changes_user: bool,
) -> Result<Option<Opening>, anyhow::Error> {
    let locations = blk.layers();
    let remote = locations.iter().filter(|location| location.path().is_none()).count();
    Ok(match blk.image.path() {
        _ if remote == 0 => None,
        Some(image) => {
            let limiter = Limiter::new(blk.limit);
            // They are compared when they are there.
            let config = config_without_layers(name, blk, &limiter);
            let config = BlkConfig { force_layers: true, ..config };
            let disk = blk::Blk::prepare(BlkConfig { path: image.to_owned(), ..config })?;
            let (image, stores) = (image.to_owned(), Vec::new());
            Some(Opening::Unlocked(Box::new(UnlockedDisk {
                disk,
                image,
                limiter,
                stores,
                lacks_stores: Some(Box::new(blk.clone())),
            })))
        }
        // The keyring may be readable by this user only, and so a backing file.
        None if changes_user && (remote < locations.len() || matches!(blk.image, Location::Rbd(_))) => None,
        None => Some(Opening::Late(Told::default())),
    })
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
fn image_config(blk: &Blk, image: &Path) -> BlkConfig {
    BlkConfig {
        format: blk.format,
        read_only: blk.read_only,
        lock: blk.lock,
        direct: blk.direct,
        block_size: blk.block_size,
        ..BlkConfig::new(image)
    }
}
