//! The devices that are served.
//!
//! ```text
//!             start: all or none
//!  file ---------------------------> members
//!    '---- reload: gone or changed --> stopped, sockets removed
//!                  as they were    --> left alone, whatever else happens
//!                  new or changed  --> started; those that cannot be are `failed`, until the next reload
//!                  panicked        --> started anew
//! ```
//! The two cards of a link are one thing: if one changes, both are made anew.
use super::open::{self, FarEnds, Figures, Opened};
use super::report::{self, Report};
use super::sandbox::Reach;
use super::spec::{DeviceSpec, Endpoint, Kind};
use anyhow::{Context, anyhow};
use paravane_device::blk::Resizer;
use paravane_vhost::{Export, ExportConfig, ExportStatus, MappingPool, MappingQuota};
use std::collections::{HashMap, HashSet};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Sockets that systemd has passed, by name. They are copied, so that a device can come back to its own.
pub(crate) type Sockets = HashMap<String, UnixListener>;

/// One device that is served.
struct Member {
    spec: DeviceSpec,
    export: Export,
    figures: Figures,
    resizer: Option<Resizer>,
    back_end: String,
}

struct Inner {
    members: Vec<Member>,
    failed: Vec<report::Failed>,
    last_reload: String,
    reload: Option<report::Reload>,
}

/// All of them. Those who look on share it.
#[derive(Clone)]
pub(crate) struct Fleet {
    inner: Arc<Mutex<Inner>>,
    /// What VMMs may have mapped.
    pool: Arc<MappingPool>,
    started: Instant,
}

impl Fleet {
    /// Serves devices that are open.
    ///
    /// # Errors
    /// One cannot be served; then none is.
    pub(crate) fn start(
        opened: Vec<(DeviceSpec, Opened)>,
        sockets: &Sockets,
        pool: Arc<MappingPool>,
    ) -> Result<Self, anyhow::Error> {
        // Each has its share before the first VMM can take any.
        let quotas: Vec<_> = opened.iter().map(|_| pool.quota()).collect();
        let mut members: Vec<Member> = Vec::new();
        for ((spec, device), quota) in opened.into_iter().zip(quotas) {
            match Member::start(spec, device, sockets, quota) {
                Ok(member) => members.push(member),
                Err(error) => {
                    members.into_iter().for_each(Member::stop);
                    return Err(error);
                }
            }
        }
        let inner = Inner { members, failed: Vec::new(), last_reload: String::new(), reload: None };
        Ok(Self { inner: Arc::new(Mutex::new(inner)), pool, started: Instant::now() })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the devices those of a new list.
    pub(crate) fn reload(&self, wanted: Vec<DeviceSpec>, sockets: &Sockets, reach: Option<&Reach>) {
        let mut inner = self.inner();
        let (kept, gone) = divide(std::mem::take(&mut inner.members), &wanted);
        let kept_names: HashSet<_> = kept.iter().map(|member| member.spec.name.clone()).collect();
        inner.members = kept;
        inner.failed.clear();
        // Not under the lock: a device may take its time to finish what is in flight.
        drop(inner);
        let removed = gone.len();
        gone.into_iter().for_each(Member::stop);

        let new: Vec<_> = wanted.iter().filter(|spec| !kept_names.contains(&spec.name)).cloned().collect();
        let mut far_ends = FarEnds::default();
        let (mut added, mut failed) = (0, 0_usize);
        let quotas: Vec<_> = new.iter().map(|_| self.pool.quota()).collect();
        for (spec, quota) in new.into_iter().zip(quotas) {
            let name = spec.name.clone();
            let started = open_one(&spec, &mut far_ends, reach)
                .and_then(|device| Member::start(spec, device, sockets, quota));
            let mut inner = self.inner();
            match started {
                Ok(member) => {
                    added += 1;
                    inner.members.push(member);
                }
                Err(error) => {
                    failed += 1;
                    let why = crate::one_line(&error);
                    tracing::error!(device = name, "not served: {why}");
                    inner.failed.push(report::Failed { name, why });
                }
            }
        }
        failed += self.drop_loose_ends(&wanted);
        let mut inner = self.inner();
        // In the order of the file.
        let position: HashMap<_, _> = wanted.iter().map(|spec| spec.name.as_str()).zip(0..).collect();
        inner
            .members
            .sort_by_key(|member| position.get(member.spec.name.as_str()).copied().unwrap_or(usize::MAX));
        let left = kept_names.len();
        let outcome = format!("{left} devices left alone, {removed} removed, {added} added, {failed} failed");
        tracing::info!("{outcome}");
        inner.last_reload = outcome;
        inner.reload = Some(report::Reload::now(failed == 0));
    }

    /// Stops cards whose other end could not be started, and says how many.
    fn drop_loose_ends(&self, wanted: &[DeviceSpec]) -> usize {
        let mut inner = self.inner();
        let is_there: HashSet<_> = inner.members.iter().map(|member| member.spec.name.clone()).collect();
        let missing = wanted.iter().filter(|spec| !is_there.contains(&spec.name));
        let cut: HashSet<_> = missing.filter_map(DeviceSpec::link).collect();
        let is_loose = |member: &Member| member.spec.link().is_some_and(|link| cut.contains(link));
        let (loose, kept): (Vec<_>, _) = std::mem::take(&mut inner.members).into_iter().partition(is_loose);
        inner.members = kept;
        for member in &loose {
            let why = "the other end of its link is not served".to_owned();
            inner.failed.push(report::Failed { name: member.spec.name.clone(), why });
        }
        drop(inner);
        let count = loose.len();
        loose.into_iter().for_each(Member::stop);
        count
    }

    /// A new list could not be read; all stays as it is.
    pub(crate) fn refused(&self, why: String) {
        tracing::error!("nothing was changed: {why}");
        let mut inner = self.inner();
        inner.last_reload = format!("nothing was changed: {why}");
        inner.reload = Some(report::Reload::now(false));
    }

    /// Looks at the sizes of images, and tells the drivers of disks whose size is another by now.
    pub(crate) fn look_at_sizes(&self) {
        for member in &mut self.inner().members {
            let Some(resizer) = &mut member.resizer else { continue };
            let device = &member.spec.name;
            match resizer.look() {
                Ok(false) => {}
                Ok(true) => {
                    tracing::info!(device, bytes = resizer.size(), "the disk has another size");
                    member.export.config_changed();
                }
                Err(error) => tracing::error!(device, %error, "the image's size is not known"),
            }
        }
    }

    /// How all are.
    pub(crate) fn report(&self) -> Report {
        let inner = self.inner();
        Report {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            last_reload: inner.last_reload.clone(),
            reload: inner.reload.clone(),
            devices: inner.members.iter().map(Member::report).collect(),
            failed: inner.failed.clone(),
            ..Report::default()
        }
    }

    /// Finishes what is in flight, and removes the sockets.
    pub(crate) fn stop(&self) {
        let members = std::mem::take(&mut self.inner().members);
        members.into_iter().for_each(Member::stop);
    }
}

/// Opens one device, and says if it may have been the sandbox that did not let it.
///
/// # Errors
/// It cannot be had.
pub(crate) fn open_one(
    spec: &DeviceSpec,
    far_ends: &mut FarEnds,
    reach: Option<&Reach>,
) -> Result<Opened, anyhow::Error> {
    open::open(spec, far_ends).map_err(|error| match (refused_access(&error), reach) {
        (true, Some(reach)) => anyhow!("{} ({})", crate::one_line(&error), reach.remark()),
        _ => error,
    })
}

fn refused_access(error: &anyhow::Error) -> bool {
    let refused = |error: &std::io::Error| error.kind() == std::io::ErrorKind::PermissionDenied;
    error.chain().any(|cause| cause.downcast_ref().is_some_and(refused))
}

/// Those that stay as they are, and those that go.
fn divide(members: Vec<Member>, wanted: &[DeviceSpec]) -> (Vec<Member>, Vec<Member>) {
    let (kept, mut gone): (Vec<_>, Vec<_>) =
        members.into_iter().partition(|member| wanted.contains(&member.spec) && !member.export.has_failed());
    // A card whose other end goes, goes too.
    let broken: HashSet<String> =
        gone.iter().filter_map(|member| member.spec.link()).map(str::to_owned).collect();
    let is_broken = |member: &Member| member.spec.link().is_some_and(|link| broken.contains(link));
    let (torn, kept) = kept.into_iter().partition(is_broken);
    gone.extend::<Vec<_>>(torn);
    (kept, gone)
}

impl Member {
    fn start(
        spec: DeviceSpec,
        opened: Opened,
        sockets: &Sockets,
        quota: MappingQuota,
    ) -> Result<Self, anyhow::Error> {
        let Opened { device, figures, resizer, back_end } = opened;
        let name = spec.name.clone();
        let started = || {
            let endpoint = match &spec.endpoint {
                Endpoint::Listen(path) => paravane_vhost::Endpoint::Listen(path.clone()),
                Endpoint::Connect(path) => paravane_vhost::Endpoint::Connect(path.clone()),
                Endpoint::Activated => {
                    let listener =
                        sockets.get(&name).context("systemd has passed no socket with this name")?;
                    paravane_vhost::Endpoint::Listener(listener.try_clone()?)
                }
            };
            let config = ExportConfig {
                workers: spec.workers.into(),
                longest_poll: spec.longest_poll,
                packed: spec.packed,
                in_order: matches!(spec.kind, Kind::Net(_)),
                quota,
                ..ExportConfig::new(name.clone(), endpoint)
            };
            Ok::<_, anyhow::Error>(Export::start(config, device)?)
        };
        let export = started().with_context(|| format!("device {name}"))?;
        tracing::info!(
            device = name,
            kind = spec.kind.name(),
            endpoint = endpoint(&spec),
            back_end,
            "served"
        );
        Ok(Self { spec, export, figures, resizer, back_end })
    }

    fn stop(self) {
        tracing::info!(device = self.spec.name, "stopping");
        self.export.stop();
    }

    fn report(&self) -> report::Device {
        let status: ExportStatus = self.export.status();
        let storage = self.figures.storage.as_ref().map(|errors| errors.totals());
        let failures = |index: u16| storage.as_ref()?.queues.get(usize::from(index)).copied();
        let queue = |(index, queue): (u16, &paravane_vhost::QueueStatus)| report::Queue {
            index,
            enabled: queue.enabled,
            live: queue.live,
            size: queue.size,
            kicks: queue.kicks,
            taken: queue.taken,
            completed: queue.completed,
            interrupts: queue.interrupts,
            storage_errors: failures(index).unwrap_or(0),
            error: queue.error.clone(),
        };
        report::Device {
            name: self.spec.name.clone(),
            kind: self.spec.kind.name().to_owned(),
            endpoint: endpoint(&self.spec),
            back_end: self.back_end.clone(),
            size: self.resizer.as_ref().map(Resizer::size),
            workers: self.spec.workers,
            connected: status.connected,
            sessions: status.sessions,
            features: format!("{:#x}", status.features),
            memory: status.memory,
            max_memory: status.max_memory,
            queues: (0..).zip(&status.queues).map(queue).collect(),
            refused_connections: status.refused_connections,
            protocol_errors: status.protocol_errors,
            refused_translations: status.refused_translations,
            last_error: status.last_error,
            failed: status.failed,
            throttled: self.figures.limiters.iter().map(|limiter| limiter.times_held()).sum(),
            storage_errors: storage.as_ref().map(report::StorageErrors::new),
            rejected_requests: storage.as_ref().map(|totals| totals.rejected),
            size_error: self.resizer.as_ref().and_then(Resizer::error).map(str::to_owned),
            image_deleted: self.resizer.as_ref().is_some_and(Resizer::is_deleted),
            net: self.figures.net.as_ref().map(|counters| {
                let totals = counters.totals();
                report::Net {
                    transmitted_frames: totals.transmitted,
                    transmitted_bytes: totals.transmitted_bytes,
                    received_frames: totals.received,
                    received_bytes: totals.received_bytes,
                    dropped_frames: totals.malformed + totals.refused + totals.no_room,
                    malformed_frames: totals.malformed,
                    refused_frames: totals.refused,
                    no_room_frames: totals.no_room,
                    unusable_buffers: totals.unusable,
                }
            }),
        }
    }
}

fn endpoint(spec: &DeviceSpec) -> String {
    match &spec.endpoint {
        Endpoint::Listen(path) => format!("listen {}", path.display()),
        Endpoint::Connect(path) => format!("connect {}", path.display()),
        Endpoint::Activated => "activated".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_device::{Device, QueueHandler};
    use paravane_vhost::MappingLimits;
    use std::io;
    use std::os::unix::net::UnixStream;
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    /// Has a mistake that the first client brings to light.
    struct Faulty;

    impl Device for Faulty {
        fn device_id(&self) -> u32 {
            paravane_spec::device_id::RNG
        }

        fn features(&self) -> u64 {
            panic!("a mistake")
        }

        fn queue_sizes(&self) -> &[u16] {
            &[16]
        }

        fn read_config(&self, _offset: u32, _out: &mut [u8]) {}

        fn start_queue(&mut self, _index: u16, _features: u64) -> io::Result<Box<dyn QueueHandler>> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    fn spec(folder: &Path, name: &str) -> (DeviceSpec, PathBuf) {
        let socket = folder.join(name);
        let spec = DeviceSpec {
            name: name.into(),
            endpoint: Endpoint::Listen(socket.clone()),
            workers: 1,
            longest_poll: Duration::ZERO,
            packed: true,
            kind: Kind::Rng,
        };
        (spec, socket)
    }

    fn wait_for(fleet: &Fleet, wanted: impl Fn(&Report) -> bool) -> Report {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let report = fleet.report();
            if wanted(&report) {
                return report;
            }
            assert!(Instant::now() < end, "still {report:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_device_that_panics_is_told_of_and_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let ((faulty, socket), (good, good_socket)) =
            (spec(folder.path(), "faulty"), spec(folder.path(), "good"));
        let device = Box::new(Faulty);
        let opened =
            Opened { device, figures: Figures::default(), resizer: None, back_end: "a mistake".into() };
        let members = vec![
            (faulty.clone(), opened),
            (good.clone(), open_one(&good, &mut FarEnds::default(), None).unwrap()),
        ];
        let sockets = Sockets::new();
        let fleet = Fleet::start(members, &sockets, MappingPool::new(MappingLimits::of_host())).unwrap();
        let _good_client = UnixStream::connect(&good_socket).unwrap();
        let _client = UnixStream::connect(&socket).unwrap();
        let report =
            wait_for(&fleet, |report| report.devices[0].failed.is_some() && report.devices[1].connected);
        assert_eq!(report.devices[0].failed.as_deref(), Some("a mistake"));
        assert!(!report.devices[0].connected && report.devices[1].failed.is_none());
        // The same devices are asked for: what has failed is made anew, and the other one left alone.
        fleet.reload(vec![faulty, good], &sockets, None);
        let report = fleet.report();
        assert_eq!(report.last_reload, "1 devices left alone, 1 removed, 1 added, 0 failed");
        assert!(report.devices.iter().all(|device| device.failed.is_none()));
        assert!(report.devices[1].connected);
        let _client = UnixStream::connect(&socket).unwrap();
        wait_for(&fleet, |report| report.devices[0].connected);
        fleet.stop();
    }
}
