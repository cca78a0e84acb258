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
use args::{DaemonArgs, LogFormat, ServeArgs};
use config::Config;
use control::Control;
use fleet::Fleet;
use metrics::Metrics;
use open::FarEnds;
use process::Descriptors;
use report::Report;
use paravane_vhost::MappingPool;
use sandbox::Reach;
use sandbox::user::Target;
use sd_notify::NotifyState;
use signals::{Asked, Signals};
use spec::{DeviceSpec, Endpoint, Kind};
use std::num::NonZeroU32;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// Log lines per second and device.
const LOG_RATE: u32 = 1;

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

    let mut far_ends = FarEnds::default();
    let mut opened = Vec::new();
    for spec in devices {
        let device = fleet::open_one(&spec, &mut far_ends, reach.as_ref());
        let device = device.with_context(|| format!("device {}", spec.name)).map_err(Failure::request)?;
        opened.push((spec, device));
    }
    if let Some(user) = &user {
        user.become_it()?;
    }
    // From here on nobody waits for stderr.
    log::start_writing();
    let connects = opened.iter().any(|(spec, _)| matches!(spec.endpoint, Endpoint::Connect(_)));
    let fleet = Fleet::start(opened, &sockets, pool)?;
    // From here on the sockets are there, and must be removed whatever happens.
    let result = run(
        args,
        &fleet,
        &signals,
        &manager,
        &sockets,
        reach.as_ref(),
        connects,
        control.as_ref(),
        metrics,
        &descriptors,
    );
    manager.tell(&[NotifyState::Stopping]);
    fleet.stop();
    Ok(result?)
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

#[expect(clippy::too_many_arguments, reason = "all that there is by now")]
fn run(
    args: &ServeArgs,
    fleet: &Fleet,
    signals: &Signals,
    manager: &systemd::Manager,
    sockets: &fleet::Sockets,
    reach: Option<&Reach>,
    connects: bool,
    control: Option<&Control>,
    metrics: Option<Metrics>,
    descriptors: &Arc<Descriptors>,
) -> Result<(), anyhow::Error> {
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
    if reach.is_some() && args.config.is_none() {
        sandbox::calls::seal(connects)?;
    }
    if let Some(file) = &args.try_sandbox {
        sandbox::try_out(file);
    }
    tracing::info!("ready");
    manager.tell(&[NotifyState::Ready]);
    loop {
        match signals.next()? {
            Asked::End => return Ok(()),
            Asked::Reload => {
                manager.reloading();
                fleet.look_at_sizes();
                match args.config.as_deref().map(Config::read) {
                    None => {}
                    Some(Ok(config)) => fleet.reload(config.devices, sockets, reach),
                    Some(Err(error)) => fleet.refused(error.to_string()),
                }
                manager.tell(&[NotifyState::Ready]);
            }
        }
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
                reach.image(&blk.image, blk.read_only, more);
                blk.backing.iter().for_each(|layer| reach.image(&layer.path, true, more));
            }
            Kind::Net(spec::Net { network: spec::Network::Tap(_), .. }) => reach.taps(),
            _ => {}
        }
    }
    reach
}
