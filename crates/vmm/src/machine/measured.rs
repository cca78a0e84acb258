//! Counters at the start and at the end of the measured phase.
//!
//! The guest announces both.
use crate::report::{ExitFigures, PhaseFigures};
use paravane_device::lock;
use paravane_spec::builtin::event;
use std::sync::Mutex;

/// The readings of a run: at the first begin, and at the last end after it.
#[derive(Debug, Default)]
pub(crate) struct MeasuredPhase(Mutex<Readings>);

#[derive(Debug, Default)]
struct Readings {
    begin: Option<PhaseFigures>,
    end: Option<PhaseFigures>,
}

impl MeasuredPhase {
    /// The guest announces `event`; `read` reads the counters as they stand.
    pub(crate) fn event(&self, event: u32, read: impl FnOnce() -> PhaseFigures) {
        match event {
            event::MEASURE => {
                lock(&self.0).begin.get_or_insert_with(read);
            }
            event::MEASURED => lock(&self.0).end = Some(read()),
            _ => {}
        }
    }

    /// The difference, without the exit that announces the end.
    pub(crate) fn figures(&self) -> Option<PhaseFigures> {
        let readings = lock(&self.0);
        let (begin, end) = (readings.begin?, readings.end?);
        let of = |figure: fn(&PhaseFigures) -> u64| figure(&end).saturating_sub(figure(&begin));
        Some(PhaseFigures {
            exits: ExitFigures {
                notify: of(|at| at.exits.notify),
                interrupt_status: of(|at| at.exits.interrupt_status),
                interrupt_acknowledge: of(|at| at.exits.interrupt_acknowledge),
                other: of(|at| at.exits.other).saturating_sub(1),
            },
            kvm_exits: begin.kvm_exits.zip(end.kvm_exits).map(|(begin, end)| end.saturating_sub(begin)),
            kicks: of(|at| at.kicks),
            interrupts: of(|at| at.interrupts),
            taken: of(|at| at.taken),
            cpu_s: (end.cpu_s - begin.cpu_s).max(0.0),
            wall_s: (end.wall_s - begin.wall_s).max(0.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(count: u64) -> PhaseFigures {
        let exits = ExitFigures { notify: count, other: 10 * count, ..ExitFigures::default() };
        PhaseFigures {
            exits,
            kvm_exits: Some(4 * count),
            kicks: 2 * count,
            interrupts: 3 * count,
            taken: count,
            cpu_s: count as f64,
            wall_s: 2.0 * count as f64,
        }
    }

    #[test]
    fn from_the_first_begin_to_the_last_end() {
        let phase = MeasuredPhase::default();
        phase.event(event::STARTED, || unreachable!("nothing is read at other events"));
        assert_eq!(phase.figures(), None);
        for (event, count) in
            [(event::MEASURE, 1), (event::MEASURED, 2), (event::MEASURE, 3), (event::MEASURED, 5)]
        {
            phase.event(event, || reading(count));
        }
        let exits = ExitFigures { notify: 4, other: 39, ..ExitFigures::default() };
        let kvm_exits = Some(16);
        let expected =
            PhaseFigures { exits, kvm_exits, kicks: 8, interrupts: 12, taken: 4, cpu_s: 4.0, wall_s: 8.0 };
        assert_eq!(phase.figures(), Some(expected));
    }

    #[test]
    fn an_end_without_a_begin_and_counters_that_go_back_are_no_panic() {
        let phase = MeasuredPhase::default();
        phase.event(event::MEASURED, || reading(1));
        assert_eq!(phase.figures(), None);
        phase.event(event::MEASURE, || reading(2));
        let nothing = PhaseFigures { kvm_exits: Some(0), ..PhaseFigures::default() };
        assert_eq!(phase.figures(), Some(nothing));
    }
}
