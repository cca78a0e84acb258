//! Formats events as lines.
//!
//! Text: time, level, message, fields, device, and `left_out` if earlier lines were suppressed.
//! JSON: an object with `timestamp`, `level`, `message` and the same fields. Each event is one
//! line: control characters are escaped.
use super::counts::SUPPRESSED;
use super::limit::{Limiter, LineKind, SLOW_REQUESTS, Verdict};
use paravane_device::LogDevice;
use std::cell::Cell;
use std::fmt::{self, Debug, Write};
use std::sync::atomic::Ordering;
use std::time::Instant;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::Context;

/// Format of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Text,
    /// Text with colours, for a terminal.
    Coloured,
    Json,
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is formatting a line, so that a panic comes from there.
pub(super) fn is_inside() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(true)
}

/// Marks the thread as formatting a line until dropped, also by a panic.
struct Inside(bool);

impl Inside {
    fn enter() -> Self {
        Self(INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(self.0));
    }
}

/// Formats the events that the limiter admits.
pub(super) struct Lines {
    pub(super) style: Style,
    pub(super) limiter: &'static Limiter,
    /// Takes a line.
    pub(super) push: Box<dyn Fn(&str) + Send + Sync>,
    /// Wakes the writer, which reports suppressed lines.
    pub(super) wake: Box<dyn Fn() + Send + Sync>,
}

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let _inside = Inside::enter();
        let thread = LogDevice::current();
        let mut named = Named::default();
        event.record(&mut named);
        let device = named.0.as_deref().or(thread.as_deref());
        let level = *event.metadata().level();
        let kind = match level {
            Level::ERROR => LineKind::Error,
            _ if event.metadata().target() == SLOW_REQUESTS => LineKind::SlowRequest,
            _ => LineKind::Other,
        };
        let left_out = match self.limiter.admit(device, kind, Instant::now()) {
            Verdict::Write { left_out } => left_out,
            Verdict::LeaveOut { first } => {
                SUPPRESSED.fetch_add(1, Ordering::Relaxed);
                if first {
                    // The writer reports it if no other line does.
                    (self.wake)();
                }
                return;
            }
        };
        let mut fields = Fields::new(self.style);
        event.record(&mut fields);
        if let (None, Some(device)) = (&named.0, device) {
            fields.add_quoted("device", device);
        }
        if left_out > 0 {
            fields.add("left_out", &left_out.to_string());
        }
        (self.push)(&line(self.style, level, &fields.message, &fields.rest));
    }
}

/// A line about the log itself.
pub(super) fn own_line(style: Style, level: Level, message: &str) -> String {
    line(style, level, message, "")
}

fn line(style: Style, level: Level, message: &str, fields: &str) -> String {
    let mut time = String::new();
    // Writes a placeholder for times that cannot be formatted.
    let _ = SystemTime.format_time(&mut Writer::new(&mut time));
    match style {
        Style::Json => {
            format!(
                "{{\"timestamp\":\"{time}\",\"level\":\"{level}\",\"message\":{}{fields}}}\n",
                json(message)
            )
        }
        Style::Text => format!("{time} {level:>5} {}{fields}\n", Escaped(message)),
        Style::Coloured => {
            let colour = match level {
                Level::ERROR => 31,
                Level::WARN => 33,
                Level::INFO => 32,
                Level::DEBUG => 34,
                _ => 35,
            };
            format!("\x1b[2m{time}\x1b[0m \x1b[{colour}m{level:>5}\x1b[0m {}{fields}\n", Escaped(message))
        }
    }
}

/// Text with control characters escaped.
///
/// They could start a line or control a terminal.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in self.0.split_inclusive(char::is_control) {
            match part.chars().next_back().filter(|last| last.is_control()) {
                Some(last) => {
                    f.write_str(&part[..part.len() - last.len_utf8()])?;
                    write!(f, "{}", last.escape_default())?;
                }
                None => f.write_str(part)?,
            }
        }
        Ok(())
    }
}

fn json(text: &str) -> String {
    // Strings always serialize.
    serde_json::to_string(text).unwrap_or_else(|_| "\"\"".to_owned())
}

/// The device that an event names.
#[derive(Default)]
struct Named(Option<String>);

impl Visit for Named {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "device" {
            self.0 = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "device" {
            self.0 = Some(format!("{value:?}"));
        }
    }
}

/// Message of an event, and its fields as formatted in the line.
struct Fields {
    style: Style,
    message: String,
    rest: String,
}

impl Fields {
    fn new(style: Style) -> Self {
        Self { style, message: String::new(), rest: String::new() }
    }

    /// Adds a field with a formatted value.
    fn add(&mut self, name: &str, value: &str) {
        // Writing to a String cannot fail.
        let _ = match self.style {
            Style::Json => write!(self.rest, ",{}:{value}", json(name)),
            Style::Text => write!(self.rest, " {name}={}", Escaped(value)),
            Style::Coloured => write!(self.rest, " \x1b[3m{name}\x1b[0m={}", Escaped(value)),
        };
    }

    /// Adds a field with quoted text.
    fn add_quoted(&mut self, name: &str, value: &str) {
        match self.style {
            Style::Json => self.add(name, &json(value)),
            Style::Text | Style::Coloured => self.add(name, &format!("{value:?}")),
        }
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        match value.is_finite() {
            true => self.add(field.name(), &format!("{value:?}")),
            // JSON has no such number.
            false => self.add_quoted(field.name(), &value.to_string()),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field.name(), &value.to_string());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field.name(), &value.to_string());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field.name(), &value.to_string());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message = value.to_owned(),
            name => self.add_quoted(name, value),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        match (field.name(), self.style) {
            ("message", _) => self.message = text,
            (name, Style::Json) => self.add_quoted(name, &text),
            (name, _) => self.add(name, &text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;
    use std::sync::{Arc, Mutex};
    use tracing_subscriber::layer::SubscriberExt;

    /// Lines of the events of `log`.
    fn lines(style: Style, rate: Option<u32>, log: impl FnOnce()) -> Vec<String> {
        let written = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&written);
        let limiter = Box::leak(Box::new(Limiter::new(rate.and_then(NonZeroU32::new))));
        let push = move |line: &str| sink.lock().unwrap().push(line.to_owned());
        let layer = Lines { style, limiter, push: Box::new(push), wake: Box::new(|| {}) };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), log);
        let lines = written.lock().unwrap().clone();
        assert!(
            lines.iter().all(|line| line.matches('\n').count() == 1 && line.ends_with('\n')),
            "{lines:?}"
        );
        // Without the time.
        lines.iter().map(|line| line.trim_end().split_once("Z").unwrap().1.trim_start().to_owned()).collect()
    }

    fn some_events() {
        let error = std::io::Error::other("first\nsecond \x1b[31m");
        tracing::warn!(queue = 3, ratio = f64::NAN, name = "a \"b\"", %error, "it\nbroke {}", 7);
        tracing::info!(device = "vm1", yes = true, "ready");
    }

    #[test]
    fn a_line_has_message_fields_and_device_and_no_control_characters() {
        let _device = LogDevice::enter(Some("vm0".into()));
        let text = lines(Style::Text, None, some_events);
        let first = r#"WARN it\nbroke 7 queue=3 ratio="NaN" name="a \"b\"" error=first\nsecond \u{1b}[31m device="vm0""#;
        assert_eq!(text, [first, r#"INFO ready device="vm1" yes=true"#]);
        let json = lines(Style::Json, None, some_events);
        let rest = r#"","level":"WARN","message":"it\nbroke 7","queue":3,"ratio":"NaN","name":"a \"b\"","#;
        let error = r#""error":"first\nsecond \u001b[31m","device":"vm0"}"#;
        assert_eq!(json[0], format!("{rest}{error}"));
        let coloured = lines(Style::Coloured, None, || tracing::error!("oh"));
        assert!(coloured[0].contains("\x1b[31mERROR\x1b[0m oh"), "{coloured:?}");
    }

    #[test]
    fn a_device_that_logs_without_end_is_cut_short_and_the_count_is_a_field() {
        let text = lines(Style::Text, Some(1), || {
            for number in 0..100 {
                let _device = LogDevice::enter(Some("vm0".into()));
                tracing::warn!(number, "session ended");
            }
            tracing::warn!("not the device's");
            tracing::error!(device = "vm0", "failed");
        });
        assert_eq!(text.len(), 22, "{text:?}");
        assert_eq!(text[19], "WARN session ended number=19 device=\"vm0\"");
        assert_eq!(text[21], "ERROR failed device=\"vm0\"");
    }

    #[test]
    fn a_slow_disk_hides_no_other_lines() {
        let text = lines(Style::Text, Some(1), || {
            for number in 0..100 {
                tracing::warn!(target: SLOW_REQUESTS, device = "vm0", number, "slow request");
            }
            tracing::warn!(device = "vm0", "storage error");
            tracing::error!(device = "vm0", "failed");
        });
        assert_eq!(text.len(), 22, "{text:?}");
        assert_eq!(text[19], "WARN slow request device=\"vm0\" number=19");
        assert_eq!(text[20], "WARN storage error device=\"vm0\"");
        assert_eq!(text[21], "ERROR failed device=\"vm0\"");
    }

    #[test]
    fn a_value_that_panics_while_it_is_written_harms_one_line() {
        struct Bad;
        impl Debug for Bad {
            fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
                panic!("no words")
            }
        }
        let text = lines(Style::Text, None, || {
            std::panic::catch_unwind(|| tracing::warn!(bad = ?Bad, "a")).unwrap_err();
            assert!(!is_inside());
            tracing::warn!("b");
        });
        assert_eq!(text, ["WARN b"]);
    }
}
