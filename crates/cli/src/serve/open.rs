//! Opens devices by their specifications.
use super::args::{Backing, Format, OnFull};
use super::sandbox::paths::AllowedPaths;
use super::spec::{Blk, DeviceSpec, Kind, Net, Network};
use super::take_over::{Offered, OfferedImage};
use super::told::Told;
use crate::engine::Engine;
use anyhow::{Context, anyhow};
use paravane_device::blk::{
    self, BlkConfig, EngineChoice, FileId, Full, Geometry, Layer, LayerSource, OpenError, Resizer, Snapshots,
    StorageErrors, UnlockedBlk,
};
use paravane_device::net::{self, BackEnd, Counters, Generator, Limited, LinkEnd, LinkHold, Tap};
use paravane_device::rng::Rng;
use paravane_device::{Device, Limiter, LogDevice};
use paravane_store::{CacheFolder, Connector, Direct, Location, NamedFiles, OpenOptions, Store};
use paravane_vhost::{Endpoint, ExportConfig};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A device ready to be served.
pub(crate) struct Opened {
    pub(crate) device: Box<dyn Device>,
    /// Its counters.
    pub(crate) figures: Figures,
    /// Detects changes of a disk's size.
    pub(crate) resizer: Option<Resizer>,
    /// Takes snapshots of a disk.
    pub(crate) snapshots: Option<Arc<Snapshots>>,
    /// Description of the back end, for `paravane status`.
    pub(crate) back_end: String,
    /// Makes frames for this card wait until both cards of its link are served.
    pub(crate) hold: Option<LinkHold>,
}

/// A device, or a disk that waits for its image.
pub(crate) enum Opening {
    Device(Opened),
    Unlocked(Box<UnlockedDisk>),
    /// Its store is open, which the daemon that serves it still has, too.
    Ahead(Box<ConnectedDisk>),
    /// Can be opened only when the daemon that serves it has closed it.
    ///
    /// With what its guest would be told of a disk on a block device.
    Late(Option<Geometry>),
}

/// What an earlier daemon had of a device.
#[derive(Debug, Default)]
pub(crate) struct Earlier {
    /// Descriptors of the device.
    pub(crate) fds: Vec<OwnedFd>,
    /// Block of the disk in bytes, which its guest was told.
    pub(crate) block: Option<u32>,
}

/// A disk whose image is open and not locked: a dead process has requests in flight for it.
pub(crate) struct UnlockedDisk {
    disk: UnlockedBlk,
    image: PathBuf,
    limiter: Arc<Limiter>,
    stores: Vec<Arc<dyn Store>>,
    /// The stores of its layers are still to be opened.
    lacks_stores: bool,
}

/// A disk whose stores are open.
pub(crate) struct ConnectedDisk {
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

    /// What its guest would be told.
    fn geometry(&self) -> Result<Geometry, OpenError> {
        self.config.geometry_of_store(&self.store)
    }

    /// The disk. Reads and writes its store if a format needs that.
    ///
    /// # Errors
    /// The image cannot be used.
    pub(crate) fn open(self) -> Result<Opened, anyhow::Error> {
        let Self { image, store, config, layers, limiter } = self;
        let device = blk::Blk::over(store.clone(), config)?;
        Ok(opened(device, &image, limiter, [vec![store], layers].concat()))
    }
}

impl From<Opened> for Opening {
    fn from(opened: Opened) -> Self {
        Self::Device(opened)
    }
}

impl Opening {
    /// Takes the hold of a card on a link.
    pub(crate) fn hold(&mut self) -> Option<LinkHold> {
        match self {
            Self::Device(opened) => opened.hold.take(),
            _ => None,
        }
    }

    /// What another daemon must offer for this device.
    pub(crate) fn wanted(&self, spec: &DeviceSpec) -> Offered {
        let image = || spec.images().first().and_then(|image| FileId::at(image).ok());
        let file = match (self, &spec.kind) {
            (Self::Unlocked(disk), _) => disk.file_id(),
            (Self::Device(Opened { snapshots: Some(snapshots), .. }), _) => snapshots.image_id().file,
            (_, Kind::Blk(blk)) if blk.image.path().is_some() => image(),
            _ => None,
        };
        Offered::new(spec, file, Told::default())
    }

    /// Checks that a guest goes on with the image that it used last, if no mark shows that.
    ///
    /// An overlay that is gone was merged.
    ///
    /// # Errors
    /// It is another one.
    pub(crate) fn check_image(&self, spec: &DeviceSpec, last: &OfferedImage) -> Result<(), anyhow::Error> {
        let has_marks = match self {
            Self::Unlocked(disk) => disk.disk.has_marks(),
            Self::Device(Opened { snapshots: Some(snapshots), .. }) => snapshots.has_marks(),
            _ => true,
        };
        match self.wanted(spec).image {
            Some(now) if !has_marks && !last.goes_on_with(&now) && last.is_there() => Err(anyhow!(
                "its guest used {} last, and this is {}: after a snapshot, name the overlay and its layers, as `paravane \
                 disk snapshot` has printed them",
                last.location,
                now.location
            )),
            _ => Ok(()),
        }
    }

    /// The device.
    ///
    /// # Errors
    /// It waits for its image.
    pub(crate) fn opened(self) -> Result<Opened, anyhow::Error> {
        match self {
            Self::Device(opened) => Ok(opened),
            Self::Unlocked(disk) => Err(OpenError::RequestsInFlight { path: disk.image }.into()),
            Self::Ahead(disk) => disk.open(),
            Self::Late(_) => Err(anyhow!("internal error: the device is not open")),
        }
    }

    /// Names the block of a disk that is not locked yet, unless its specification does.
    pub(crate) fn keep_block(&mut self, block: u32) {
        match self {
            Self::Unlocked(disk) => disk.disk.keep_block(block),
            Self::Ahead(disk) => disk.config.block_size = disk.config.block_size.or(Some(block)),
            Self::Device(_) | Self::Late(_) => {}
        }
    }

    /// What the guest of a disk would be told. `None`: it is no disk, or that is not known yet.
    ///
    /// # Errors
    /// The image cannot be such a disk.
    pub(crate) fn geometry(&self) -> Result<Option<Geometry>, OpenError> {
        Ok(match self {
            Self::Device(opened) => opened.resizer.as_ref().map(Resizer::geometry),
            Self::Unlocked(disk) => Some(disk.disk.geometry()?),
            Self::Ahead(disk) => Some(disk.geometry()?),
            Self::Late(geometry) => *geometry,
        })
    }

    /// Checks that the guest would be told of its device what it was told `before`.
    ///
    /// A disk keeps the block size of its guest, unless its specification names another one. `is_kept`: the
    /// daemon has a descriptor store.
    ///
    /// # Errors
    /// The device differs, or its image cannot be used.
    pub(crate) fn check_told(
        &mut self,
        spec: &DeviceSpec,
        before: &Told,
        is_kept: bool,
    ) -> Result<(), anyhow::Error> {
        if let Some(block) = before.block() {
            self.keep_block(block);
        }
        let mut new = Told::planned(spec, self.geometry()?, is_kept);
        if let (Self::Late(_), Kind::Blk(blk)) = (&*self, &spec.kind)
            && blk.block_size.is_none()
        {
            // It is opened when the other daemon has closed it, and keeps its block then.
            new = new.without_block();
        }
        before.difference(&new).map_or(Ok(()), |difference| Err(anyhow!(difference)))
    }
}

impl UnlockedDisk {
    /// Opens the stores of its layers, if that is still to be done.
    ///
    /// # Errors
    /// A server does not answer, or has no such image.
    pub(crate) fn connect(&mut self, spec: &DeviceSpec, context: &OpenContext) -> Result<(), anyhow::Error> {
        if let (true, Kind::Blk(blk)) = (self.lacks_stores, &spec.kind) {
            let (backing, stores) = layers(blk, context)?;
            self.disk.set_backing(backing, blk.force_layers);
            (self.stores, self.lacks_stores) = (stores, false);
        }
        Ok(())
    }

    fn file_id(&self) -> Option<FileId> {
        self.disk.file_id()
    }

    /// Locks the image, unless the requests are still in flight.
    ///
    /// # Errors
    /// The image cannot be locked, or not be used.
    pub(crate) fn lock(self) -> Result<Opening, anyhow::Error> {
        let Self { disk, image, limiter, stores, lacks_stores } = self;
        let device = match disk.lock()? {
            Ok(device) => device,
            Err(disk) => {
                return Ok(Opening::Unlocked(Box::new(Self { disk, image, limiter, stores, lacks_stores })));
            }
        };
        Ok(opened(device, &image.display().to_string(), limiter, stores).into())
    }
}

/// Counters of a device besides those of its export.
#[derive(Default)]
pub(crate) struct Figures {
    /// Network cards.
    pub(crate) net: Option<Arc<Counters>>,
    /// Disks.
    pub(crate) storage: Option<Arc<StorageErrors>>,
    /// Disks: writes that wait for room.
    pub(crate) full: Option<Arc<Full>>,
    /// Rate limiters.
    pub(crate) limiters: Vec<Arc<Limiter>>,
    /// Stores of a disk that are no files, top first.
    pub(crate) stores: Vec<Arc<dyn Store>>,
}

/// What devices are opened with.
#[derive(Clone, Debug)]
pub(crate) struct OpenContext {
    /// `None`: no sandbox.
    pub(crate) allowed: Option<Arc<AllowedPaths>>,
    /// Connects to the servers of images.
    pub(crate) connector: Arc<dyn Connector>,
    /// Keeps chunks of objects.
    pub(crate) cache: Option<CacheFolder>,
    /// Files that locations name, read before the sandbox closed.
    pub(crate) files: NamedFiles,
}

impl Default for OpenContext {
    fn default() -> Self {
        Self { allowed: None, connector: Arc::new(Direct), cache: None, files: NamedFiles::default() }
    }
}

/// Unclaimed ends of links whose other end is in use, by link name.
#[derive(Debug, Default)]
pub(crate) struct LinkEnds(HashMap<String, LinkEnd>);

/// Opens a device.
///
/// The two cards of a link are opened one after the other, with the same `link_ends`.
///
/// # Errors
/// The device cannot be opened.
pub(crate) fn open(
    spec: &DeviceSpec,
    link_ends: &mut LinkEnds,
    context: &OpenContext,
    earlier: Earlier,
) -> Result<Opening, anyhow::Error> {
    let Earlier { fds: kept, block } = earlier;
    // Inherited by the threads that the device starts.
    let _named = LogDevice::enter(Some(spec.name.as_str().into()));
    match &spec.kind {
        Kind::Blk(blk) => disk(&spec.name, blk, context, block),
        Kind::Net(net) => match &net.network {
            Network::Tap(name) => {
                let resumed = (kept.len() == usize::from(net.queues)).then(|| Tap::resume(name, kept));
                let tap = match resumed {
                    Some(Ok(tap)) => tap,
                    Some(Err(error)) => {
                        tracing::warn!("TAP device opened anew, and frames in its queues are lost: {error}");
                        Tap::open(name, net.queues)?
                    }
                    None => Tap::open(name, net.queues)?,
                };
                card(net, tap, format!("tap {name}"))
            }
            Network::Link(name) => {
                let end = match link_ends.0.remove(name) {
                    Some(end) => end,
                    None => {
                        let (near, far) = LinkEnd::pair(net.queues).context("cannot create a link")?;
                        link_ends.0.insert(name.clone(), far);
                        near
                    }
                };
                let hold = end.hold();
                let mut opening = card(net, end, format!("link {name}"))?;
                if let Opening::Device(opened) = &mut opening {
                    opened.hold = Some(hold);
                }
                Ok(opening)
            }
            Network::Echo => {
                card(net, LinkEnd::echo(net.queues).context("cannot create an echo")?, "echo".to_owned())
            }
            Network::Sink => card(net, Generator::new(net.queues, 0, 64)?, "sink".to_owned()),
            Network::Source(len) => card(
                net,
                Generator::new(net.queues, u64::MAX, *len as usize)?,
                format!("source of {len} bytes"),
            ),
        },
        Kind::Rng => Ok(Opened {
            device: Box::new(Rng::new()),
            figures: Figures::default(),
            resizer: None,
            snapshots: None,
            back_end: "getrandom".to_owned(),
            hold: None,
        }
        .into()),
    }
}

/// Opens what can be open in two daemons at once: images without their locks, and some stores.
///
/// `None`: a device that holds nothing which another daemon could.
///
/// # Errors
/// The image cannot be opened.
pub(crate) fn prepare(spec: &DeviceSpec, context: &OpenContext) -> Result<Option<Opening>, anyhow::Error> {
    let _named = LogDevice::enter(Some(spec.name.as_str().into()));
    let is_block_device = |path: &Path| {
        let is = |file: std::fs::Metadata| FileTypeExt::is_block_device(&file.file_type());
        std::fs::metadata(path).is_ok_and(is)
    };
    Ok(match &spec.kind {
        // Claimed by the daemon that serves it.
        Kind::Blk(blk) => Some(match blk.image.path() {
            Some(image) if !is_block_device(image) => {
                Opening::Unlocked(Box::new(unlocked(&spec.name, blk, context, image)?))
            }
            Some(image) => Opening::Late(Some(image_config(blk, image).geometry_of_device()?)),
            None => ahead(&spec.name, blk, context)?,
        }),
        Kind::Net(Net { network: Network::Tap(_), .. }) => Some(Opening::Late(None)),
        Kind::Net(_) | Kind::Rng => None,
    })
}

/// The export of a device, by its specification.
pub(crate) fn export_config(spec: &DeviceSpec, endpoint: Endpoint) -> ExportConfig {
    let mut config = ExportConfig::new(spec.name.clone(), endpoint);
    config.workers = spec.workers.unwrap_or(1).into();
    config.longest_poll = spec.longest_poll;
    config.latencies = spec.latencies;
    config.packed = spec.packed;
    config.in_order = matches!(spec.kind, Kind::Net(_));
    config
}

fn disk(name: &str, blk: &Blk, context: &OpenContext, block: Option<u32>) -> Result<Opening, anyhow::Error> {
    if let Some(image) = blk.image.path() {
        let mut disk = unlocked(name, blk, context, image)?;
        if let Some(block) = block {
            disk.disk.keep_block(block);
        }
        return disk.lock();
    }
    let store = paravane_store::open(&blk.image, &image_options(blk, context), context.connector.clone())?;
    let mut disk = ConnectedDisk::new(name, blk, context, store)?;
    disk.config.block_size = disk.config.block_size.or(block);
    Ok(disk.open()?.into())
}

/// Opens the store of a disk ahead, if that can be.
fn ahead(name: &str, blk: &Blk, context: &OpenContext) -> Result<Opening, anyhow::Error> {
    match paravane_store::open_ahead(&blk.image, &image_options(blk, context), context.connector.clone()) {
        Ok(Some(store)) => Ok(Opening::Ahead(Box::new(ConnectedDisk::new(name, blk, context, store)?))),
        Ok(None) => Ok(Opening::Late(None)),
        Err(error) => {
            // A server that has one client at a time lets this one wait.
            tracing::info!("opened when the running daemon has closed it: {error}");
            Ok(Opening::Late(None))
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
    let resizer = Some(device.resizer());
    let (storage, limiters) = (Some(device.errors()), vec![limiter]);
    let snapshots = Some(Arc::new(device.snapshots()));
    let full = Some(device.full());
    let figures = Figures { storage, full, limiters, stores, ..Figures::default() };
    Opened { device: Box::new(device), figures, resizer, snapshots, back_end, hold: None }
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
    Ok(UnlockedDisk { disk, image: image.to_owned(), limiter, stores, lacks_stores: false })
}

/// Opens what needs no server, for a device that others must not wait for.
///
/// `None`: all of the device is to be opened now. `changes_user`: the process becomes another user later.
///
/// # Errors
/// A file cannot be opened.
pub(crate) fn without_servers(
    spec: &DeviceSpec,
    changes_user: bool,
) -> Result<Option<Opening>, anyhow::Error> {
    let _named = LogDevice::enter(Some(spec.name.as_str().into()));
    let Kind::Blk(blk) = &spec.kind else { return Ok(None) };
    let remote = spec.locations().into_iter().filter(|location| location.path().is_none()).count();
    Ok(match blk.image.path() {
        _ if remote == 0 => None,
        Some(image) => {
            let limiter = Limiter::new(blk.limit);
            // They are compared when they are there.
            let config = config_without_layers(&spec.name, blk, &limiter);
            let config = BlkConfig { force_layers: true, ..config };
            let disk = blk::Blk::prepare(BlkConfig { path: image.to_owned(), ..config })?;
            let (image, stores) = (image.to_owned(), Vec::new());
            Some(Opening::Unlocked(Box::new(UnlockedDisk {
                disk,
                image,
                limiter,
                stores,
                lacks_stores: true,
            })))
        }
        // The keyring may be readable by this user only, and so a backing file.
        None if changes_user
            && (remote < spec.locations().len() || matches!(blk.image, Location::Rbd(_))) =>
        {
            None
        }
        None => Some(Opening::Late(None)),
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
        Ok::<_, anyhow::Error>(Layer { source, format: format(layer.format) })
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
        engine: match blk.engine {
            Engine::Auto => EngineChoice::Auto,
            Engine::IoUring => EngineChoice::IoUring,
            Engine::Threads => EngineChoice::Threads,
            Engine::Immediate => EngineChoice::Immediate,
        },
        serial: blk.serial.clone(),
        limiter: Some(limiter.clone()),
        on_full: on_full(blk.on_full),
        ..image_config(blk, Path::new(""))
    }
}

/// The part of a disk's configuration that its image alone is checked against.
fn image_config(blk: &Blk, image: &Path) -> BlkConfig {
    BlkConfig {
        format: format(blk.format),
        read_only: blk.read_only,
        lock: blk.lock,
        direct: blk.direct,
        block_size: blk.block_size,
        ..BlkConfig::new(image)
    }
}

fn format(format: Format) -> blk::Format {
    match format {
        Format::Raw => blk::Format::Raw,
        Format::Qcow2 => blk::Format::Qcow2,
    }
}

/// What a disk does with a write without room.
pub(crate) fn on_full(on_full: OnFull) -> blk::OnFull {
    match on_full {
        OnFull::Wait => blk::OnFull::Wait,
        OnFull::Error => blk::OnFull::Error,
    }
}

fn card<B: BackEnd>(net: &Net, end: B, back_end: String) -> Result<Opening, anyhow::Error> {
    // Without limits they hold nothing, and a reload can set some.
    let (transmit, receive) = (Limiter::new(net.limit), Limiter::new(net.limit));
    let limiters = vec![transmit.clone(), receive.clone()];
    let end = Limited::new(end, transmit, receive);
    let config = net::NetConfig {
        mtu: net.mtu,
        offloads: net.offloads,
        queue_size: net.queue_size,
        announce: true,
        ..net::NetConfig::new(net.mac)
    };
    let card = net::Net::new(config, end)?;
    let figures = Figures { net: Some(card.counters()), limiters, ..Figures::default() };
    Ok(Opened { device: Box::new(card), figures, resizer: None, snapshots: None, back_end, hold: None }
        .into())
}
