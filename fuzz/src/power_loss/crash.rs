//! The states that a store can have after a crash.
use super::log::{Action, Change, Event, Kept};
use super::model::Crash;
use super::stamp::SECTOR;
use paravane_test_support::Random;
use std::ops::Range;

/// A page of the host: a process that is killed ends a write after any of them.
const PAGE: usize = 4096;

/// Ticks of a disk's start, with its repair.
pub(super) const START: Range<u64> = 1..31;

/// Ticks at which many crashes happen: what is done there is done once in a life.
#[derive(Clone, Debug)]
pub(super) struct Often {
    pub(super) ranges: Vec<Range<u64>>,
    pub(super) odds: u32,
}

/// A crash, and which unflushed changes have reached the storage.
#[derive(Clone, Debug)]
pub(super) struct State {
    /// Events before this tick have happened.
    pub(super) at: u64,
    pub(super) crash: Crash,
    /// The changes before `at` that are not durable: their numbers, and what is kept of each.
    pub(super) kept: Vec<(usize, Kept)>,
}

impl State {
    /// The bytes of the store.
    pub(super) fn bytes(&self, start: &[u8], events: &[Event]) -> Vec<u8> {
        let mut bytes = start.to_vec();
        let mut loose = self.kept.iter().peekable();
        for (number, event) in events.iter().enumerate() {
            let Action::Change { change, .. } = &event.action else { continue };
            match loose.next_if(|(loose, _)| *loose == number) {
                Some((_, kept)) => change.apply(&mut bytes, kept),
                None if event.at < self.at => change.apply(&mut bytes, &Kept::All),
                None => {}
            }
        }
        bytes
    }

    /// Whether a change has reached the storage as a whole.
    pub(super) fn has(&self, number: usize, events: &[Event]) -> bool {
        match self.kept.iter().find(|(kept, _)| *kept == number) {
            Some((_, kept)) => *kept == Kept::All,
            None => events[number].at < self.at,
        }
    }

    /// For messages: which changes are missing.
    pub(super) fn describe(&self, events: &[Event]) -> String {
        let name = match self.crash {
            Crash::Power => "power loss",
            Crash::Kill => "SIGKILL",
        };
        let mut text = format!("{name} before tick {}, {} unflushed changes", self.at, self.kept.len());
        for (number, kept) in &self.kept {
            let Action::Change { change, .. } = &events[*number].action else { continue };
            let what = match kept {
                Kept::All => continue,
                Kept::None => "missing".to_owned(),
                Kept::Blocks { block, bits } => format!("torn in blocks of {block}: {bits:#b}"),
            };
            text += &format!("\n    event {number}, {change}: {what}");
        }
        text
    }
}

/// Numbers of the changes before tick `at` that a power loss may undo.
fn unflushed(events: &[Event], at: u64) -> Vec<usize> {
    let flushes = events.iter().filter(|event| event.at < at).filter_map(|event| match event.action {
        Action::Flush { begun } => Some(begun),
        Action::Change { .. } => None,
    });
    // A flush covers what its caller knew to be done.
    let flushed = flushes.max().unwrap_or(0);
    let is_loose = |event: &&Event| {
        event.at < at
            && event.told >= flushed
            && matches!(event.action, Action::Change { durable: false, .. })
    };
    events.iter().enumerate().filter(|(_, event)| is_loose(event)).map(|(number, _)| number).collect()
}

/// A moment for a crash.
///
/// One in `often.odds` is within one of its ranges. Half of the others follow a change of any place with
/// the same odds, however rarely it changes.
pub(super) fn moment(events: &[Event], often: &Often, random: &mut Random) -> u64 {
    if random.once_in(often.odds) {
        let range = &often.ranges[random.below(often.ranges.len())];
        return range.start + random.below((range.end - range.start).max(1) as usize) as u64;
    }
    let end = events.last().map_or(1, |event| event.at + 2);
    let place = |event: &Event| match &event.action {
        Action::Change { change: Change::Write { offset, .. }, .. } => Some(offset / SECTOR as u64),
        Action::Change { change: Change::Size(_), .. } => Some(u64::MAX),
        _ => None,
    };
    if random.once_in(2) {
        let mut places: Vec<_> = events.iter().filter_map(place).collect();
        places.sort_unstable();
        places.dedup();
        // The header most of all.
        if places.first() == Some(&0) && random.once_in(4) {
            places.truncate(1);
        }
        if !places.is_empty() {
            let one = Some(places[random.below(places.len())]);
            let there: Vec<_> = events.iter().filter(|event| place(event) == one).collect();
            // At once, or some events later.
            return there[random.below(there.len())].at
                + 1
                + random.below(2) as u64 * random.below(24) as u64;
        }
    }
    1 + random.below(end as usize) as u64
}

/// How many states of one moment are tried.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// All subsets of so many unflushed changes.
    pub(super) all_of: usize,
    /// Random subsets of more.
    pub(super) random: usize,
}

/// States of a power loss before tick `at`.
pub(super) fn power(events: &[Event], at: u64, bounds: Bounds, random: &mut Random) -> Vec<State> {
    let loose = unflushed(events, at);
    let count = loose.len();
    let state = |keeps: &mut dyn FnMut(usize) -> Kept| {
        let kept = loose.iter().enumerate().map(|(place, number)| (*number, keeps(place))).collect();
        State { at, crash: Crash::Power, kept: in_order(events, kept) }
    };
    let whole = |keep: bool| if keep { Kept::All } else { Kept::None };
    let mut states = Vec::new();
    if count <= bounds.all_of {
        states.extend((0..1_u64 << count).map(|mask| state(&mut |place| whole(mask >> place & 1 == 1))));
    } else {
        states.push(state(&mut |_| Kept::All));
        states.push(state(&mut |_| Kept::None));
        for _ in 0..bounds.random {
            let one = one_of(events, &loose, random);
            // One missing, one or the last kept, any, the first ones: what each missing order needs.
            let (kind, odds) = (random.below(5), 2 + random.below(6) as u32);
            let mut keeps = |place: usize| match kind {
                0 => whole(place != one),
                1 => whole(place == one),
                2 => whole(!random.once_in(odds)),
                3 => whole(place + 1 == count),
                _ => whole(place <= one),
            };
            states.push(state(&mut keeps));
        }
    }
    // One of them torn in each moment.
    let torn = tear(events, &loose, SECTOR, random);
    if let (Some((place, kept)), Some(whole)) = (torn, states.first().cloned()) {
        let mut torn = whole;
        torn.kept.iter_mut().for_each(|one| one.1 = Kept::All);
        torn.kept[place].1 = kept;
        states.push(torn);
    }
    states
}

/// A place in `loose`; that of a change of the header in many cases.
fn one_of(events: &[Event], loose: &[usize], random: &mut Random) -> usize {
    let is_of_header = |number: &usize| match &events[*number].action {
        Action::Change { change: Change::Write { offset, .. }, .. } => *offset < SECTOR as u64,
        _ => false,
    };
    let of_header: Vec<_> = (0..loose.len()).filter(|place| is_of_header(&loose[*place])).collect();
    match of_header.len() {
        0 => random.below(loose.len()),
        _ if random.once_in(2) => random.below(loose.len()),
        len => of_header[random.below(len)],
    }
}

/// Loses all changes of the size after the first that is lost: file systems keep their order.
fn in_order(events: &[Event], mut kept: Vec<(usize, Kept)>) -> Vec<(usize, Kept)> {
    let mut is_lost = false;
    for (number, kept) in &mut kept {
        if matches!(events[*number].action, Action::Change { change: Change::Size(_), .. }) {
            is_lost |= *kept == Kept::None;
            *kept = if is_lost { Kept::None } else { Kept::All };
        }
    }
    kept
}

/// States of a SIGKILL before tick `at`: everything is kept, and a write in progress is cut.
pub(super) fn kill(events: &[Event], at: u64, random: &mut Random) -> Vec<State> {
    let whole = State { at, crash: Crash::Kill, kept: Vec::new() };
    let mut states = vec![whole.clone()];
    if let Some(number) = events.iter().position(|event| event.at >= at)
        && let Some((_, kept)) = tear(events, &[number], PAGE, random)
    {
        // The next event has begun.
        states.push(State { at: events[number].at, kept: vec![(number, kept)], ..whole });
    }
    states
}

/// A change that is torn, of those with these numbers: its place among them, and what is kept.
fn tear(events: &[Event], numbers: &[usize], block: usize, random: &mut Random) -> Option<(usize, Kept)> {
    let written = |number: &usize| match &events[*number].action {
        Action::Change { change, .. } => change.written(),
        Action::Flush { .. } => 0,
    };
    let large: Vec<_> = (0..numbers.len()).filter(|place| written(&numbers[*place]) > block).collect();
    let place = *large.get(random.below(large.len().max(1)))?;
    let blocks = written(&numbers[place]).div_ceil(block).min(63);
    let first = (1 << (1 + random.below(blocks))) - 1;
    let bits = match (block, random.below(3)) {
        (PAGE, _) | (_, 0) => first,
        (_, 1) => !first,
        _ => random.u64(),
    };
    Some((place, Kept::Blocks { block, bits }))
}
