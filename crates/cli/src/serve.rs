//! `paravane serve` and `paravane status`.
//!
//! ```text
//!  args (command line) --.
//!                         >-- spec: what is to be served --> open: devices --> fleet: exports, one a device
//!  config (file) --------'                                                       |        |
//!  sandbox: what is given up on the way           signals: SIGHUP, SIGTERM ------'        '--> report
//!                                                             reporter, connections: control (status), metrics
//! ```
pub(crate) mod args;
mod config;
mod connections;
mod control;
mod fleet;
mod limits;
mod metrics;
mod open;
mod process;
mod report;
mod reporter;
mod sandbox;
mod signals;
mod spec;
pub(crate) mod status;
mod systemd;

use crate::{Failure, log, output};
use anyhow::{Context, anyhow};
use args::{DaemonArgs, Format, LogFormat, ServeArgs};
use config::Config;
use control::Control;
use fleet::{Fleet, Surroundings};
use metrics::Metrics;
use open::{FarEnds, Opened};
use paravane_vhost::{MappingPool, Notifier, caught};
use process::Descriptors;
use report::Report;
use sandbox::user::Target;
use sandbox::{ImageAccess, Reach};
use sd_notify::NotifyState;
use signals::{Asked, Signals};
use spec::{DeviceSpec, Endpoint, Kind};
use std::io;
use std::num::NonZeroU32;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Log lines per second and device.
const LOG_RATE: u32 = 1;
/// How long SIGTERM waits for requests in flight, unless told otherwise.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn main(args: &ServeArgs, verbose: u8) -> Result<ExitCode, Failure> {
    let Config { daemon, devices } = request(args).map_err(Failure::request)?;
    log::set_up(log::Settings {
        base: log::Level::Info,
        verbose,
        json: daemon.log_format == Some(LogFormat::Json),
        // -v lifts the limit.
        rate: NonZeroU32::new(daemon.log_rate.unwrap_or(if verbose == 0 { LOG_RATE } else { 0 })),
    });
    if args.check {
        check(&daemon, &devices).map_err(Failure::request)?;
        output::print(&format!("{} devices are in order\n", devices.len()))?;
        return Ok(ExitCode::SUCCESS);
    }
    serve(args, &daemon, devices)?;
    Ok(ExitCode::SUCCESS)
}

/// What is asked for, by the command line and the file.
fn request(args: &ServeArgs) -> Result<Config, anyhow::Error> {
    match (&args.device, &args.config) {
        (None, None) => Err(anyhow!("name a device, blk, net or rng, or a file of devices with --config")),
        (Some(_), Some(_)) => Err(anyhow!("--config is a file of devices, and one is named as well")),
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

/// The file's words on the daemon, unless the command line says otherwise.
fn override_with(file: DaemonArgs, line: &DaemonArgs) -> DaemonArgs {
    let line = line.clone();
    DaemonArgs {
        control: line.control.or(file.control),
        metrics: line.metrics.or(file.metrics),
        user: line.user.or(file.user),
        allow: [file.allow, line.allow].concat(),
        no_sandbox: line.no_sandbox || file.no_sandbox,
        log_format: line.log_format.or(file.log_format),
        log_rate: line.log_rate.or(file.log_rate),
        max_client_memory: line.max_client_memory.or(file.max_client_memory),
        max_memory: line.max_memory.or(file.max_memory),
        max_mappings: line.max_mappings.or(file.max_mappings),
        stop_timeout: line.stop_timeout.or(file.stop_timeout),
    }
}

/// Looks at what can be looked at without an effect.
fn check(daemon: &DaemonArgs, devices: &[DeviceSpec]) -> Result<(), anyhow::Error> {
    if let Some(user) = &daemon.user {
        Target::find(user)?;
    }
    limits::mapping(daemon)?;
    for device in devices {
        let named = || format!("device {}", device.name);
        for image in device.images() {
            let file =
                std::fs::metadata(image).with_context(|| image.display().to_string()).with_context(named)?;
            if file.is_dir() {
                return Err(anyhow!("{} is a directory", image.display())).with_context(named);
            }
        }
        let directory = device.socket().and_then(Path::parent).filter(|path| !path.as_os_str().is_empty());
        if let Some(directory) = directory
            && !directory.is_dir()
        {
            return Err(anyhow!("{} is no directory", directory.display())).with_context(named);
        }
    }
    Ok(())
}

fn serve(args: &ServeArgs, daemon: &DaemonArgs, devices: Vec<DeviceSpec>) -> Result<(), Failure> {
    check(daemon, &devices).map_err(Failure::request)?;
    let signals = Signals::take().context("cannot catch signals")?;
    take_all_descriptors();
    // Before the sandbox, which hides what the host says of itself.
    let pool = MappingPool::new(limits::mapping(daemon).map_err(Failure::request)?);
    let manager = systemd::Manager::from_environment()?;
    let sockets = systemd::sockets()?;
    let user = daemon.user.as_deref().map(Target::find).transpose().map_err(Failure::request)?;
    let metrics = daemon.metrics.map(Metrics::bind).transpose()?;
    let control = Control::open(daemon.control.as_deref())?;
    let descriptors = Arc::new(Descriptors::open());

    let reach = if daemon.no_sandbox {
        tracing::warn!(
            "no sandbox: a guest that takes over this process can open any file, make any connection and start any \
             program that its user can"
        );
        None
    } else {
        let reach = reach(args, daemon, &devices, control.as_ref());
        sandbox::enter(&reach)?;
        Some(reach)
    };

    let sandboxed = reach.is_some();
    let kept = sandbox::capabilities::needed(&devices, args.config.is_some());
    let reach = reach.map(Arc::new);
    let connects = devices.iter().any(|spec| matches!(spec.endpoint, Endpoint::Connect(_)));
    let Some(opened) = open_all(devices, reach.clone(), &signals)? else {
        tracing::info!("asked to end before all devices were open");
        return Ok(());
    };
    match &user {
        user if sandboxed => sandbox::leave(user.as_ref(), kept)?,
        Some(user) => user.become_it()?,
        None => {}
    }
    // From here on nobody waits for stderr.
    log::start_writing();
    let stop_timeout =
        daemon.stop_timeout.map_or(STOP_TIMEOUT, |seconds| Duration::from_secs(seconds.into()));
    let surroundings = Surroundings { sockets, reach, stop_timeout, pool };
    let sealed = surroundings.reach.is_some() && args.config.is_none();
    let fleet = Fleet::start(opened, surroundings)?;
    // From here on the sockets are there, and must be removed whatever happens.
    let seal = sealed.then_some(connects);
    let watchers = Watchers { control: control.as_ref(), metrics, descriptors };
    let result = run(args, &fleet, &signals, &manager, seal, watchers);
    manager.stopping(stop_timeout);
    match end(&fleet, &signals, stop_timeout) {
        End::Finished => Ok(result?),
        unfinished => {
            tracing::error!(
                "{}",
                match unfinished {
                    End::Interrupted =>
                        "asked to end a second time: not waiting for requests in flight".to_owned(),
                    _ => format!("requests in flight were not finished in {} s", stop_timeout.as_secs()),
                }
            );
            fleet.log_what_is_left();
            // Its file goes.
            drop(control);
            crate::exit(if unfinished == End::Interrupted { 130 } else { 1 })
        }
    }
}

/// Opens all devices, in a thread of its own: storage may hang. `None`: a signal has asked to end meanwhile.
fn open_all(
    devices: Vec<DeviceSpec>,
    reach: Option<Arc<Reach>>,
    signals: &Signals,
) -> Result<Option<Vec<(DeviceSpec, Opened)>>, Failure> {
    let (sender, receiver) = channel();
    let done = Arc::new(Notifier::new(false).context("no descriptors are left")?);
    let signal = Arc::clone(&done);
    let open = move || {
        let mut far_ends = FarEnds::default();
        let open = |spec: DeviceSpec| {
            let device = fleet::open_one(&spec, &mut far_ends, reach.as_deref());
            let device = device.with_context(|| format!("device {}", spec.name)).map_err(Failure::request)?;
            Ok((spec, device))
        };
        let opened = devices.into_iter().map(open).collect::<Result<Vec<_>, Failure>>();
        // Nobody waits for it any more if a signal came.
        drop(sender.send(opened));
        signal.signal();
    };
    let thread = std::thread::Builder::new().name("open".into()).spawn(open)?;
    loop {
        match receiver.try_recv() {
            Ok(opened) => {
                // Rights are given up by the threads that are there.
                let _ = thread.join();
                return opened.map(Some);
            }
            // It panicked.
            Err(TryRecvError::Disconnected) => {
                let panic = thread.join().err();
                return Err(anyhow!("cannot open the devices: {}", panic.map_or("", |_| "panic")).into());
            }
            Err(TryRecvError::Empty) => {}
        }
        if signals.wait(done.as_fd(), None)? == Some(Asked::End) {
            return Ok(None);
        }
    }
}

/// How the devices have stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All requests in flight are finished.
    Finished,
    /// Some are not, and the time is over.
    Late,
    /// A second signal has asked to end.
    Interrupted,
}

/// Stops all devices.
fn end(fleet: &Fleet, signals: &Signals, timeout: Duration) -> End {
    fleet.begin_stop();
    let deadline = Instant::now() + timeout;
    loop {
        let (time, _) = fleet.advance();
        if fleet.is_gone() {
            return End::Finished;
        }
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return End::Late;
        }
        match signals.wait(fleet.changed(), time.map_or(Some(rest), |time| Some(time.min(rest)))) {
            Ok(Some(Asked::End)) => return End::Interrupted,
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "cannot wait");
                return End::Late;
            }
        }
    }
}

/// A queue takes four descriptors or five, and a shell gives a process 1024.
fn take_all_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::warn!(%error, "there are {current:?} descriptors only");
    }
}

/// Who is shown how the daemon is, and what of it.
struct Watchers<'a> {
    control: Option<&'a Control>,
    metrics: Option<Metrics>,
    descriptors: Arc<Descriptors>,
}

/// Serves until a signal asks to end. With `seal`, the sandbox is closed to files, and if that is false to connections.
fn run(
    args: &ServeArgs,
    fleet: &Fleet,
    signals: &Signals,
    manager: &systemd::Manager,
    seal: Option<bool>,
    watchers: Watchers<'_>,
) -> Result<(), anyhow::Error> {
    let Watchers { control, metrics, descriptors } = watchers;
    let report = || {
        let (fleet, descriptors) = (fleet.clone(), descriptors.clone());
        move || Report { open_files: descriptors.count(), max_open_files: process::limit(), ..fleet.report() }
    };
    if let Some(control) = control {
        control.serve(report())?;
    }
    if let Some(metrics) = metrics {
        metrics.serve(report())?;
    }
    if let Some(connects) = seal {
        sandbox::calls::seal(connects)?;
    }
    if let Some(file) = &args.try_sandbox {
        sandbox::try_out(file);
    }
    tracing::info!("ready");
    manager.tell(&[NotifyState::Ready]);
    let mut reading: Option<Reading> = None;
    // SIGHUP came while the file was read.
    let mut again = false;
    loop {
        if let Some(read) = reading.as_ref().and_then(Reading::result) {
            reading = None;
            match read {
                Ok(config) => fleet.reload(config.devices),
                Err(why) => {
                    fleet.refused(&why);
                    manager.tell(&[NotifyState::Ready]);
                }
            }
            if let (true, Some(file)) = (std::mem::take(&mut again), &args.config) {
                reading = Some(Reading::begin(file, fleet.notifier())?);
            }
        }
        let (time, told) = fleet.advance();
        if told {
            manager.tell(&[NotifyState::Ready]);
        }
        match (signals.wait(fleet.changed(), time)?, &args.config) {
            (None, _) => {}
            (Some(Asked::End), _) => return Ok(()),
            (Some(Asked::Reload), None) => {
                manager.reloading();
                fleet.refresh();
                manager.tell(&[NotifyState::Ready]);
            }
            (Some(Asked::Reload), Some(_)) if reading.is_some() => again = true,
            (Some(Asked::Reload), Some(file)) => {
                manager.reloading();
                fleet.refresh();
                reading = Some(Reading::begin(file, fleet.notifier())?);
            }
        }
    }
}

/// A file of devices that is being read, by a thread: its storage may hang.
struct Reading {
    result: Receiver<Result<Config, String>>,
}

impl Reading {
    /// `done` is signalled when it has been read.
    fn begin(file: &Path, done: Arc<Notifier>) -> io::Result<Self> {
        let file = file.to_owned();
        let (sender, result) = channel();
        let read = move || {
            let read = caught(|| Config::read(&file).map_err(|error| error.to_string())).flatten();
            // Nobody wants it any more when the daemon ends.
            drop(sender.send(read));
            done.signal();
        };
        std::thread::Builder::new().name("reload".into()).spawn(read)?;
        Ok(Self { result })
    }

    /// What came of it, once; `None`: nothing yet.
    fn result(&self) -> Option<Result<Config, String>> {
        self.result.try_recv().ok()
    }
}

/// The files that the daemon will need.
fn reach(args: &ServeArgs, daemon: &DaemonArgs, devices: &[DeviceSpec], control: Option<&Control>) -> Reach {
    let mut reach = Reach::default();
    let more = args.config.is_some();
    if let Some(file) = &args.config {
        reach.config(file);
        reach.taps();
        daemon.allow.iter().for_each(|directory| reach.directory(directory));
    }
    if let Some(control) = control {
        reach.socket(&control.path);
    }
    for device in devices {
        if let Some(socket) = device.socket() {
            reach.socket(socket);
        }
        match &device.kind {
            Kind::Blk(blk) => {
                let access = match (blk.read_only, blk.format) {
                    (true, _) => ImageAccess::Read,
                    (false, Format::Raw) => ImageAccess::Write,
                    (false, Format::Qcow2) => ImageAccess::Grow,
                };
                reach.image(&blk.image, access, more);
                blk.backing.iter().for_each(|layer| reach.image(&layer.path, ImageAccess::Read, more));
            }
            Kind::Net(spec::Net { network: spec::Network::Tap(_), .. }) => reach.taps(),
            _ => {}
        }
    }
    reach
}
