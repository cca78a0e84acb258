//! Filters and sorts devices.
use super::daemon::Daemon;
use super::order::natural;
use super::rates::{Rates, latency};
use crate::serve::args::{SortKey, StatusArgs};
use crate::serve::report::Device;
use std::cmp::Ordering;
use wildmatch::WildMatch;

/// Names and patterns of devices; none: all devices.
#[derive(Debug)]
pub(crate) struct Names(Vec<WildMatch>);

impl Names {
    pub(crate) fn new(names: &[String]) -> Self {
        Self(names.iter().map(|name| WildMatch::new(name)).collect())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|pattern| pattern.matches(name))
    }
}

/// What is to be said of names and patterns that none of the devices has.
pub(crate) fn missing<'a>(
    names: &'a [String],
    devices: impl Iterator<Item = &'a str> + Clone,
) -> impl Iterator<Item = String> {
    names.iter().filter_map(move |name| {
        let pattern = WildMatch::new(name);
        let is_there = devices.clone().any(|device| pattern.matches(device));
        (!is_there).then(|| format!("no such device: {name}"))
    })
}

/// Filters and order of the command line.
#[derive(Debug)]
pub(super) struct Selection {
    names: Names,
    text: Option<String>,
    problems: bool,
    /// `None`: in the order of the report.
    sort: Option<SortKey>,
    reverse: bool,
    pub(super) limit: Option<usize>,
}

impl Selection {
    pub(super) fn new(args: &StatusArgs) -> Self {
        Self {
            names: Names::new(&args.devices),
            text: args.filter.as_ref().map(|text| text.to_lowercase()),
            problems: args.problems,
            sort: args.sort.or((!args.json).then_some(SortKey::Name)),
            reverse: args.reverse,
            limit: args.limit,
        }
    }

    /// Whether there is a filter.
    pub(super) fn filters(&self) -> bool {
        !self.names.0.is_empty() || self.text.is_some() || self.problems
    }

    fn has_text(&self, texts: &[&str]) -> bool {
        let Some(wanted) = &self.text else { return true };
        texts.iter().any(|text| text.to_lowercase().contains(wanted))
    }

    fn takes(&self, device: &Device) -> bool {
        self.names.has(&device.name)
            && self.has_text(&[&device.name, &device.kind, &device.endpoint, &device.back_end])
            && (!self.problems || device.has_problem())
    }

    /// Filters and sorts the devices. The limit applies later, when they are shown.
    pub(super) fn apply(&self, daemon: &mut Daemon) {
        let has_rates = !daemon.rates.is_empty();
        let rates = std::mem::take(&mut daemon.rates).into_iter().map(Some).chain(std::iter::repeat(None));
        let devices = std::mem::take(&mut daemon.report.devices).into_iter();
        let mut rows: Vec<_> = devices.zip(rates).filter(|(device, _)| self.takes(device)).collect();
        match self.sort {
            Some(key) => rows.sort_by(|one, other| self.compare(key, one, other)),
            None if self.reverse => rows.reverse(),
            None => {}
        }
        for (device, rates) in rows {
            daemon.report.devices.push(device);
            daemon.rates.extend(rates.filter(|_| has_rates));
        }
        daemon.report.failed.retain(|failed| self.names.has(&failed.name) && self.has_text(&[&failed.name]));
        daemon
            .report
            .waiting
            .retain(|waiting| self.names.has(&waiting.name) && self.has_text(&[&waiting.name]));
        daemon.report.failed.sort_by(|one, other| natural(&one.name, &other.name));
    }

    fn compare(
        &self,
        key: SortKey,
        one: &(Device, Option<Rates>),
        other: &(Device, Option<Rates>),
    ) -> Ordering {
        let by_name = natural(&one.0.name, &other.0.name);
        // Numbers descending, names ascending.
        let order = match key {
            SortKey::Name => by_name,
            SortKey::Kind => one.0.kind.cmp(&other.0.kind),
            key => number(key, other).total_cmp(&number(key, one)),
        };
        let order = if self.reverse { order.reverse() } else { order };
        order.then(by_name)
    }
}

/// The value to sort by. Without rates, the total since the start.
fn number(key: SortKey, (device, rates): &(Device, Option<Rates>)) -> f64 {
    let [kicks, _, completed, interrupts] = device.totals();
    let or_total = |rate: fn(&Rates) -> f64, total: u64| rates.as_ref().map_or(total as f64, rate);
    let bytes = device.net.as_ref().map_or(0, |net| net.transmitted_bytes + net.received_bytes);
    match key {
        SortKey::Name | SortKey::Kind => 0.0,
        SortKey::Done => or_total(|rates| rates.completed_per_s, completed),
        SortKey::Kicks => or_total(|rates| rates.kicks_per_s, kicks),
        SortKey::Irqs => or_total(|rates| rates.interrupts_per_s, interrupts),
        SortKey::P99 => latency(device, rates.as_ref()).0.map_or(0.0, |latency| latency.p99_ns as f64),
        SortKey::Depth => latency(device, rates.as_ref()).1.unwrap_or(0.0),
        SortKey::Mb => or_total(|rates| rates.transmitted_mb_per_s + rates.received_mb_per_s, bytes),
        SortKey::Sessions => device.sessions as f64,
        SortKey::Errors => device.errors() as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::report::{Failed, Queue, Report};

    fn device(name: &str, kind: &str, sessions: u64, protocol_errors: u64) -> Device {
        let queues = vec![Queue { kicks: 100 - sessions, ..Queue::default() }];
        let back_end = format!("/images/{name}.IMG");
        Device {
            name: name.into(),
            kind: kind.into(),
            sessions,
            protocol_errors,
            queues,
            back_end,
            ..Device::default()
        }
    }

    fn daemon() -> Daemon {
        let devices = vec![
            device("vm10", "blk", 3, 0),
            device("vm2", "net", 1, 2),
            device("vm1", "blk", 2, 0),
            device("other", "rng", 2, 7),
        ];
        let rate = |completed_per_s| Rates { completed_per_s, ..Rates::default() };
        let rates = [10.0, 2.0, 1.0, 5.0].map(rate).to_vec();
        let failed = vec![Failed { name: "vm3".into(), why: "no image".into(), ..Failed::default() }];
        Daemon { rates, report: Report { devices, failed, ..Report::default() }, ..Daemon::default() }
    }

    /// Names and rates, which stay together.
    fn shown(change: impl FnOnce(&mut StatusArgs)) -> Vec<(String, f64)> {
        let mut args = StatusArgs::default();
        change(&mut args);
        let mut daemon = daemon();
        Selection::new(&args).apply(&mut daemon);
        assert_eq!(daemon.rates.len(), daemon.report.devices.len());
        let rates = daemon.rates.iter().map(|rates| rates.completed_per_s);
        daemon.report.devices.iter().map(|device| device.name.clone()).zip(rates).collect()
    }

    fn names(change: impl FnOnce(&mut StatusArgs)) -> Vec<String> {
        shown(change).into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn devices_are_sorted_with_their_rates() {
        let by_name = [("other", 5.0), ("vm1", 1.0), ("vm2", 2.0), ("vm10", 10.0)];
        assert_eq!(shown(|_| {}), by_name.map(|(name, rate)| (name.to_owned(), rate)));
        for (key, order) in [
            (SortKey::Done, ["vm10", "other", "vm2", "vm1"]),
            (SortKey::Errors, ["other", "vm2", "vm1", "vm10"]),
            (SortKey::Sessions, ["vm10", "other", "vm1", "vm2"]),
            (SortKey::Kind, ["vm1", "vm10", "vm2", "other"]),
        ] {
            assert_eq!(names(|args| args.sort = Some(key)), order, "{key:?}");
        }
        let least = names(|args| (args.sort, args.reverse) = (Some(SortKey::Done), true));
        assert_eq!(least, ["vm1", "vm2", "other", "vm10"]);
        let as_they_are = names(|args| args.json = true);
        assert_eq!(as_they_are, ["vm10", "vm2", "vm1", "other"]);
        // Asked once there are no rates; the counts say which was busy.
        let mut once = daemon();
        once.rates.clear();
        let args = StatusArgs { sort: Some(SortKey::Kicks), ..StatusArgs::default() };
        Selection::new(&args).apply(&mut once);
        assert_eq!(once.report.devices[0].name, "vm2");
        assert!(once.rates.is_empty());
    }

    #[test]
    fn devices_are_chosen_by_name_text_and_problems() {
        let by = |patterns: &[&str]| {
            names(|args| args.devices = patterns.iter().map(|&pattern| pattern.to_owned()).collect())
        };
        assert_eq!(by(&["vm1"]), ["vm1"], "a name is a whole name");
        assert_eq!(by(&["vm1*"]), ["vm1", "vm10"]);
        assert_eq!(by(&["vm?", "other"]), ["other", "vm1", "vm2"]);
        assert_eq!(by(&["nobody"]), Vec::<String>::new());
        let text = |text: &str| names(|args| args.filter = Some(text.to_owned()));
        assert_eq!(text("M1"), ["vm1", "vm10"]);
        assert_eq!(text("vm2.img"), ["vm2"], "back ends are looked at");
        assert_eq!(text("blk"), ["vm1", "vm10"]);
        assert_eq!(names(|args| args.problems = true), ["other", "vm2"]);
    }

    #[test]
    fn devices_that_are_not_served_are_chosen_by_name() {
        let failed = |pattern: &str| {
            let mut daemon = daemon();
            let args = StatusArgs { devices: vec![pattern.to_owned()], ..StatusArgs::default() };
            Selection::new(&args).apply(&mut daemon);
            daemon.report.failed.len()
        };
        assert_eq!((failed("vm3"), failed("vm*"), failed("vm1")), (1, 1, 0));
    }
}
