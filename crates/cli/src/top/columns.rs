//! Columns of the table, as many as the terminal has room for.
use super::sample::Row;
use crate::printable::printable;
use crate::serve::args::TopKey;
use crate::serve::status::latency::short_duration;
use crate::serve::status::table::shortened;

/// Minimum width of names.
const NAME: usize = 8;
/// Width of names that other columns do not leave room for first.
const GOOD_NAME: usize = 11;

/// How texts look.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    /// The terminal shows UTF-8.
    pub(super) utf8: bool,
    /// Escape sequences for colours and the like.
    pub(super) colours: bool,
    /// Column HISTORY: one interval has none.
    pub(super) history: bool,
}

/// Order of the rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) key: TopKey,
    pub(super) reverse: bool,
}

impl Order {
    /// Mark of the column that the rows are sorted by.
    fn mark(self, style: Style) -> char {
        match (style.utf8, self.reverse) {
            (true, false) => '▾',
            (true, true) => '▴',
            (false, false) => 'v',
            (false, true) => '^',
        }
    }
}

struct Column {
    head: &'static str,
    width: usize,
    /// Columns with the highest number are hidden first.
    rank: u8,
    key: Option<TopKey>,
    /// Aligned to the left.
    word: bool,
    text: fn(&Row, Style) -> String,
}

const fn number(head: &'static str, width: usize, rank: u8, text: fn(&Row, Style) -> String) -> Column {
    Column { head, width, rank, key: None, word: false, text }
}

/// All but the device's name, which comes first.
const COLUMNS: [Column; 16] = [
    Column { word: true, ..number("KIND", 4, 12, |row, _| row.kind.clone()) },
    number("PID", 7, 15, |row, _| row.pid.to_string()),
    Column { key: Some(TopKey::Done), ..number("DONE/s", 6, 0, |row, _| short(row.rates.completed_per_s)) },
    number("MB/s", 5, 10, |row, _| match row.has_traffic {
        true => short(row.rates.transmitted_mb_per_s + row.rates.received_mb_per_s),
        false => "-".to_owned(),
    }),
    Column {
        key: Some(TopKey::P50),
        ..number("P50", 5, 2, |row, style| latency(row.latency(|all| all.p50_ns), style))
    },
    Column {
        key: Some(TopKey::P99),
        ..number("P99", 5, 1, |row, style| latency(row.latency(|all| all.p99_ns), style))
    },
    number("P99.9", 5, 9, |row, style| latency(row.latency(|all| all.p999_ns), style)),
    Column {
        word: true,
        ..number("STAGE", 9, 4, |row, _| row.stage.clone().unwrap_or_else(|| "-".to_owned()))
    },
    number("SHARE", 5, 13, |row, _| {
        row.stage_share.map_or("-".to_owned(), |share| format!("{:.0}%", share * 100.0))
    }),
    Column { key: Some(TopKey::Depth), ..number("DEPTH", 5, 5, |row, _| ratio(row.rates.depth)) },
    number("/KICK", 5, 7, |row, _| ratio(row.completed_per_kick)),
    number("/IRQ", 5, 8, |row, _| ratio(row.completed_per_interrupt)),
    Column { key: Some(TopKey::Cpu), ..number("CPU%", 4, 3, |row, _| percent(row.cpu_percent)) },
    number("WAIT%", 5, 11, |row, _| percent(row.wait_percent)),
    Column { key: Some(TopKey::Errors), ..number("ERRORS", 6, 6, |row, _| short(row.errors as f64)) },
    Column { word: true, ..number("HISTORY", 8, HISTORY, |row, style| row.history.line(8, style.utf8)) },
];

/// Rank of HISTORY: it goes after the columns that only wide terminals show.
const HISTORY: u8 = 14;

impl Column {
    /// Never hidden: the device's work, and what the rows are sorted by.
    fn is_kept(&self, order: Order) -> bool {
        self.rank == 0 || self.key == Some(order.key)
    }

    /// The mark of the order may make it wider.
    fn width(&self, order: Order) -> usize {
        let head = self.head.chars().count() + usize::from(self.key == Some(order.key));
        self.width.max(head)
    }
}

/// Head and lines of the table.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) head: String,
    pub(super) rows: Vec<String>,
}

/// Lays out the rows in lines of at most `width` characters.
pub(super) fn table<'a>(
    rows: impl Iterator<Item = &'a Row> + Clone,
    (width, order): (usize, Order),
    style: Style,
) -> Table {
    let names: Vec<String> = rows.clone().map(|row| printable(&row.device)).collect();
    let first = match order.key {
        TopKey::Name => format!("{}DEVICE", order.mark(style)),
        _ => "DEVICE".to_owned(),
    };
    let lengths = names.iter().chain([&first]).map(|name| name.chars().count());
    let longest = lengths.max().unwrap_or(0);
    let mut shown: Vec<&Column> =
        COLUMNS.iter().filter(|column| style.history || column.rank != HISTORY).collect();
    let used = |shown: &[&Column]| shown.iter().map(|column| column.width(order) + 1).sum::<usize>();
    // HISTORY is worth more than what only wide terminals show.
    let rank = |column: &Column| if column.rank == HISTORY { 8 } else { column.rank };
    while used(&shown) + longest.min(GOOD_NAME) > width {
        let hidden = shown.iter().enumerate().filter(|(_, column)| !column.is_kept(order));
        // Of equal ranks the last column goes.
        let Some((at, _)) = hidden.max_by_key(|(_, column)| rank(column)) else { break };
        shown.remove(at);
    }
    let name = longest.min(width.saturating_sub(used(&shown)).max(NAME));
    let line = |first: String, cell: &dyn Fn(&Column) -> String| {
        let mut line = format!("{first:name$}");
        for column in &shown {
            let (text, width) = (cell(column), column.width(order));
            line += &if column.word { format!(" {text:width$}") } else { format!(" {text:>width$}") };
        }
        // A terminal narrower than the least table would wrap lines.
        line.chars().take(width).collect::<String>()
    };
    let head = |column: &Column| match column.key == Some(order.key) {
        true => format!("{}{}", order.mark(style), column.head),
        false => column.head.to_owned(),
    };
    let head = line(first, &head);
    let rows = rows.zip(names);
    let rows = rows.map(|(row, device)| line(shortened(&device, name), &|column| (column.text)(row, style)));
    Table { head, rows: rows.collect() }
}

fn latency(ns: Option<u64>, style: Style) -> String {
    let Some(ns) = ns else { return "-".to_owned() };
    let text = short_duration(ns);
    if style.utf8 { text } else { text.replace('µ', "u") }
}

/// In at most 4 characters up to 100 CPUs.
fn percent(value: f64) -> String {
    if value > 0.0 && value < 9.95 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn ratio(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value < 99.95 => format!("{value:.1}"),
        Some(value) => short(value),
    }
}

/// A number in at most 5 characters: 950, 12.3k, 1.23M.
pub(super) fn short(value: f64) -> String {
    for (unit, name) in [(1e9, "G"), (1e6, "M"), (1e3, "k")] {
        let scaled = value / unit;
        if scaled >= 0.9995 {
            return match scaled {
                scaled if scaled < 9.995 => format!("{scaled:.2}{name}"),
                scaled if scaled < 99.95 => format!("{scaled:.1}{name}"),
                scaled => format!("{:.0}{name}", scaled.min(9999.0)),
            };
        }
    }
    if value > 0.0 && value < 9.95 { format!("{value:.1}") } else { format!("{value:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::status::latency::Percentiles;
    use crate::serve::status::rates::Rates;

    const PLAIN: Style = Style { utf8: true, colours: false, history: true };
    const BY_P99: Order = Order { key: TopKey::P99, reverse: false };

    fn row(device: &str) -> Row {
        let latency = Some(Percentiles { count: 1, p50_ns: 23_000, p99_ns: 1_200_000, p999_ns: 3_000_000 });
        let rates = Rates { completed_per_s: 123_456.0, latency, depth: Some(3.25), ..Rates::default() };
        Row {
            device: device.into(),
            kind: "blk".into(),
            pid: 1234,
            rates,
            stage: Some("throttled".into()),
            ..Row::default()
        }
    }

    fn lines(width: usize) -> Vec<String> {
        let rows = [row("vm0"), row("a-cluster-with-a-long-name-and-a-disk-17"), row("\u{1b}[2Jx")];
        let Table { head, rows } = table(rows.iter(), (width, BY_P99), PLAIN);
        std::iter::once(head).chain(rows).collect()
    }

    #[test]
    fn lines_fit_the_terminal() {
        for width in [20, 40, 60, 80, 100, 132, 200] {
            let lines = lines(width);
            assert!(lines.iter().all(|line| line.chars().count() <= width), "{width}:\n{}", lines.join("\n"));
            assert!(lines[0].starts_with("DEVICE") && lines[0].contains("DONE/s"), "{width}: {}", lines[0]);
            assert!(lines.iter().all(|line| !line.contains('\u{1b}')), "{width}");
        }
    }

    #[test]
    fn eighty_columns_show_what_matters_and_wide_ones_everything() {
        let lines = lines(80);
        for head in [
            "DEVICE", "DONE/s", "P50", "▾P99", "STAGE", "DEPTH", "/KICK", "/IRQ", "CPU%", "ERRORS", "HISTORY",
        ] {
            assert!(lines[0].contains(head), "{head}: {}", lines[0]);
        }
        assert!(lines[1].contains("123k  23µs 1.2ms throttled"), "{}", lines[1]);
        assert!(lines[2].starts_with("a-") && lines[2].contains('…'), "{}", lines[2]);
        let wide = self::lines(200);
        let heads: Vec<_> = wide[0].split_whitespace().collect();
        assert_eq!(heads.len(), COLUMNS.len() + 1, "{heads:?}");
    }

    /// The mark of the order leaves a gap, its column is shown, and values stay below their head.
    #[test]
    fn the_sorted_column_is_marked_and_shown() {
        let rows = [row("vm0")];
        for (key, head) in [
            (TopKey::Done, "DONE/s"),
            (TopKey::P50, "P50"),
            (TopKey::P99, "P99"),
            (TopKey::Depth, "DEPTH"),
            (TopKey::Cpu, "CPU%"),
            (TopKey::Errors, "ERRORS"),
            (TopKey::Name, "DEVICE"),
        ] {
            for (width, reverse) in [(40, false), (60, true), (80, false), (200, true)] {
                let table = table(rows.iter(), (width, Order { key, reverse }), PLAIN);
                let mark = if reverse { '▴' } else { '▾' };
                let heads: Vec<_> = table.head.split_whitespace().collect();
                assert!(heads.contains(&&*format!("{mark}{head}")), "{width}: {}", table.head);
                assert!(
                    heads.iter().all(|head| !head.chars().skip(1).any(|c| c == mark)),
                    "{width}: {}",
                    table.head
                );
                assert_eq!(heads.contains(&"HISTORY"), width >= 80, "{width}: {}", table.head);
                let end = |line: &str, word: &str| {
                    let at = line.find(word).map(|at| line[..at].chars().count() + word.chars().count());
                    at.unwrap_or_else(|| panic!("{word}: {line}"))
                };
                assert_eq!(end(&table.head, "DONE/s"), end(&table.rows[0], "123k"), "{width}");
            }
        }
    }

    #[test]
    fn numbers_take_five_characters() {
        for (value, text) in [
            (0.0, "0"),
            (0.5, "0.5"),
            (9.96, "10"),
            (999.4, "999"),
            (999.6, "1.00k"),
            (12_345.0, "12.3k"),
            (123_456.0, "123k"),
            (999_600.0, "1.00M"),
            (1.5e9, "1.50G"),
            (f64::INFINITY, "9999G"),
        ] {
            assert_eq!(short(value), text);
        }
    }
}
