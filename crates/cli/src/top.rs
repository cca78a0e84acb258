//! `paravane top`: all devices of all daemons, live.
//!
//! ```text
//!   sampler thread: ask all daemons --Sample--> view: order, scroll, filter --frame--> screen --> terminal
//!                                                 ^
//!   stdin --keys--> input ------------------------'          signals: end, resize, suspend
//! ```
//! A daemon that does not answer delays samples, and never keys or signals.
mod columns;
mod history;
mod input;
mod sample;
mod screen;
mod view;

use crate::failure::Failure;
use crate::log;
use crate::serve::args::TopArgs;
use crate::serve::status::selection::missing as missing_of;
use anyhow::{Context, anyhow};
use input::{Input, Key};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use paravane_command_line::output;
use paravane_notify::Notifier;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use sample::{Sample, Sampler};
use screen::Screen;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;
use view::{Outcome, View};

/// Exit status after a signal.
const STOPPED: u8 = 130;
/// Signals that the program takes itself.
const SIGNALS: [Signal; 6] =
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGTSTP, Signal::SIGWINCH];

pub(crate) fn main(args: &TopArgs) -> Result<ExitCode, Failure> {
    let interval = Duration::try_from_secs_f64(args.interval).ok();
    let interval = interval.filter(|time| (0.1..=3600.0).contains(&time.as_secs_f64()));
    let interval = interval
        .ok_or_else(|| anyhow!("--interval {}: use 0.1 to 3600 seconds", args.interval))
        .map_err(Failure::request)?;
    let live = !args.once && !args.json;
    if live && !std::io::stdout().is_terminal() {
        return Err(Failure::request(anyhow!("stdout is no terminal: use --once or --json")));
    }
    let sampler = Sampler::new(args.control.clone());
    if live {
        // Before a second thread starts: threads inherit the mask.
        let signals = SigSet::from_iter(SIGNALS);
        signals.thread_block().context("cannot block signals")?;
        log::start_writing();
        return live_view(args, interval, sampler, &signals);
    }
    log::start_writing();
    print(args, interval, sampler)
}

/// Prints samples without a terminal: one, or a line of JSON for each.
fn print(args: &TopArgs, interval: Duration, mut sampler: Sampler) -> Result<ExitCode, Failure> {
    let first = sampler.sample()?;
    let mut silent = first.silent;
    let mut view = View::new(args);
    let mut missing;
    loop {
        std::thread::sleep(interval);
        let sample = sampler.sample()?;
        silent.clone_from(&sample.silent);
        let devices = sample.rows.iter().map(|row| row.device.as_str());
        missing = missing_of(&args.devices, devices).collect::<Vec<_>>();
        if args.json {
            let mut line = serde_json::to_string(&view.chosen(&sample)).context("JSON")?;
            line.push('\n');
            if !output::write(&line)? {
                return Ok(ExitCode::SUCCESS);
            }
        } else {
            view.take(sample);
            output::print(&view.plain(paravane_command_line::wrap::terminal()))?;
        }
        if args.once {
            break;
        }
    }
    silent.extend(missing);
    match &silent[..] {
        [] => Ok(ExitCode::SUCCESS),
        silent => Err(anyhow!("{}", silent.join("; ")).into()),
    }
}

/// Shows samples until a key or a signal ends it.
fn live_view(
    args: &TopArgs,
    interval: Duration,
    sampler: Sampler,
    signals: &SigSet,
) -> Result<ExitCode, Failure> {
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(signals, flags).context("cannot read signals")?;
    let ready = Arc::new(Notifier::new(false).context("cannot create an eventfd")?);
    let samples = start(sampler, interval, Arc::clone(&ready))?;
    let mut view = View::new(args);
    let mut input = Input::default();
    let mut screen = Screen::enter()?;
    screen.show(&view)?;
    loop {
        let stdin = std::io::stdin();
        let mut fds = vec![
            PollFd::new(&signals, PollFlags::IN),
            PollFd::from_borrowed_fd(ready.as_fd(), PollFlags::IN),
        ];
        if !input.ended {
            fds.push(PollFd::new(&stdin, PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(anyhow!(error).context("cannot wait for keys").into()),
        }
        let has_keys = fds.get(2).is_some_and(|fd| !fd.revents().is_empty());
        while let Some(signal) = signals.read_signal().context("cannot read signals")? {
            match Signal::try_from(signal.ssi_signo as i32) {
                Ok(Signal::SIGWINCH) => screen.resize(),
                Ok(Signal::SIGTSTP) => screen.suspend()?,
                _ => return Ok(ExitCode::from(STOPPED)),
            }
        }
        let _ = ready.take();
        loop {
            match samples.try_recv() {
                Ok(Ok(sample)) => view.take(sample),
                Ok(Err(error)) => return Err(error.into()),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    return Err(anyhow!("internal error: the thread that asks daemons panicked").into());
                }
            }
        }
        if has_keys {
            for key in input.read(&stdin) {
                if key == Key::Suspend {
                    screen.suspend()?;
                } else if view.press(key, screen.rows) == Outcome::Quit {
                    return Ok(ExitCode::SUCCESS);
                }
            }
        }
        screen.show(&view)?;
    }
}

/// Takes samples in a thread, and signals `ready` for each.
fn start(
    mut sampler: Sampler,
    interval: Duration,
    ready: Arc<Notifier>,
) -> Result<Receiver<Result<Sample, anyhow::Error>>, anyhow::Error> {
    let (sender, samples) = sync_channel(1);
    let work = move || {
        // Signals the end of the thread, after a panic too.
        let ready = Ready(ready);
        let mut pause = Duration::ZERO;
        loop {
            std::thread::sleep(pause);
            // The second sample comes soon, so that there are rates.
            pause = if pause.is_zero() { interval.min(Duration::from_secs(1)) } else { interval };
            let sample = sampler.sample();
            let failed = sample.is_err();
            if sender.send(sample).is_err() || failed {
                return;
            }
            ready.0.signal();
        }
    };
    std::thread::Builder::new().name("sampler".into()).spawn(work)?;
    Ok(samples)
}

/// Signals when it is dropped.
struct Ready(Arc<Notifier>);

impl Drop for Ready {
    fn drop(&mut self) {
        self.0.signal();
    }
}
