//! `paravane serve` and `paravane status`.
//!
//! ```text
//!  args (command line) --.
//!                         >-- spec: device specifications --> open: devices --> exports: one for each device
//!  config (file) --------'                                                        |        |
//!  sandbox: drops privileges on the way            signals: SIGHUP, SIGTERM ------'        '--> report
//!                                                            reporter, connections: control (status), metrics
//! ```
pub(crate) mod args;
pub(crate) mod broker;
pub(crate) mod config;
mod connections;
pub(crate) mod control;
pub(crate) mod deadline;
mod exports;
mod idle;
pub(crate) mod inspector;
pub(crate) mod keys;
mod limits;
pub(crate) mod metrics;
mod network_events;
pub(crate) mod open;
mod places;
pub(crate) mod private_socket;
mod process;
pub(crate) mod reader;
pub(crate) mod reload;
mod reloader;
pub(crate) mod report;
mod reporter;
pub(crate) mod sandbox;
pub(crate) mod shelf;
pub(crate) mod signals;
mod slow;
pub(crate) mod snapshot;
mod sockets;
pub(crate) mod spec;
pub(crate) mod status;
pub(crate) mod store;
pub(crate) mod systemd;
pub(crate) mod take_over;
mod threads;
pub(crate) mod told;
pub(crate) mod trace;
pub(crate) mod wire;

use crate::conventions;
use crate::failure::{self, Failure};
use crate::kinds;
use crate::kinds::endpoint::Endpoint;
use crate::kinds::opening::{Earlier, LinkEnds, OpenContext, Opening};
use crate::size::Size;
use crate::{log, output};
use anyhow::{Context, anyhow};
use args::{DaemonArgs, LogFormat, LogLevel, ServeArgs};
use broker::Broker;
use config::Config;
use control::Control;
use exports::{ExportContext, Exports, Startup, Turn};
use inspector::InspectorProcess;
use metrics::Metrics;
use network_events::NetworkEvents;
use paravane_store::{CacheFolder, Connector, Direct, Location, NamedFiles};
use paravane_vhost::{MappingPool, Notifier, RecordedSession as _};
use process::ProcessFiles;
use reader::ConfigFile;
use reloader::Reloader;
use report::Report;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use sandbox::paths::AllowedPaths;
use sandbox::user::Target;
use sd_notify::NotifyState;
use shelf::{Found, KeptSession, Place, Shelf};
use signals::{Request, Signals};
use snapshot::SnapshotServer;
use sockets::Sockets;
use spec::DeviceSpec;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::num::NonZeroU32;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, channel};
use std::time::{Duration, Instant};
use take_over::{Giver, Taker};
use threads::Threads;
use told::Told;
use trace::stream::Wanted;

/// Default log lines per second and device.
const LOG_RATE: u32 = 1;
/// Default time that SIGTERM waits for requests in flight.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Default of --cache-size.
const CACHE_SIZE: u64 = 10 << 30;

/// Longest wait for the images of a file's devices before the daemon is ready.
const START_PATIENCE: Duration = Duration::from_secs(2);
/// Time between two looks at devices that wait for their images at the start.
const STARTUP_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn main(args: &ServeArgs, verbose: u8) -> Result<ExitCode, Failure> {
    if let Some(device) = &args.device
        && device.endpoint().print_capabilities
    {
        conventions::print_capabilities(device.kind())?;
        return Ok(ExitCode::SUCCESS);
    }
    let Config { daemon, devices } = configuration(args).map_err(Failure::request)?;
    log::set_up(log::Settings {
        base: log_level(&daemon),
        verbose,
        json: daemon.log_format == Some(LogFormat::Json),
        rate: log_rate(&daemon, verbose),
    });
    if args.check {
        check(&daemon, &devices).map_err(Failure::request)?;
        if let (Some(control), Some(file)) = (&args.against, &args.config) {
            return crate::reload::against(control, file);
        }
        let noun = if devices.len() == 1 { "device" } else { "devices" };
        output::print(&format!("configuration valid: {} {noun}\n", devices.len()))?;
        return Ok(ExitCode::SUCCESS);
    }
    serve(args, &daemon, devices, verbose)?;
    Ok(ExitCode::SUCCESS)
}

/// Level of the log without -v.
fn log_level(daemon: &DaemonArgs) -> log::Level {
    match daemon.log_level {
        Some(LogLevel::Error) => log::Level::Error,
        Some(LogLevel::Warn) => log::Level::Warn,
        Some(LogLevel::Info) | None => log::Level::Info,
        Some(LogLevel::Debug) => log::Level::Debug,
        Some(LogLevel::Trace) => log::Level::Trace,
    }
}

/// Log lines per second and device; `None`: no limit.
fn log_rate(daemon: &DaemonArgs, verbose: u8) -> Option<NonZeroU32> {
    // -v disables the limit.
    NonZeroU32::new(daemon.log_rate.unwrap_or(if verbose == 0 { LOG_RATE } else { 0 }))
}

/// The configuration of the command line and the file.
fn configuration(args: &ServeArgs) -> Result<Config, anyhow::Error> {
    match (&args.device, &args.config) {
        (None, None) => Err(anyhow!(
            "no device: name one ({}), or a file of devices with --config FILE",
            kinds::names("or")
        )),
        (Some(_), Some(_)) => Err(anyhow!("--config and a device exclude each other: use one of them")),
        (Some(device), None) => {
            let device = DeviceSpec::new(device).map_err(|(option, what)| anyhow!("--{option}: {what}"))?;
            let devices = vec![device];
            spec::check_together(&devices)?;
            Ok(Config { daemon: args.daemon.clone(), devices })
        }
        (None, Some(file)) => {
            let Config { daemon, devices } = Config::read(file)?;
            Ok(Config { daemon: override_with(daemon, &args.daemon), devices })
        }
    }
}

/// The daemon's options: those of the command line before those of the file.
fn override_with(file: DaemonArgs, line: &DaemonArgs) -> DaemonArgs {
    let line = line.clone();
    DaemonArgs {
        control: line.control.or(file.control),
        metrics: line.metrics.or(file.metrics),
        holder: line.holder.or(file.holder),
        user: line.user.or(file.user),
        allow: [file.allow, line.allow].concat(),
        no_sandbox: line.no_sandbox || file.no_sandbox,
        log_format: line.log_format.or(file.log_format),
        log_level: line.log_level.or(file.log_level),
        log_rate: line.log_rate.or(file.log_rate),
        max_client_memory: line.max_client_memory.or(file.max_client_memory),
        any_memory_file: line.any_memory_file || file.any_memory_file,
        max_memory: line.max_memory.or(file.max_memory),
        max_mappings: line.max_mappings.or(file.max_mappings),
        io_threads: line.io_threads.or(file.io_threads),
        cache: line.cache.or(file.cache),
        cache_size: line.cache_size.or(file.cache_size),
        stop_timeout: line.stop_timeout.or(file.stop_timeout),
    }
}

/// Checks users, files and limits. Changes nothing.
pub(crate) fn check(daemon: &DaemonArgs, devices: &[DeviceSpec]) -> Result<(), anyhow::Error> {
    check_daemon(daemon, devices)?;
    devices.iter().try_for_each(check_device)
}

/// Checks what concerns all devices.
fn check_daemon(daemon: &DaemonArgs, devices: &[DeviceSpec]) -> Result<(), anyhow::Error> {
    if let Some(user) = &daemon.user {
        Target::find(user)?;
    }
    limits::mapping(daemon)?;
    threads::count(daemon)?;
    if let Some(control) = &daemon.control {
        check_length(control).context("--control")?;
    }
    match &daemon.cache {
        Some(cache) if !cache.is_dir() => {
            return Err(anyhow!("no directory {} for --cache", cache.display()));
        }
        None if daemon.cache_size.is_some() => return Err(anyhow!("--cache-size needs --cache")),
        _ => {}
    }
    if daemon.holder.is_some() {
        devices.iter().try_for_each(|device| shelf::check_name(&device.name))?;
    }
    Ok(())
}

/// Checks the files of a device.
fn check_device(device: &DeviceSpec) -> Result<(), anyhow::Error> {
    let named = || format!("device {}", device.name);
    for image in device.images() {
        let file =
            std::fs::metadata(image).with_context(|| image.display().to_string()).with_context(named)?;
        if file.is_dir() {
            return Err(anyhow!("image {} is a directory", image.display())).with_context(named);
        }
    }
    if let Some(socket) = device.socket() {
        check_length(socket).with_context(named)?;
    }
    let directory = device.socket().and_then(Path::parent).filter(|path| !path.as_os_str().is_empty());
    if let Some(directory) = directory
        && !directory.is_dir()
    {
        return Err(anyhow!("no directory {} for the socket", directory.display())).with_context(named);
    }
    Ok(())
}

/// Checks that a path fits the address of a UNIX socket.
fn check_length(socket: &Path) -> Result<(), anyhow::Error> {
    /// `sun_path` with a final zero.
    const MOST: usize = 107;
    let len = socket.as_os_str().len();
    if len > MOST {
        return Err(anyhow!(
            "socket path of {len} bytes is too long: the kernel takes at most {MOST}; use a shorter one: {}",
            socket.display()
        ));
    }
    Ok(())
}

fn serve(
    args: &ServeArgs,
    daemon: &DaemonArgs,
    devices: Vec<DeviceSpec>,
    verbose: u8,
) -> Result<(), Failure> {
    // The devices of a file start each for itself.
    let each = args.config.is_some() && !args.take_over;
    match each {
        true => check_daemon(daemon, &devices),
        false => check(daemon, &devices),
    }
    .map_err(Failure::request)?;
    let fd = args.device.as_ref().and_then(|device| device.endpoint().fd);
    // Before this process opens a descriptor that could have that number.
    // A daemon that takes over gets that of the old one.
    let fd = fd.filter(|_| !args.take_over);
    let (sockets, passed) = Sockets::take(fd).map_err(|error| match fd {
        Some(_) => Failure::request(error),
        None => error.into(),
    })?;
    let signals = Signals::take().context("cannot block signals")?;
    raise_descriptor_limit();
    // Before the sandbox, which hides the host's limits.
    let pool = MappingPool::new(limits::mapping(daemon).map_err(Failure::request)?);
    let manager = systemd::Manager::from_environment()?;
    let user = daemon.user.as_deref().map(Target::find).transpose().map_err(Failure::request)?;
    let mut metrics = daemon.metrics.map(Metrics::bind).transpose();
    // The old daemon may have the port.
    let port = daemon.metrics.filter(|_| args.take_over && metrics.is_err());
    if port.is_some() {
        metrics = Ok(None);
    }
    let mut metrics = metrics?;
    let old = match args.take_over {
        true => Some(take_over::find(daemon.control.as_deref()).map_err(Failure::request)?),
        false => None,
    };
    let mut control = match old {
        Some(_) => None,
        None => Control::open(daemon.control.as_deref())?,
    };
    if let (Some(control), Some(user)) = (&control, &user) {
        control.give_to(user)?;
    }
    let (mut waiting, mut found) = (None, Found::default());
    let shelf = match daemon.holder.as_deref().map(Place::new) {
        // The old daemon uses it.
        Some(place) if args.take_over => {
            let (shelf, holder) = Shelf::open_later(place).map_err(Failure::request)?;
            waiting = holder;
            Some(shelf)
        }
        Some(place) => {
            let (shelf, stored) = Shelf::open(place, passed)?;
            found = stored;
            Some(shelf)
        }
        None => None,
    };
    let process = Arc::new(ProcessFiles::open());

    let uses_ceph =
        devices.iter().flat_map(|device| device.kind.locations()).any(|at| matches!(at, Location::Rbd(_)));
    #[cfg(feature = "rbd")]
    if uses_ceph {
        // The sandbox allows no more code in memory.
        paravane_store::rbd::load().map_err(Failure::request)?;
    }
    let allowed = (!daemon.no_sandbox).then(|| {
        let control = control.as_ref().map(|control| &*control.path).or(old.as_deref());
        allowed_paths(args, daemon, &devices, control)
    });
    let readable = allowed.as_ref().map(|allowed| readable_keys(allowed, &devices)).unwrap_or_default();
    let (connector, config) = helpers(args, daemon, &devices, allowed.as_ref(), user.as_ref())?;
    let inspector = match daemon.any_memory_file {
        true => None,
        false => Some(InspectorProcess::start(!daemon.no_sandbox)?),
    };
    let files = NamedFiles::default();
    let mut unusable = HashMap::new();
    for device in &devices {
        if each && let Some(Err(why)) = device.socket().map(check_length) {
            unusable.insert(device.name.clone(), why);
        }
        for location in device.kind.locations() {
            match files.read(location) {
                Ok(()) => {}
                Err(why) if each => drop(unusable.insert(device.name.clone(), anyhow!("{location}: {why}"))),
                Err(why) => {
                    return Err(Failure::request(anyhow!("device {}: {location}: {why}", device.name)));
                }
            }
        }
    }
    let may_have_taps = args.config.is_some() || devices.iter().any(|spec| spec.kind.tap().is_some());
    // The sandbox allows no such socket.
    let network = may_have_taps.then(NetworkEvents::open).transpose().unwrap_or_else(|error| {
        tracing::warn!("a TAP device that is deleted is noticed by traffic only: no netlink socket: {error}");
        None
    });
    match &allowed {
        Some(allowed) => sandbox::enter(allowed)?,
        None => tracing::warn!(
            "running without a sandbox: a guest that takes over this process has all rights of its user"
        ),
    }

    let sandboxed = allowed.is_some();
    let kept = sandbox::capabilities::needed(&devices, args.config.is_some() || args.take_over);
    let allowed = allowed.map(Arc::new);
    let connects = devices.iter().any(|spec| matches!(spec.endpoint, Endpoint::Connect(_)));
    let specs = devices.clone();
    if let Some(shelf) = &shelf {
        shelf.divide(devices.len());
    }
    let sessions = shelf.as_ref().map(|shelf| shelf.sessions(found, &specs)).unwrap_or_default();
    let mut told = recorded(&sessions, &specs);
    let copy = |(name, session): (&String, &KeptSession)| {
        let told = told.get(name).cloned().unwrap_or_default();
        Ok((name.clone(), Earlier { fds: session.kept.device_fds()?, told }))
    };
    let earlier = sessions.iter().map(copy).collect::<io::Result<_>>()?;
    let opening = OpenContext { allowed: allowed.clone(), connector, cache: cache(daemon), files };
    let how = match (args.take_over, each) {
        (true, _) => Start::TakeOver,
        (false, true) => Start::Each { unusable, changes_user: user.is_some() },
        (false, false) => Start::All,
    };
    let Some(opened) = open_all(devices, opening.clone(), &signals, how, earlier)? else {
        tracing::info!("stopped by a signal before all devices were open");
        return Ok(());
    };
    let mut opened = match each {
        true => at_least_one(opened, &sessions)?,
        false => all(opened)?.into_iter().map(|(spec, opening)| (spec, Ok(opening))).collect(),
    };
    // Before privileges are dropped, which the socket may need.
    let taker = match &old {
        Some(path) => {
            // From `begin` on clients wait.
            paravane_device::latency::calibrate();
            let open = opened.iter().filter_map(|(spec, opening)| Some((spec, opening.as_ref().ok()?)));
            let wanted: Vec<_> = open.map(|(spec, opening)| opening.wanted(spec)).collect();
            let taker = Taker::ask(path, &wanted).map_err(Failure::request)?;
            if let Some(address) = port.filter(|address| !taker.has_metrics(*address)) {
                return Err(Failure::request(anyhow!("metrics: {address} is in use by another process")));
            }
            told = taker.told();
            Some(taker)
        }
        None => None,
    };
    let what = if old.is_some() { told::NOT_TAKEN } else { told::NOT_RESUMED };
    check_told(&mut opened, &told, shelf.is_some(), what, each)?;
    match &user {
        user if sandboxed => sandbox::drop_privileges(user.as_ref(), kept)?,
        Some(user) => user.become_user()?,
        None => {}
    }
    // From here on no thread waits for stderr.
    log::start_writing();
    let stop_timeout =
        daemon.stop_timeout.map_or(STOP_TIMEOUT, |seconds| Duration::from_secs(seconds.into()));
    let sealed = allowed.is_some() && args.config.is_none();
    let is_kept = shelf.is_some();
    let threads = Threads::start(threads::count(daemon).map_err(Failure::request)?)?;
    let context =
        ExportContext { sockets, opening, stop_timeout, pool, shelf: shelf.clone(), threads, inspector };
    let mut take_overs = 0;
    let exports = match taker {
        Some(taker) => {
            let took = taker.begin(port.is_some())?;
            control = Some(took.control);
            metrics = metrics.or(took.metrics);
            take_overs = took.take_overs;
            Exports::take_over(all(opened)?, context, took.arrivals)?
        }
        None if is_kept || each => Exports::begin(opened, context, sessions)?,
        None => Exports::start(all(opened)?, context)?,
    };
    if let (Some(shelf), Some(waiting)) = (&shelf, waiting) {
        let exports = exports.clone();
        shelf.await_holder(waiting, move || exports.keep())?;
    }
    // From here on the sockets exist, and must be removed on every path.
    let seal = sealed.then_some(connects || uses_ceph);
    let giver = match &control {
        Some(control) => {
            let listener = control.listener.try_clone()?;
            let port = metrics.as_ref().map(|metrics| metrics.listener.try_clone()).transpose()?;
            Some(Giver::new(exports.clone(), listener, port, stop_timeout, take_overs))
        }
        None => None,
    };
    let observers =
        Observers { control: control.as_ref(), metrics, process, giver: giver.clone(), take_overs, network };
    for (key, way) in readable {
        tracing::warn!(
            "a guest that takes over this process could read the keys in {}, as the daemon may read in {}: keep keys and \
             images in different directories",
            key.display(),
            way.display()
        );
    }
    let configuration = Configuration { args, file: config.as_ref(), daemon, verbose };
    let result = run(&configuration, &exports, &signals, &manager, seal, observers);
    if let Some(result) = giver.as_ref().and_then(|giver| giver.outcome()) {
        // The new daemon owns the sockets.
        std::mem::forget(control);
        match result {
            Ok(count) => {
                tracing::info!(devices = count, "devices handed over: exiting");
                // The new daemon and the clients come first.
                idle::run_when_idle();
                exports.drop_handed();
                return Ok(());
            }
            Err(why) => {
                tracing::error!("handover failed: {why}: exiting");
                exports.log_unfinished();
                failure::exit(1)
            }
        }
    }
    manager.stopping(stop_timeout);
    match end(&exports, &signals, stop_timeout) {
        End::Finished => Ok(result?),
        unfinished => {
            tracing::error!(
                "{}",
                match unfinished {
                    End::Interrupted =>
                        "second signal: exiting without waiting for requests in flight".to_owned(),
                    _ => format!(
                        "requests in flight not finished within {} s (--stop-timeout): exiting",
                        stop_timeout.as_secs()
                    ),
                }
            );
            exports.log_unfinished();
            // Removes the socket.
            drop(control);
            failure::exit(if unfinished == End::Interrupted { 130 } else { 1 })
        }
    }
}

/// What the guests of sessions that are kept were told, by device.
fn recorded(sessions: &HashMap<String, KeptSession>, specs: &[DeviceSpec]) -> HashMap<String, Told> {
    let told = |spec: &DeviceSpec| {
        // A record that cannot be read is refused when it is resumed.
        let known = sessions.get(&spec.name)?.kept.known_to_driver().ok()??;
        Some((spec.name.clone(), spec::told_recorded(spec.kind.kind(), &known)))
    };
    specs.iter().filter_map(told).collect()
}

/// Opens all devices in a separate thread, as storage may hang.
///
/// `earlier`: what an earlier one had of devices.
/// `None`: a signal ended the wait.
fn open_all(
    devices: Vec<DeviceSpec>,
    context: OpenContext,
    signals: &Signals,
    mut how: Start,
    mut earlier: HashMap<String, Earlier>,
) -> Result<Option<Vec<OpenedDevice>>, Failure> {
    let (sender, receiver) = channel();
    let done = Arc::new(Notifier::new(false).context("cannot create an eventfd")?);
    let signal = Arc::clone(&done);
    let open = move || {
        let mut link_ends = LinkEnds::default();
        // Without one of them, there are none.
        let needs_all = !matches!(how, Start::Each { .. });
        let mut open = |spec: &DeviceSpec| {
            let kept = earlier.remove(&spec.name).unwrap_or_default();
            match &mut how {
                Start::TakeOver => exports::prepare_one(spec, &mut link_ends, &context),
                Start::All => exports::open_with(spec, &mut link_ends, &context, kept),
                Start::Each { unusable, changes_user } => match unusable.remove(&spec.name) {
                    Some(error) => Err(error),
                    None => match open::without_servers(spec, *changes_user)? {
                        Some(opening) => Ok(opening),
                        None => exports::open_with(spec, &mut link_ends, &context, kept),
                    },
                },
            }
        };
        let mut opened = Vec::new();
        for spec in devices {
            let opening = open(&spec);
            let ends = opening.is_err() && needs_all;
            opened.push((spec, opening));
            if ends {
                break;
            }
        }
        // After a signal the receiver is gone.
        drop(sender.send(opened));
        signal.signal();
    };
    let thread = std::thread::Builder::new().name("open".into()).spawn(open)?;
    loop {
        match receiver.try_recv() {
            Ok(opened) => {
                // The thread must have ended before privileges are dropped: see `sandbox`.
                let _ = thread.join();
                return Ok(Some(opened));
            }
            // The thread panicked.
            Err(TryRecvError::Disconnected) => {
                let panic = thread.join().err();
                return Err(anyhow!(
                    "cannot open the devices: {}",
                    panic.map_or("internal error", |_| "a thread panicked")
                )
                .into());
            }
            Err(TryRecvError::Empty) => {}
        }
        if signals.wait(&[done.as_fd()], None)? == Some(Request::End) {
            return Ok(None);
        }
    }
}

/// How devices are opened at the start.
enum Start {
    /// As far as the daemon allows that serves them.
    TakeOver,
    All,
    /// Each for itself.
    Each {
        /// Devices that are known to be unusable, and why.
        unusable: HashMap<String, anyhow::Error>,
        /// The process becomes another user later.
        changes_user: bool,
    },
}

/// A device that is open, or why it is not.
type OpenedDevice = (DeviceSpec, Result<Opening, anyhow::Error>);

/// The devices, if all of them are open.
fn all(opened: Vec<OpenedDevice>) -> Result<Vec<(DeviceSpec, Opening)>, Failure> {
    let one = |(spec, opening): OpenedDevice| {
        let opening = opening.with_context(|| format!("device {}", spec.name)).map_err(Failure::request)?;
        Ok((spec, opening))
    };
    opened.into_iter().map(one).collect()
}

/// The devices, if one of them is open or a session waits for one.
fn at_least_one(
    opened: Vec<OpenedDevice>,
    sessions: &HashMap<String, KeptSession>,
) -> Result<Vec<OpenedDevice>, Failure> {
    match sessions.is_empty() && !opened.is_empty() && opened.iter().all(|(_, opening)| opening.is_err()) {
        true => Err(none_open(&opened)),
        false => Ok(opened),
    }
}

/// Why none of these devices is open.
fn none_open(opened: &[OpenedDevice]) -> Failure {
    let why = |(spec, opening): &OpenedDevice| {
        opening.as_ref().err().map(|error| format!("device {}: {}", spec.name, failure::one_line(error)))
    };
    let why: Vec<_> = opened.iter().filter_map(why).collect();
    Failure::request(anyhow!(why.join("; ")))
}

/// Checks that guests would be told of their devices what they were `told`.
///
/// `each`: one that differs is not served, and its session stays kept. `what`: what cannot be done.
///
/// # Errors
/// A device differs, and none is left.
fn check_told(
    opened: &mut [OpenedDevice],
    told: &HashMap<String, Told>,
    is_kept: bool,
    what: &'static str,
    each: bool,
) -> Result<(), Failure> {
    let mut differs = false;
    for (spec, opening) in &mut *opened {
        let (Ok(open), Some(told)) = (&mut *opening, told.get(&spec.name)) else { continue };
        match open.check_told(spec, told, is_kept) {
            Ok(()) => {}
            Err(error) if each => {
                *opening = Err(error.context(what));
                differs = true;
            }
            Err(error) => {
                return Err(Failure::request(error.context(format!("device {}", spec.name)).context(what)));
            }
        }
    }
    match differs && opened.iter().all(|(_, opening)| opening.is_err()) {
        true => Err(none_open(opened)),
        false => Ok(()),
    }
}

/// How the daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All requests in flight are finished.
    Finished,
    /// The stop timeout passed first.
    Late,
    /// A second signal arrived first.
    Interrupted,
}

/// Stops all devices, within the stop timeout.
fn end(exports: &Exports, signals: &Signals, timeout: Duration) -> End {
    exports.begin_stop();
    let deadline = Instant::now() + timeout;
    loop {
        let Turn { time, .. } = exports.advance();
        if exports.is_gone() {
            return End::Finished;
        }
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return End::Late;
        }
        match signals.wait(&[exports.changed()], time.map_or(Some(rest), |time| Some(time.min(rest)))) {
            Ok(Some(Request::End)) => return End::Interrupted,
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "cannot wait for signals");
                return End::Late;
            }
        }
    }
}

/// Raises the soft limit of descriptors.
///
/// A queue takes four or five, and the usual limit is 1024.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        let current = current.unwrap_or(u64::MAX);
        tracing::warn!(%error, "cannot raise RLIMIT_NOFILE above {current}: raise LimitNOFILE=");
    }
}

/// Where the daemon's report is served.
struct Observers<'a> {
    control: Option<&'a Control>,
    metrics: Option<Metrics>,
    process: Arc<ProcessFiles>,
    giver: Option<Arc<Giver>>,
    /// Number of take-overs before this daemon.
    take_overs: u64,
    /// Tells of changes of the host's network, if cards on TAP devices may be served.
    network: Option<NetworkEvents>,
}

/// What the daemon was started with.
struct Configuration<'a> {
    args: &'a ServeArgs,
    file: Option<&'a Arc<ConfigFile>>,
    /// Options of the command line and the file.
    daemon: &'a DaemonArgs,
    verbose: u8,
}

/// Serves until SIGTERM or SIGINT.
///
/// `seal`: deny opening files from now on, and if it is false also connecting.
fn run(
    configuration: &Configuration<'_>,
    exports: &Exports,
    signals: &Signals,
    manager: &systemd::Manager,
    seal: Option<bool>,
    observers: Observers<'_>,
) -> Result<(), Failure> {
    let Observers { control, metrics, process, giver, take_overs, network } = observers;
    let Configuration { args, file: config, .. } = *configuration;
    let report = || {
        let (exports, process) = (exports.clone(), process.clone());
        move || Report {
            open_files: process.count(),
            max_open_files: process::limit(),
            process: process.report(),
            log: report::Log::now(),
            take_overs,
            ..exports.report()
        }
    };
    let mut reloader = Reloader::new(configuration, exports);
    let [control_moved, metrics_moved] =
        giver.as_ref().map_or_else(Default::default, |giver| giver.moved.clone());
    if let (Some(control), Some(giver)) = (control, &giver) {
        let (traced, giver) = (exports.clone(), giver.clone());
        let (snapshots, reloads) = (SnapshotServer::new(exports.clone()), reloader.server.clone());
        let give = move |stream, uid, wanted| match wanted {
            Wanted::HandOver(version) => giver.answer(stream, uid, version),
            Wanted::Snapshot(device) => snapshots.answer(stream, uid, device),
            Wanted::Reload => reloads.answer(stream, uid),
        };
        control.serve(report(), move |device| traced.trace(device), give, control_moved)?;
    }
    if let Some(metrics) = metrics {
        metrics.serve(report(), metrics_moved)?;
    }
    let start = Instant::now();
    let mut is_ready = false;
    loop {
        let has_begun = || giver.as_ref().is_some_and(|giver| giver.has_begun());
        let turn = exports.advance();
        if giver.as_ref().is_some_and(|giver| giver.outcome().is_some()) {
            return Ok(());
        }
        if turn.told {
            manager.tell(&[NotifyState::Ready]);
        }
        reloader.step(&turn, manager, &has_begun);
        if is_ready {
            manager.status(status_line(exports));
        }
        if !is_ready {
            is_ready = match exports.startup() {
                Startup::Complete => true,
                Startup::Failed { why, is_settled: true }
                    if args.config.is_some() && !exports.is_of_use() =>
                {
                    return Err(Failure::request(anyhow!(why)));
                }
                // The daemon of a file serves the others meanwhile.
                Startup::Failed { is_settled: true, .. } if args.config.is_some() => true,
                _ if args.config.is_some() => start.elapsed() >= START_PATIENCE,
                Startup::Waiting => false,
                // The others have clients of the old daemon.
                Startup::Failed { .. } if args.take_over && exports.serves_any() => true,
                Startup::Failed { why, .. } => return Err(anyhow!(why).into()),
            };
            match is_ready {
                true => {
                    config.iter().for_each(|file| file.warn());
                    become_ready(args, manager, seal)?;
                    manager.status(status_line(exports));
                }
                // Most devices begin at once.
                false if start.elapsed() >= STARTUP_INTERVAL => manager.starting(STARTUP_INTERVAL * 10),
                false => {}
            }
        }
        let time = match is_ready {
            true => turn.time,
            false => Some(turn.time.map_or(STARTUP_INTERVAL, |time| time.min(STARTUP_INTERVAL))),
        };
        if exports.has_run_out() {
            tracing::info!("the VMM has disconnected from the inherited socket: exiting");
            return Ok(());
        }
        let network = network.as_ref();
        let others: Vec<_> = [exports.changed()].into_iter().chain(network.map(AsFd::as_fd)).collect();
        let signal = signals.wait(&others, time)?;
        if let Some(network) = network {
            exports.network_changed(&network.take());
        }
        match (signal, config) {
            (None, _) => {}
            (Some(_), _) if giver.as_ref().is_some_and(|giver| giver.has_begun()) => {
                tracing::warn!("signal ignored: the devices are being handed over");
            }
            (Some(Request::End), _) => return Ok(()),
            (Some(Request::Reload), None) => {
                manager.reloading();
                exports.refresh();
                manager.tell(&[NotifyState::Ready]);
            }
            (Some(Request::Reload), Some(_)) => reloader.is_signalled = true,
        }
    }
}

/// What a service manager shows while a device is not served.
fn status_line(exports: &Exports) -> String {
    exports.not_served().map_or_else(String::new, |why| {
        let (served, all) = exports.count();
        format!("serving {served} of {all} devices; not served: {why}")
    })
}

/// Drops the last rights, and reports readiness.
fn become_ready(
    args: &ServeArgs,
    manager: &systemd::Manager,
    seal: Option<bool>,
) -> Result<(), anyhow::Error> {
    if let Some(connects) = seal {
        sandbox::calls::seal(connects)?;
    }
    if let Some(file) = &args.try_sandbox {
        sandbox::probe::run(file);
    }
    tracing::info!("ready");
    manager.ready();
    Ok(())
}

/// What makes the connections to the servers of images, and the file of devices.
type Helpers = (Arc<dyn Connector>, Option<Arc<ConfigFile>>);

/// Starts the processes that connect and read files for a daemon in a sandbox.
fn helpers(
    args: &ServeArgs,
    daemon: &DaemonArgs,
    devices: &[DeviceSpec],
    allowed: Option<&AllowedPaths>,
    user: Option<&Target>,
) -> Result<Helpers, anyhow::Error> {
    let file = args.config.as_deref();
    let Some(allowed) = allowed else {
        return Ok((Arc::new(Direct), file.map(|file| Arc::new(ConfigFile::direct(file)))));
    };
    let locations = devices.iter().flat_map(|device| device.kind.locations());
    let targets: Vec<_> = locations.filter_map(paravane_store::target).collect();
    let way = file.and_then(|file| sandbox::writable::way_to_write(allowed, file, user));
    let name = daemon.user.as_deref();
    let has_broker = !targets.is_empty();
    let flags = SocketFlags::CLOEXEC;
    let (broker, reader) = match file.is_some() && way.is_none() && has_broker {
        true => {
            let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
            let (broker, reader) = pair.context("cannot create a socket")?;
            rustix::io::ioctl_fionbio(&broker, true).context("cannot create a socket")?;
            (Some(broker), Some(reader))
        }
        false => (None, None),
    };
    let connector: Arc<dyn Connector> = match has_broker {
        true => Arc::new(Broker::start(&targets, broker, name)?),
        false => Arc::new(Direct),
    };
    let file = file.map(|file| ConfigFile::start(file, name, reader, way)).transpose()?;
    Ok((connector, file.map(Arc::new)))
}

/// Keys that stay in reach of the sandbox, and the directories by which.
fn readable_keys(allowed: &AllowedPaths, devices: &[DeviceSpec]) -> Vec<(PathBuf, PathBuf)> {
    let keys = devices.iter().flat_map(|device| device.kind.locations()).flat_map(Location::keys);
    let found = keys.filter_map(|key| Some((key.to_owned(), allowed.reads(key)?.to_owned())));
    found.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Where chunks of objects are kept.
fn cache(daemon: &DaemonArgs) -> Option<CacheFolder> {
    let limit_bytes = daemon.cache_size.map_or(CACHE_SIZE, |Size(bytes)| bytes);
    daemon.cache.clone().map(|folder| CacheFolder { folder, limit_bytes })
}

/// The files and directories that the daemon needs.
fn allowed_paths(
    args: &ServeArgs,
    daemon: &DaemonArgs,
    devices: &[DeviceSpec],
    control: Option<&Path>,
) -> AllowedPaths {
    let mut allowed = AllowedPaths::default();
    allowed.threads();
    let more = args.config.is_some();
    if args.config.is_some() {
        allowed.taps();
        daemon.allow.iter().for_each(|directory| allowed.directory(directory));
    }
    if let Some(cache) = &daemon.cache {
        allowed.cache(cache);
    }
    if let Some(control) = control {
        allowed.socket(control);
    }
    for device in devices {
        device.allow(&mut allowed, more);
    }
    allowed
}
