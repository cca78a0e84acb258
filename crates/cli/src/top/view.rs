//! What the screen shows: the last sample, its order, and the part of it in view.
use super::columns::{Order, Style, Table, short, table};
use super::input::Key;
use super::sample::{Row, Sample};
use crate::printable::printable;
use crate::serve::args::{TopArgs, TopKey};
use crate::serve::status::order::natural;
use crate::serve::status::selection::Names;
use clap::ValueEnum;
use std::cmp::Ordering;

/// Lines above the rows: two of summary, one of heads.
const ABOVE: usize = 3;
/// Lines below the rows: one of keys.
const BELOW: usize = 1;
const KEYS: [&str; 6] = ["q quit", "s/S sort", "r reverse", "p problems", "space pause", "arrows scroll"];
const REVERSE: &str = "\u{1b}[7m";
const RED: &str = "\u{1b}[31m";
const RESET: &str = "\u{1b}[0m";

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Stay,
    Quit,
}

/// State of the view.
#[derive(Debug)]
pub(super) struct View {
    names: Names,
    order: Order,
    interval: f64,
    /// Show only devices with problems.
    problems: bool,
    paused: bool,
    /// Rows above the first one in view.
    offset: usize,
    /// `None`: no daemon was asked yet.
    sample: Option<Sample>,
    pub(super) style: Style,
}

impl View {
    pub(super) fn new(args: &TopArgs) -> Self {
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
            .into_iter()
            .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
        let utf8 = locale.is_some_and(|locale| {
            let locale = locale.to_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        });
        let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self {
            names: Names::new(&args.devices),
            order: Order { key: args.sort, reverse: args.reverse },
            interval: args.interval,
            problems: false,
            paused: false,
            offset: 0,
            sample: None,
            style: Style { utf8, colours, history: true },
        }
    }

    /// Shows a sample from now on.
    pub(super) fn take(&mut self, sample: Sample) {
        if !self.paused {
            self.sample = Some(sample);
        }
    }

    /// Acts on a key. `rows`: lines of the screen.
    pub(super) fn press(&mut self, key: Key, rows: usize) -> Outcome {
        let page = rows.saturating_sub(ABOVE + BELOW + 1).max(1);
        let count = self.sample.as_ref().map_or(0, |sample| self.chosen(sample).len());
        let keys = TopKey::value_variants();
        let at = keys.iter().position(|key| *key == self.order.key).unwrap_or(0);
        match key {
            Key::Char('q' | 'Q') => return Outcome::Quit,
            Key::Char('s') => self.order.key = keys[(at + 1) % keys.len()],
            Key::Char('S') => self.order.key = keys[(at + keys.len() - 1) % keys.len()],
            Key::Char('r') => self.order.reverse = !self.order.reverse,
            Key::Char('p') => self.problems = !self.problems,
            Key::Char(' ') => self.paused = !self.paused,
            Key::Down | Key::Char('j') => self.offset += 1,
            Key::Up | Key::Char('k') => self.offset = self.offset.saturating_sub(1),
            Key::PageDown => self.offset += page,
            Key::PageUp => self.offset = self.offset.saturating_sub(page),
            Key::Home => self.offset = 0,
            Key::End => self.offset = count,
            Key::Char(_) | Key::Suspend | Key::Redraw => {}
        }
        self.offset = self.offset.min(count.saturating_sub(page));
        Outcome::Stay
    }

    /// Rows of a sample that are wanted, in order.
    pub(super) fn chosen<'a>(&self, sample: &'a Sample) -> Vec<&'a Row> {
        let is_wanted = |row: &&Row| self.names.has(&row.device) && (!self.problems || row.problem);
        let mut rows: Vec<_> = sample.rows.iter().filter(is_wanted).collect();
        rows.sort_by(|one, other| {
            let by_name = natural(&one.device, &other.device).then(one.pid.cmp(&other.pid));
            let order = self.compare(one, other);
            let order = if self.order.key == TopKey::Name { by_name } else { order };
            let order = if self.order.reverse { order.reverse() } else { order };
            order.then(by_name)
        });
        rows
    }

    /// Numbers descending.
    fn compare(&self, one: &Row, other: &Row) -> Ordering {
        let value = |row: &Row| match self.order.key {
            TopKey::Done => row.rates.completed_per_s,
            TopKey::P50 => row.latency(|all| all.p50_ns).unwrap_or(0) as f64,
            TopKey::P99 => row.latency(|all| all.p99_ns).unwrap_or(0) as f64,
            TopKey::Depth => row.rates.depth.unwrap_or(0.0),
            TopKey::Cpu => row.cpu_percent,
            TopKey::Errors => row.errors as f64,
            TopKey::Name => 0.0,
        };
        value(other).total_cmp(&value(one))
    }

    /// Parts of the two lines of summary, the most important first.
    fn summary(&self, sample: &Sample, rows: &[&Row]) -> [Vec<String>; 2] {
        let noun = |count: usize, one: &str| format!("{count} {one}{}", if count == 1 { "" } else { "s" });
        let connected = rows.iter().filter(|row| row.connected).count();
        let problems = rows.iter().filter(|row| row.problem).count();
        let mut first = vec![format!("paravane top: {}", noun(sample.daemons, "daemon"))];
        first.push(noun(rows.len(), "device"));
        first.push(format!("{connected} connected"));
        if problems > 0 {
            first.push(format!("{problems} with problems"));
        }
        // The sum of no numbers would be -0.
        let sum = |of: fn(&Row) -> f64| rows.iter().map(|row| of(row)).fold(0.0, |sum, value| sum + value);
        let second = match (&sample.silent[..], sample.has_rates) {
            ([silent, ..], _) => vec![format!("! no answer: {}", printable(silent))],
            ([], false) => vec!["waiting for the first interval".to_owned()],
            ([], true) => vec![
                format!("{} done/s", short(sum(|row| row.rates.completed_per_s))),
                format!("CPU {:.0}% of one", sample.cpu_percent),
                format!("{} kicks/s", short(sum(|row| row.rates.kicks_per_s))),
                format!("{} irqs/s", short(sum(|row| row.rates.interrupts_per_s))),
                format!(
                    "net {:.1} MB/s",
                    sum(|row| row.rates.transmitted_mb_per_s + row.rates.received_mb_per_s)
                ),
            ],
        };
        [first, second]
    }

    /// The last line.
    fn keys(&self, hidden: usize) -> Vec<String> {
        let state = if self.paused { "PAUSED".to_owned() } else { format!("every {} s", self.interval) };
        let more = (hidden > 0).then(|| format!("{hidden} more"));
        [state].into_iter().chain(more).chain(KEYS.map(str::to_owned)).collect()
    }

    /// Lines of the screen, at most `rows` of exactly `columns` characters, with colours.
    pub(super) fn frame(&self, columns: usize, rows: usize) -> Vec<String> {
        let cut = |text: &str| {
            let text = text.chars().take(columns).collect::<String>();
            format!("{text:columns$}")
        };
        let Some(sample) = &self.sample else { return vec![cut("paravane top: asking the daemons")] };
        let chosen = self.chosen(sample);
        let room = rows.saturating_sub(ABOVE + BELOW);
        let offset = self.offset.min(chosen.len().saturating_sub(1));
        let shown = &chosen[offset..chosen.len().min(offset + room)];
        let Table { head, rows: lines } = table(shown.iter().copied(), (columns, self.order), self.style);
        let mut frame: Vec<String> =
            self.summary(sample, &chosen).iter().map(|parts| cut(&fitting(parts, ", ", columns))).collect();
        let painted = |colour: &str, line: &str| match self.style.colours {
            true => format!("{colour}{}{RESET}", cut(line)),
            false => cut(line),
        };
        frame.push(painted(REVERSE, &head));
        if sample.daemons == 0 {
            frame.push(cut("no daemons running for this user"));
        } else if chosen.is_empty() {
            frame.push(cut("no such devices"));
        }
        for (row, line) in shown.iter().zip(lines) {
            frame.push(if row.problem { painted(RED, &line) } else { cut(&line) });
        }
        frame.resize(rows.saturating_sub(BELOW).max(frame.len()), cut(""));
        frame.push(cut(&fitting(&self.keys(chosen.len() - shown.len()), "  ", columns)));
        frame.truncate(rows);
        frame
    }

    /// The whole sample as text.
    pub(super) fn plain(&self, columns: Option<usize>) -> String {
        let empty = Sample::default();
        let sample = self.sample.as_ref().unwrap_or(&empty);
        let chosen = self.chosen(sample);
        let style = Style { colours: false, history: false, ..self.style };
        let columns = columns.unwrap_or(usize::from(u16::MAX));
        let Table { head, rows } = table(chosen.iter().copied(), (columns, self.order), style);
        if sample.daemons == 0 && sample.silent.is_empty() {
            return "no daemons running for this user\n".to_owned();
        }
        let summary = self.summary(sample, &chosen);
        let summary = summary.iter().map(|parts| parts.join(", "));
        let lines = summary.chain([head]).chain(rows);
        lines.map(|line| format!("{}\n", line.trim_end())).collect()
    }
}

/// The first parts, as many as have room, at least one.
fn fitting(parts: &[String], separator: &str, columns: usize) -> String {
    let mut line = String::new();
    for part in parts {
        let longer = if line.is_empty() { part.clone() } else { format!("{line}{separator}{part}") };
        if longer.chars().count() > columns && !line.is_empty() {
            break;
        }
        line = longer;
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::status::rates::Rates;

    fn view(devices: usize) -> View {
        let mut view = View::new(&TopArgs { interval: 1.0, ..TopArgs::default() });
        view.style = Style { utf8: true, colours: false, history: true };
        let row = |number: usize| Row {
            device: format!("vm{number}"),
            pid: 1,
            problem: number == 3,
            rates: Rates { completed_per_s: number as f64, ..Rates::default() },
            ..Row::default()
        };
        let rows = (0..devices).map(row).collect();
        view.take(Sample { rows, daemons: 1, has_rates: true, ..Sample::default() });
        view
    }

    fn devices(view: &View, rows: usize) -> Vec<String> {
        let frame = view.frame(80, rows);
        assert_eq!(frame.len(), rows);
        assert!(frame.iter().all(|line| line.chars().count() == 80), "{frame:?}");
        let names = frame.iter().filter(|line| line.starts_with("vm"));
        names.map(|line| line.split_whitespace().next().unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn keys_sort_scroll_and_filter() {
        let mut view = view(10);
        assert_eq!(devices(&view, 7), ["vm9", "vm8", "vm7"]);
        let mut press = |keys: &[Key]| {
            for key in keys {
                assert_eq!(view.press(*key, 7), Outcome::Stay);
            }
            devices(&view, 7)
        };
        assert_eq!(press(&[Key::Down]), ["vm8", "vm7", "vm6"]);
        assert_eq!(press(&[Key::End]), ["vm1", "vm0"]);
        assert_eq!(press(&[Key::Home, Key::Up]), ["vm9", "vm8", "vm7"]);
        assert_eq!(press(&[Key::Char('S')]), ["vm0", "vm1", "vm2"], "by name");
        assert_eq!(press(&[Key::Char('r')]), ["vm9", "vm8", "vm7"]);
        assert_eq!(press(&[Key::Char('p')]), ["vm3"]);
        assert_eq!(press(&[Key::Char('p'), Key::PageDown, Key::PageUp]), ["vm9", "vm8", "vm7"]);
        assert_eq!(view.press(Key::Char('q'), 7), Outcome::Quit);
    }

    #[test]
    fn a_pause_keeps_the_sample_and_small_screens_are_filled() {
        let mut view = view(3);
        view.press(Key::Char(' '), 24);
        view.take(Sample::default());
        assert_eq!(devices(&view, 24), ["vm2", "vm1", "vm0"]);
        assert!(view.frame(80, 24)[23].starts_with("PAUSED"));
        view.press(Key::Char(' '), 24);
        view.take(Sample::default());
        assert!(view.frame(80, 24).iter().any(|line| line.trim_end() == "no daemons running for this user"));
        for (columns, rows) in [(1, 1), (0, 0), (10, 3), (500, 2)] {
            assert!(view.frame(columns, rows).len() <= rows.max(1));
        }
        assert_eq!(view.plain(None), "no daemons running for this user\n");
    }

    #[test]
    fn narrow_terminals_show_whole_words() {
        let view = view(30);
        let last = |columns: usize, rows: usize| view.frame(columns, rows)[rows - 1].trim_end().to_owned();
        assert_eq!(last(40, 10), "every 1 s  24 more  q quit  s/S sort");
        assert!(last(80, 40).ends_with("arrows scroll") && !last(80, 40).contains("more"));
        let second = |columns: usize| view.frame(columns, 10)[1].trim_end().to_owned();
        assert_eq!(second(30), "435 done/s, CPU 0% of one");
        assert!(second(80).ends_with("irqs/s, net 0.0 MB/s"), "{}", second(80));
    }

    #[test]
    fn colours_are_off_without_them() {
        let mut view = view(5);
        assert!(!view.frame(80, 10).concat().contains('\u{1b}'));
        view.style.colours = true;
        let red = view.frame(80, 10).into_iter().filter(|line| line.contains(RED)).count();
        assert_eq!(red, 1);
        assert!(!view.plain(Some(80)).contains('\u{1b}'));
    }
}
