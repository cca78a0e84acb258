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
pub(crate) mod check;
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
mod run;
pub(crate) mod sandbox;
pub(crate) mod shelf;
pub(crate) mod signals;
mod slow;
pub(crate) mod snapshot;
mod sockets;
pub(crate) mod spec;
mod start;
pub(crate) mod status;
pub(crate) mod store;
pub(crate) mod systemd;
pub(crate) mod take_over;
mod threads;
pub(crate) mod told;
pub(crate) mod trace;
pub(crate) mod wire;

use crate::conventions;
use crate::failure::Failure;
use crate::kinds;
use crate::{log, output};
use anyhow::anyhow;
use args::{DaemonArgs, LogFormat, LogLevel, ServeArgs};
use config::Config;
use spec::DeviceSpec;
use start::Setup;
use std::num::NonZeroU32;
use std::process::ExitCode;

/// Default log lines per second and device.
const LOG_RATE: u32 = 1;

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
        check::check(&daemon, &devices).map_err(Failure::request)?;
        if let (Some(control), Some(file)) = (&args.against, &args.config) {
            return crate::reload::against(control, file);
        }
        let noun = if devices.len() == 1 { "device" } else { "devices" };
        output::print(&format!("configuration valid: {} {noun}\n", devices.len()))?;
        return Ok(ExitCode::SUCCESS);
    }
    start::serve(&Setup { args, daemon: &daemon, verbose }, devices)?;
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
