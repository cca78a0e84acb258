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
mod daemon_options;
pub(crate) mod deadline;
mod exports;
mod helper;
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
use crate::log;
use anyhow::anyhow;
use args::{LogFormat, ServeArgs};
use config::Config;
use paravane_command_line::output;
use spec::DeviceSpec;
use start::Setup;
use std::process::ExitCode;

pub(crate) fn main(args: &ServeArgs, verbose: u8) -> Result<ExitCode, Failure> {
    if let Some(device) = &args.device
        && device.endpoint.print_capabilities
    {
        conventions::print_capabilities(device.kind)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Config { daemon, devices } = configuration(args).map_err(Failure::request)?;
    log::set_up(log::Settings {
        base: daemon.log_level(),
        verbose,
        json: daemon.log_format == Some(LogFormat::Json),
        rate: daemon.log_rate(verbose),
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
            Ok(Config { daemon: args.daemon.clone().over(daemon), devices })
        }
    }
}
