//! The log on stderr: it never makes its writers wait, never fails, and is bounded.
//!
//! ```text
//!  event --level--> lines: one line, with the thread's device --limit--> queue (256 KiB) --writer thread--> stderr
//!                                       |                         |                |
//!                                       '--> left out, counted    '--> full: lost, '--> error: lost, counted;
//!                                            with the next line        counted          "N log lines lost"
//! ```
//! stderr may be a pipe that nobody reads, a closed one, or a file on a full file system. Only the writer thread waits for it
//! or sees its errors. O_NONBLOCK is not set: other processes share the file description.
//!
//! The sandbox must be entered before there is a second thread. Until [`start_writing`] the thread that logs writes what stderr
//! takes at once.
mod limit;
mod lines;
mod panic;
mod queue;
mod writer;

use limit::{Limiter, Severity};
use lines::{Lines, Style};
use queue::Queue;
use std::io::IsTerminal;
use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, registry};
use writer::{Stderr, Writer};

/// How long the end of the program waits for stderr.
const PATIENCE: Duration = Duration::from_secs(2);
/// How soon a line tells what was left out if no other line does.
const PAUSE: Duration = Duration::from_secs(1);

// A process has one stderr.
static QUEUE: Queue = Queue::new();
/// Taken by the writer thread when it starts.
static WRITER: Mutex<Option<Writer<Stderr>>> = Mutex::new(None);
static LIMITER: OnceLock<Limiter> = OnceLock::new();
/// There once the log is set up.
static STYLE: OnceLock<Style> = OnceLock::new();

/// What is logged if nobody asks for more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Warn,
    Info,
}

/// How the log is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Level without `-v`.
    pub(crate) base: Level,
    /// How often `-v` was given.
    pub(crate) verbose: u8,
    /// JSON objects instead of text.
    pub(crate) json: bool,
    /// Lines per second and device; `None`: no limit.
    pub(crate) rate: Option<NonZeroU32>,
}

/// Logs to stderr from now on; RUST_LOG overrides the level. Panics are logged, too.
pub(crate) fn set_up(settings: Settings) {
    let Settings { base, verbose, json, rate } = settings;
    let level = match (base, verbose) {
        (Level::Warn, 0) => "warn",
        (Level::Warn, 1) | (Level::Info, 0) => "info",
        (Level::Warn, 2) | (Level::Info, 1) => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let style = match json {
        true => Style::Json,
        false if std::io::stderr().is_terminal() => Style::Coloured,
        false => Style::Text,
    };
    // They fail only if there is a log already.
    let (_, _) = (STYLE.set(style), LIMITER.set(Limiter::new(rate)));
    *idle_writer() = Some(Writer::new(Stderr, style));
    panic::install(style);
    let _ = registry().with(filter).with(Lines::new(style, limiter(), push)).try_init();
}

fn idle_writer() -> MutexGuard<'static, Option<Writer<Stderr>>> {
    // A writer that a panic has interrupted has lost a line at most.
    WRITER.lock().unwrap_or_else(PoisonError::into_inner)
}

fn limiter() -> &'static Limiter {
    LIMITER.get_or_init(|| Limiter::new(None))
}

/// Queues a line, which ends with a newline.
fn push(line: &str) {
    QUEUE.push(line);
    // Without a writer thread, whoever logs writes what stderr takes without a wait.
    if let Ok(mut writer) = WRITER.try_lock()
        && let Some(writer) = writer.as_mut()
    {
        writer.write_what_fits(&QUEUE);
    }
}

/// The writer looks at what is to be told of lines left out.
fn wake_writer() {
    QUEUE.wake();
}

/// Starts the writer thread, if it does not run.
pub(crate) fn start_writing() {
    let mut idle = idle_writer();
    let Some(mut writer) = idle.take() else { return };
    let style = writer.style();
    let write = move || {
        loop {
            writer.write_next(&QUEUE, limiter().owes().then_some(PAUSE));
            tell(limiter().overdue(Instant::now(), PAUSE));
        }
    };
    if std::thread::Builder::new().name("log".into()).spawn(write).is_err() {
        // Whoever logs writes by itself, as before.
        *idle = Some(Writer::new(Stderr, style));
    }
}

/// Logs that lines were left out; as in any other line, the field `left_out` says how many.
fn tell(rooms: Vec<(Option<Box<str>>, Severity)>) {
    for (device, severity) in rooms {
        let device = device.as_deref();
        match severity {
            Severity::Error => tracing::error!(device, "errors left out"),
            Severity::Other => tracing::warn!(device, "messages left out"),
        }
    }
}

/// Says why the program ends, after all that was logged.
pub(crate) fn last_words(words: &str) {
    match STYLE.get() {
        Some(&style @ Style::Json) => push(&lines::own_line(style, tracing::Level::ERROR, words)),
        Some(_) => push(&format!("paravane: {words}\n")),
        None => {
            *idle_writer() = Some(Writer::new(Stderr, Style::Text));
            push(&format!("paravane: {words}\n"));
        }
    }
}

/// Writes what is queued. Called before the program ends; gives up after two seconds if stderr does not take it.
pub(crate) fn finish() {
    tell(limiter().open());
    if !QUEUE.is_written() {
        start_writing();
        QUEUE.wait_written(Instant::now() + PATIENCE);
    }
}
