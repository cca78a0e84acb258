//! The log on stderr: logging never blocks, never fails, and takes bounded memory.
//!
//! ```text
//!  event --level--> lines: one line, with the thread's device --limit--> queue (256 KiB) --writer thread--> stderr
//!                                       |                         |                |
//!                                       '--> suppressed, counted  '--> full: lost, '--> error: lost, counted;
//!                                            with the next line        counted          "N log lines lost"
//! ```
//! stderr may be a pipe without a reader, a closed pipe, or a file on a full file system. Only the
//! writer thread waits for it or sees its errors. O_NONBLOCK is not set, as other processes share
//! the file description.
//!
//! The sandbox must be entered before a second thread starts. Until [`start_writing`], each logging
//! thread writes as much as stderr takes without waiting.
mod counts;
mod limit;
mod lines;
mod panic;
mod queue;
mod writer;

pub(crate) use counts::{LOST, SUPPRESSED};
pub(crate) use limit::SLOW_REQUESTS;

pub(crate) use tracing::Level;

use limit::{Limiter, LineKind};
use lines::{Lines, Style};
use parking_lot::Mutex;
use queue::Queue;
use std::io::IsTerminal;
use std::num::NonZeroU32;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, registry, reload};
use writer::{Stderr, Writer};

/// How long the program waits for stderr at its end.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);
/// Quiet time after which suppressed lines are reported.
const PAUSE: Duration = Duration::from_secs(1);

// A process has one stderr.
static QUEUE: Queue = Queue::new();
/// Taken by the writer thread when it starts.
static WRITER: Mutex<Option<Writer<Stderr>>> = Mutex::new(None);
static LIMITER: OnceLock<Limiter> = OnceLock::new();
/// Set by [`set_up`].
static STYLE: OnceLock<Style> = OnceLock::new();

/// Changes the level; `None`: RUST_LOG names it.
static LEVEL: OnceLock<Option<reload::Handle<EnvFilter, Registry>>> = OnceLock::new();

/// The filter of a level, with so many `-v` options more.
fn filter(base: Level, verbose: u8) -> EnvFilter {
    const ALL: [Level; 5] = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];
    let more = ALL.into_iter().skip_while(|level| *level != base).nth(verbose.into());
    EnvFilter::new(more.unwrap_or(Level::TRACE).as_str())
}

/// Settings of the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Level without `-v`.
    pub(crate) base: Level,
    /// Number of `-v` options.
    pub(crate) verbose: u8,
    /// JSON objects instead of text.
    pub(crate) json: bool,
    /// Lines per second and device; `None`: no limit.
    pub(crate) rate: Option<NonZeroU32>,
}

/// Starts logging to stderr, panics included. RUST_LOG overrides the level.
pub(crate) fn set_up(settings: Settings) {
    let Settings { base, verbose, json, rate } = settings;
    let named = EnvFilter::try_from_default_env().ok();
    let is_named = named.is_some();
    let (filter, handle) = reload::Layer::new(named.unwrap_or_else(|| filter(base, verbose)));
    let style = match json {
        true => Style::Json,
        false if std::io::stderr().is_terminal() => Style::Coloured,
        false => Style::Text,
    };
    // These fail only if the log is set up already.
    let (_, _) = (STYLE.set(style), LIMITER.set(Limiter::new(rate)));
    let _ = LEVEL.set((!is_named).then_some(handle));
    *WRITER.lock() = Some(Writer::new(Stderr, style));
    panic::install(style, push);
    let _ = registry()
        .with(filter)
        .with(Lines { style, limiter: limiter(), push: Box::new(push), wake: Box::new(|| QUEUE.wake()) })
        .try_init();
}

fn limiter() -> &'static Limiter {
    LIMITER.get_or_init(|| Limiter::new(None))
}

/// Changes the level, unless RUST_LOG names it; see [`Settings`].
pub(crate) fn set_level(base: Level, verbose: u8) {
    if let Some(Some(level)) = LEVEL.get() {
        // It fails only if the log is gone.
        let _ = level.reload(filter(base, verbose));
    }
}

/// Changes the number of lines per second and device; `None`: no limit.
pub(crate) fn set_rate(rate: Option<NonZeroU32>) {
    limiter().set_rate(rate);
}

/// Queues a line that ends with a newline.
fn push(line: &str) {
    QUEUE.push(line);
    // Without a writer thread, the logging thread writes as much as stderr takes without waiting.
    if let Some(mut writer) = WRITER.try_lock()
        && let Some(writer) = writer.as_mut()
    {
        writer.write_what_fits(&QUEUE);
    }
}

/// Starts the writer thread, if it does not run.
pub(crate) fn start_writing() {
    let mut idle = WRITER.lock();
    let Some(mut writer) = idle.take() else { return };
    let style = writer.style;
    let write = move || {
        loop {
            writer.write_next(&QUEUE, limiter().owes().then_some(PAUSE));
            report_suppressed(limiter().overdue(Instant::now(), PAUSE));
        }
    };
    if std::thread::Builder::new().name("log".into()).spawn(write).is_err() {
        // Logging threads continue to write.
        *idle = Some(Writer::new(Stderr, style));
    }
}

/// Logs that lines were suppressed.
///
/// The limiter adds the field `left_out` with their number.
fn report_suppressed(buckets: Vec<(Option<Box<str>>, LineKind)>) {
    for (device, kind) in buckets {
        let device = device.as_deref();
        match kind {
            LineKind::Error => tracing::error!(device, "errors suppressed"),
            LineKind::SlowRequest => {
                tracing::warn!(target: SLOW_REQUESTS, device, "slow requests suppressed");
            }
            LineKind::Other => tracing::warn!(device, "messages suppressed"),
        }
    }
}

/// Logs why the program ends.
pub(crate) fn last_words(words: &str) {
    if STYLE.get().is_none() {
        *WRITER.lock() = Some(Writer::new(Stderr, Style::Text));
    }
    push(&match STYLE.get() {
        Some(&style @ Style::Json) => lines::own_line(style, Level::ERROR, words),
        _ => format!("paravane: {words}\n"),
    });
}

/// Writes the queued lines before the program ends, for at most two seconds.
pub(crate) fn finish() {
    report_suppressed(limiter().open());
    if !QUEUE.is_written() {
        start_writing();
        QUEUE.wait_written(Instant::now() + FINISH_TIMEOUT);
    }
}
