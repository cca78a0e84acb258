//! Rates of the last intervals, as a line of small bars.
use std::collections::VecDeque;

/// Intervals that are kept.
const LENGTH: usize = 60;
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Where the terminal has no UTF-8.
const ASCII_BARS: [char; 8] = ['_', '.', ',', '-', '=', '+', '*', '#'];

/// Rates of one device, the newest last.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct History(VecDeque<f64>);

impl History {
    pub(super) fn push(&mut self, rate: f64) {
        if self.0.len() == LENGTH {
            self.0.pop_front();
        }
        self.0.push_back(rate);
    }

    /// One character for each of the last `width` intervals.
    ///
    /// Relative to the highest rate kept. A blank is a rate of 0.
    pub(super) fn line(&self, width: usize, utf8: bool) -> String {
        let highest = self.0.iter().copied().fold(0.0, f64::max);
        let bars = if utf8 { BARS } else { ASCII_BARS };
        let bar = |&rate: &f64| match rate {
            rate if rate > 0.0 => bars[((rate / highest * 8.0).ceil() as usize).clamp(1, 8) - 1],
            _ => ' ',
        };
        let shown = self.0.iter().skip(self.0.len().saturating_sub(width));
        let line: String = shown.map(bar).collect();
        format!("{line:>width$}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_relative_to_the_highest_rate_kept() {
        let mut history = History::default();
        assert_eq!(history.line(4, true), "    ");
        for rate in [0.0, 1.0, 4.0, 8.0] {
            history.push(rate);
        }
        assert_eq!(history.line(6, true), "   ▁▄█");
        assert_eq!(history.line(2, true), "▄█");
        assert_eq!(history.line(4, false), " _-#");
        for _ in 0..LENGTH {
            history.push(1.0);
        }
        assert_eq!((history.0.len(), history.line(1, true)), (LENGTH, "█".to_owned()));
    }
}
