//! One served device.
use super::super::open;
use super::super::process::IoThread;
use super::super::report;
use super::super::slow::SlowLog;
use super::super::snapshot::messages::NextStart;
use super::super::sockets::{Inherited, Sockets};
use super::super::spec::{DeviceSpec, told_recorded};
use super::super::take_over::Offered;
use super::super::told::Told;
use super::super::trace::RequestTrace;
use super::context::ExportContext;
use crate::kinds::Kind;
use crate::kinds::endpoint::Endpoint;
use crate::kinds::observe::Observe;
use crate::kinds::opening::Opened;
use anyhow::{Context, anyhow};
use paravane_device::blk::{FileId, Snapshot, Snapshots};
use paravane_dma::MappingQuota;
use paravane_export::{Exchanged, Export, ExportStatus, Handover, Kept, Noter};
use paravane_notify::Notifier;
use paravane_store::Location;
use paravane_vhost::KnownToDriver;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Stack of a thread that asks servers: name resolution and TLS need the most.
const STACK: usize = 1 << 20;

/// No thread asks servers.
const IDLE: u8 = 0;
/// A thread has to ask, once more if it does already.
const ASK_AGAIN: u8 = 1;
/// A thread asks.
const ASKING: u8 = 2;

/// A device that is served or stopping.
pub(super) struct ServedDevice {
    pub(super) spec: DeviceSpec,
    pub(super) export: Export,
    /// Shows and changes what its kind has.
    observer: Box<dyn Observe>,
    /// Snapshots that were taken.
    taken: SnapshotFigures,
    back_end: String,
    /// Threads of its own.
    threads: Vec<IoThread>,
    /// Of a disk whose latencies are measured.
    trace: Option<Arc<RequestTrace>>,
    /// Whether a thread asks its servers for the size of the image: [`IDLE`], [`ASK_AGAIN`], [`ASKING`].
    asks_stores: Arc<AtomicU8>,
    /// When it began to stop.
    stopping: Option<Instant>,
    /// It stops for a successor, which has not got its state yet.
    pub(super) handing_over: bool,
}

/// Snapshots of a device.
#[derive(Default)]
struct SnapshotFigures {
    count: u64,
    last: Option<report::Snapshot>,
    /// Frozen images, by their canonical paths, and the overlay of each.
    frozen: Vec<(Location, PathBuf)>,
}

/// The session that a device resumes.
pub(crate) enum Session {
    /// A running daemon has handed it over.
    Handed(Handover),
    /// A device of this daemon has handed it over.
    Exchanged(Exchanged),
    /// A daemon that has ended had it kept.
    Kept(Box<Kept>),
}

impl Session {
    /// What the guest of a device of this kind was told; nothing if that is not known.
    pub(super) fn told(&self, kind: &Kind) -> Told {
        let known = match self {
            Self::Handed(session) => KnownToDriver::recorded(session),
            Self::Exchanged(session) => KnownToDriver::recorded(session.handover()),
            Self::Kept(kept) => KnownToDriver::recorded(kept.handover()),
        };
        // A record that cannot be read is refused when it is resumed.
        known.ok().flatten().map_or_else(Told::default, |known| told_recorded(kind, &known))
    }

    /// Copies of the descriptors of the device that are kept for it.
    pub(super) fn device_fds(&self) -> io::Result<Vec<OwnedFd>> {
        match self {
            Self::Handed(_) => Ok(Vec::new()),
            Self::Exchanged(session) => session.device_fds(),
            Self::Kept(kept) => kept.device_fds(),
        }
    }
}

/// What becomes of the sessions of devices that stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sessions {
    End,
    /// The next daemon resumes those that are kept.
    Stay,
}

/// The trace of a disk whose latencies are measured.
fn request_trace(spec: &DeviceSpec, export: &Export) -> Option<Arc<RequestTrace>> {
    (spec.kind.disk().is_some() && spec.latencies)
        .then(|| RequestTrace::new(export.queue_latencies(), slow_log(spec)))
}

/// The slow-request log of a disk, if it has one.
fn slow_log(spec: &DeviceSpec) -> Option<SlowLog> {
    spec.kind.disk()?.slow.map(|threshold| SlowLog::new(&spec.name, *threshold))
}

/// Where an export of the device listens or connects.
///
/// # Errors
/// The parent process has passed no such socket.
fn endpoint(
    spec: &DeviceSpec,
    sockets: &Sockets,
    has_session: bool,
) -> Result<paravane_export::Endpoint, anyhow::Error> {
    use paravane_export::Endpoint as Of;
    Ok(match &spec.endpoint {
        Endpoint::Listen(path) => Of::Listen(path.clone()),
        Endpoint::Connect(path) => Of::Connect(path.clone()),
        Endpoint::Activated | Endpoint::Inherited(_) if has_session => Of::Handover,
        Endpoint::Activated => {
            let listener = sockets
                .activated(&spec.name)
                .context("systemd passed no socket of this name: check FileDescriptorName=")?;
            Of::Listener(listener.try_clone()?)
        }
        Endpoint::Inherited(_) => match sockets.inherited() {
            Some(Inherited::Listener(listener)) => Of::Listener(listener),
            Some(Inherited::Connection(stream)) => Of::Connection(stream),
            None => return Err(anyhow!("the socket of --fd is in use: restart the daemon")),
        },
    })
}

/// Numbers of the file of a disk's image.
fn image_file(observer: &dyn Observe) -> Option<FileId> {
    observer.snapshots()?.image_id().file
}

/// The note of the image that a guest uses; empty for other devices than disks.
fn note(spec: &DeviceSpec, file: Option<FileId>) -> Vec<u8> {
    Offered::new(spec, file, Told::default()).image.map_or_else(Vec::new, |image| image.to_note())
}

impl ServedDevice {
    /// Serves an opened device. Signals `ended` when the device has ended.
    ///
    /// `session`: of the daemon that served it before.
    /// `context`: with its sockets and the descriptor store.
    pub(super) fn start(
        spec: DeviceSpec,
        opened: Opened,
        quota: MappingQuota,
        context: &ExportContext,
        ended: &Arc<Notifier>,
        session: Option<Session>,
    ) -> Result<Self, anyhow::Error> {
        let Opened { device, observer, back_end, hold: _ } = opened;
        let ExportContext { sockets, shelf, threads: shared, inspector, .. } = context;
        let name = spec.name.clone();
        let shares = spec.workers.is_none() && !device.may_block();
        let note = note(&spec, image_file(&*observer));
        let started = || {
            let endpoint = endpoint(&spec, sockets, session.is_some())?;
            let mut config = open::export_config(&spec, endpoint);
            shared.share(&spec, &mut config);
            config.quota = quota;
            config.ended = Some(Arc::clone(ended));
            config.inspector = inspector.as_ref().map(|inspector| inspector.device());
            config.keeper = shelf.as_ref().map(|shelf| shelf.keeper(&name));
            config.note = note;
            Ok::<_, anyhow::Error>(match session {
                Some(Session::Handed(session)) => Export::resume(config, device, session)?,
                Some(Session::Exchanged(session)) => Export::exchange(config, device, session)?,
                Some(Session::Kept(kept)) => Export::recover(config, device, *kept)?,
                None => Export::start(config, device)?,
            })
        };
        let export = started().with_context(|| format!("device {name}"))?;
        tracing::info!(
            device = name,
            kind = spec.kind.name(),
            endpoint = %spec.endpoint,
            back_end,
            "serving device"
        );
        let own = if shares { Vec::new() } else { export.status().threads };
        let open = |(index, number)| IoThread::open(index, number);
        let threads = own.into_iter().enumerate().map(open).collect();
        let trace = request_trace(&spec, &export);
        Ok(Self {
            spec,
            export,
            observer,
            taken: SnapshotFigures::default(),
            back_end,
            threads,
            trace,
            asks_stores: Arc::default(),
            stopping: None,
            handing_over: false,
        })
    }

    /// Applies what `wanted` changes in place ([`Effect::InPlace`]); requests go on meanwhile.
    ///
    /// [`Effect::InPlace`]: crate::kinds::changes::Effect::InPlace
    pub(super) fn change(&mut self, wanted: &DeviceSpec) {
        let DeviceSpec { longest_poll, latencies, .. } = *wanted;
        (self.spec.longest_poll, self.spec.latencies) = (longest_poll, latencies);
        if let Some(kind) = self.spec.kind.with_settings(&*wanted.kind) {
            self.spec.kind = kind;
        }
        self.spec.kind.apply(&*self.observer);
        self.export.poll_for(longest_poll);
        self.export.measure(latencies);
        self.export.renew();
        match &self.trace {
            // It stays for the next time that latencies are measured.
            Some(trace) => trace.log_slow(slow_log(&self.spec).filter(|_| latencies)),
            None => self.trace = request_trace(&self.spec, &self.export),
        }
    }

    /// Begins to hand the device over to another daemon; returns at once.
    pub(super) fn begin_hand_over(&mut self) {
        self.begin_release(true);
        self.export.begin_hand_over();
    }

    /// Begins to hand the device over to its successor in this daemon; returns at once.
    pub(super) fn begin_exchange(&mut self) {
        self.begin_release(true);
        self.export.begin_exchange();
    }

    /// Gives up what a successor needs, but for the export.
    fn begin_release(&mut self, hands_over: bool) {
        (self.stopping, self.handing_over) = (Some(Instant::now()), hands_over);
        self.observer.release();
        if let Some(trace) = &self.trace {
            trace.end();
        }
    }

    /// The state for the other daemon, once; `None`: the device is not drained yet.
    pub(super) fn take_handover(&mut self) -> Option<Result<Handover, String>> {
        let handover = self.export.take_handover()?;
        self.handing_over = false;
        Some(handover.map_err(|error| error.to_string()))
    }

    /// The state for its successor in this daemon, once; `None`: the device is not drained yet.
    pub(super) fn take_exchange(&mut self) -> Option<Result<Exchanged, String>> {
        let exchanged = self.export.take_exchange()?;
        self.handing_over = false;
        Some(exchanged.map_err(|error| error.to_string()))
    }

    /// Begins to stop; returns at once.
    pub(super) fn begin_stop(&mut self, sessions: Sessions) {
        tracing::info!(device = self.spec.name, "stopping device");
        self.begin_release(false);
        match sessions {
            Sessions::End => self.export.begin_stop(),
            Sessions::Stay => self.export.begin_leave(),
        }
    }

    /// Stops, and waits for the end.
    pub(super) fn stop(mut self) {
        self.begin_stop(Sessions::End);
        self.export.stop();
    }

    /// After `patience` of stopping, ends requests of several parts early.
    ///
    /// Returns the time until then.
    pub(super) fn expedite(&self, patience: Duration) -> Option<Duration> {
        let rest = patience.saturating_sub(self.stopping?.elapsed());
        if rest.is_zero() {
            self.export.cut_short();
            return None;
        }
        Some(rest)
    }

    /// The trace of its requests.
    ///
    /// # Errors
    /// Its requests are not observed.
    pub(super) fn trace(&self) -> Result<Arc<RequestTrace>, String> {
        let name = &self.spec.name;
        match (&self.trace, &self.spec.kind) {
            (Some(trace), _) if self.spec.latencies => Ok(trace.clone()),
            (_, kind) if kind.disk().is_some() => {
                Err(format!("device {name} measures no latencies: remove --latencies off"))
            }
            (_, kind) => Err(format!("device {name} is of kind {}: only disks are traced", kind.name())),
        }
    }

    /// What its guest has been told; nothing if no VMM has ever been connected.
    fn told(&self) -> Told {
        let status = self.export.status();
        match status.sessions {
            0 => Told::default(),
            _ => self.spec.told_running(&*self.observer, status.features),
        }
    }

    /// Facts of the open device that a guest reads.
    pub(super) fn facts(&self) -> Told {
        let mut told = Told::default();
        self.observer.told(&mut told);
        told
    }

    /// What takes snapshots of it, and how it is started again.
    ///
    /// # Errors
    /// It has no snapshots.
    pub(super) fn snapshots(&self) -> Result<(Arc<Snapshots>, NextStart), String> {
        let name = &self.spec.name;
        let kind = self.spec.kind.name();
        let disk = self
            .spec
            .kind
            .disk()
            .ok_or_else(|| format!("device {name} is of kind {kind}: only disks have snapshots"))?;
        let start =
            NextStart::of(&self.spec, disk, &self.facts()).map_err(|why| format!("device {name}: {why}"))?;
        let snapshots = self.observer.snapshots().ok_or_else(|| format!("device {name} is stopping"))?;
        Ok((Arc::clone(snapshots), start))
    }

    /// What must be the same for another daemon to take it over, and what its guest was told.
    pub(super) fn offered(&self) -> Offered {
        Offered::new(&self.spec, image_file(&*self.observer), self.told())
    }

    /// What changes the note of its image for the next daemon, and the present note.
    pub(super) fn noter(&self) -> (Noter, Vec<u8>) {
        (self.export.noter(), note(&self.spec, image_file(&*self.observer)))
    }

    /// Notes a snapshot: the disk writes to `overlay` now.
    pub(super) fn replaced(&mut self, overlay: &Path, snapshot: &Snapshot) {
        if let Some(image) = self.spec.writable_image() {
            self.taken.frozen.push((image, overlay.to_owned()));
        }
        self.spec = self.spec.on_overlay(overlay, &snapshot.serial, &self.facts());
        self.back_end = format!("{} ({})", overlay.display(), snapshot.engine);
        self.taken.count += 1;
        self.taken.last = Some(report::Snapshot::now(snapshot));
    }

    /// The present overlay over an image that a snapshot has frozen: that of the latest snapshot.
    pub(super) fn overlay_of(&self, image: &Location) -> Option<&Path> {
        let frozen = &self.taken.frozen;
        let (_, latest) = frozen.last()?;
        frozen.iter().any(|(frozen, _)| frozen == image).then_some(latest.as_path())
    }

    /// Tries again what waits for room.
    pub(super) fn retry(&self) {
        self.observer.retry();
    }

    /// Has the device check the host's side again: a disk's size, for instance.
    ///
    /// Servers are asked first, in a thread of its own: they may not answer for seconds.
    pub(super) fn refresh(&self) {
        let refresher = self.export.refresher();
        if self.observer.stores().is_empty() {
            return refresher.refresh();
        }
        // AcqRel: pairs with the thread's, so that it asks after what the caller has seen.
        if self.asks_stores.swap(ASK_AGAIN, Ordering::AcqRel) != IDLE {
            return;
        }
        // A device that stops meanwhile closes its stores.
        let stores: Vec<_> = self.observer.stores().iter().map(Arc::downgrade).collect();
        let (device, asks) = (self.spec.name.clone(), Arc::clone(&self.asks_stores));
        let ask = move || {
            // A request that comes while the servers are asked may know of a size that they did not tell.
            loop {
                asks.swap(ASKING, Ordering::AcqRel);
                for store in stores.iter().filter_map(Weak::upgrade) {
                    if let Err(error) = store.refresh() {
                        let location = store.status().location;
                        tracing::warn!(device, location, %error, "the size of the image is unknown");
                    }
                }
                refresher.refresh();
                if asks.compare_exchange(ASKING, IDLE, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                    return;
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("store-size".into()).stack_size(STACK).spawn(ask)
        {
            tracing::warn!(device = self.spec.name, %error, "cannot ask for the size of the image");
            self.asks_stores.store(IDLE, Ordering::Release);
        }
    }

    /// Whether its TAP device was deleted.
    pub(super) fn has_lost_network(&self) -> bool {
        self.export.status().host_error.is_some()
    }

    /// Whether a client is connected.
    pub(super) fn has_client(&self) -> bool {
        self.export.status().connected
    }

    /// Number of requests in flight.
    pub(super) fn in_flight(&self) -> u64 {
        self.export.status().queues.iter().map(|queue| queue.in_flight).sum()
    }

    /// Logs the requests that the daemon leaves unfinished.
    pub(super) fn log_unfinished(&self) {
        let (device, status) = (&self.spec.name, self.export.status());
        let fate = if status.kept {
            "the next daemon resumes them (--holder)"
        } else if status.tracked {
            "the next daemon resumes them (in-flight tracking)"
        } else {
            "lost to the guest (its VMM does not use in-flight tracking)"
        };
        let mut idle = true;
        for (queue, status) in status.queues.iter().enumerate().filter(|(_, queue)| queue.in_flight > 0) {
            idle = false;
            tracing::error!(device, queue, requests = status.in_flight, "requests unfinished: {fate}");
        }
        if idle {
            tracing::error!(device, "device not stopped: the host does not respond");
        }
    }

    pub(super) fn report(&self) -> report::Device {
        let status: ExportStatus = self.export.status();
        let queue = |(index, queue): (u16, &paravane_export::QueueStatus)| report::Queue {
            index,
            enabled: queue.enabled,
            live: queue.live,
            size: queue.size,
            kicks: queue.kicks,
            taken: queue.taken,
            completed: queue.completed,
            in_flight: queue.in_flight,
            interrupts: queue.interrupts,
            busy_s: queue.busy_ns as f64 * 1e-9,
            error: queue.error.clone(),
            ..report::Queue::default()
        };
        let latencies = self.export.latencies();
        let queues = (0..).zip(&status.queues).map(queue).zip(&latencies);
        let mut device = report::Device {
            name: self.spec.name.clone(),
            kind: self.spec.kind.name().to_owned(),
            endpoint: self.spec.endpoint.to_string(),
            back_end: self.back_end.clone(),
            workers: self.threads.len() as u16,
            threads: self.threads.iter().filter_map(IoThread::report).collect(),
            connected: status.connected,
            kept: status.kept,
            sessions: status.sessions,
            features: format!("{:#x}", status.features),
            protocol_features: format!("{:#x}", status.protocol_features),
            memory: status.memory,
            max_memory: status.max_memory,
            queues: queues.map(|(queue, latencies)| queue.with_latencies(latencies)).collect(),
            refused_connections: status.refused_connections,
            protocol_errors: status.protocol_errors,
            refused_translations: status.refused_translations,
            last_error: status.last_error.clone(),
            host_error: status.host_error.clone(),
            failed: status.failed.clone(),
            stopping: self.stopping.map(|since| report::Stopping {
                seconds: since.elapsed().as_secs_f64(),
                in_flight: status.queues.iter().map(|queue| queue.in_flight).sum(),
            }),
            settings: self.settings(),
            snapshots: self.taken.count,
            last_snapshot: self.taken.last.clone(),
            ..report::Device::default()
        };
        self.observer.report(&mut device, &status);
        device
    }

    fn settings(&self) -> report::Settings {
        let DeviceSpec { longest_poll, latencies, kind, .. } = &self.spec;
        let poll_us = u64::try_from(longest_poll.as_micros()).unwrap_or(u64::MAX);
        let mut settings = report::Settings { poll_us, latencies: *latencies, ..report::Settings::default() };
        kind.settings(&mut settings);
        settings
    }
}
