//! Writes lines to stderr and counts lost ones.
use super::counts::LOST;
use super::lines::{Style, own_line};
use super::queue::{Batch, Queue};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Maximum write of several lines in bytes: PIPE_BUF, atomic on a pipe.
const WHOLE: usize = 4096;

/// stderr without the lock of [`std::io::Stderr`].
pub(super) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::io::write(io::stderr(), bytes) {
                Err(rustix::io::Errno::INTR) => {}
                // Another process has set O_NONBLOCK.
                Err(rustix::io::Errno::AGAIN) => drop(poll_stderr(None)),
                result => return Ok(result?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether stderr is writable or has an error.
fn poll_stderr(time: Option<&Timespec>) -> bool {
    let stderr = io::stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    poll(&mut fds, time).is_ok() && !fds[0].revents().is_empty()
}

/// Writes the lines of a queue.
pub(super) struct Writer<W> {
    out: W,
    pub(super) style: Style,
    batch: Batch,
    /// Number of lost lines not yet reported.
    lost: u64,
    /// The last line was written in part.
    torn: bool,
}

impl Writer<Stderr> {
    /// Writes as many queued lines as stderr takes without waiting.
    pub(super) fn write_what_fits(&mut self, queue: &Queue) {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        while !queue.is_written() && poll_stderr(Some(&at_once)) {
            self.write_next(queue, Some(Duration::ZERO));
            queue.written();
        }
    }
}

impl<W: Write> Writer<W> {
    pub(super) fn new(out: W, style: Style) -> Self {
        Self { out, style, batch: Batch::default(), lost: 0, torn: false }
    }

    /// Waits for lines for at most `time` and writes them.
    pub(super) fn write_next(&mut self, queue: &Queue, time: Option<Duration>) {
        let mut batch = std::mem::take(&mut self.batch);
        queue.take(&mut batch, time);
        let mut rest = &batch.lines[..];
        while !rest.is_empty() {
            let (lines, after) = rest.split_at(whole_lines(rest));
            self.write(lines);
            rest = after;
        }
        self.lost += batch.lost;
        if batch.lost > 0 {
            self.report_lost();
        }
        self.batch = batch;
    }

    /// Writes whole lines, after the report of lost ones.
    fn write(&mut self, lines: &[u8]) {
        if !self.report_lost() {
            self.lose(count(lines));
            return;
        }
        let written = self.write_some(lines);
        self.lose(count(&lines[written..]));
        self.torn = written > 0 && lines[written - 1] != b'\n';
    }

    fn lose(&mut self, lines: u64) {
        self.lost += lines;
        LOST.fetch_add(lines, Ordering::Relaxed);
    }

    /// Reports lost lines. `false`: the report could not be written.
    fn report_lost(&mut self) -> bool {
        if self.lost == 0 {
            return true;
        }
        let words = match self.lost {
            1 => "1 log line lost: stderr is blocked".to_owned(),
            lost => format!("{lost} log lines lost: stderr is blocked"),
        };
        let line = own_line(self.style, tracing::Level::WARN, &words);
        let line = if self.torn { format!("\n{line}") } else { line };
        let written = self.write_some(line.as_bytes());
        if written > 0 {
            self.torn = written < line.len();
        }
        if written == line.len() {
            self.lost = 0;
        }
        self.lost == 0
    }

    /// Writes as many bytes as possible; returns their number.
    fn write_some(&mut self, bytes: &[u8]) -> usize {
        let mut written = 0;
        while written < bytes.len() {
            match self.out.write(&bytes[written..]) {
                Ok(more @ 1..) => written += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Closed, full or broken: the next lines try again.
                Ok(0) | Err(_) => break,
            }
        }
        written
    }
}

fn count(lines: &[u8]) -> u64 {
    lines.iter().filter(|&&byte| byte == b'\n').count() as u64
}

/// Length of the next write: lines of [`WHOLE`] bytes at most, or one longer line.
fn whole_lines(lines: &[u8]) -> usize {
    let end = |bytes: &[u8]| bytes.iter().rposition(|&byte| byte == b'\n').map(|at| at + 1);
    let first = || lines.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
    end(&lines[..lines.len().min(WHOLE)]).or_else(first).unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes `room` bytes, then fails until there is more.
    #[derive(Default)]
    struct Disk {
        text: String,
        room: usize,
    }

    impl Write for &mut Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let len = bytes.len().min(self.room);
            if len == 0 {
                return Err(ErrorKind::StorageFull.into());
            }
            self.room -= len;
            self.text += std::str::from_utf8(&bytes[..len]).unwrap();
            Ok(len)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn write(disk: &mut Disk, state: (u64, bool), lines: &[&str]) -> (u64, bool) {
        let queue = Queue::new();
        lines.iter().for_each(|line| queue.push(line));
        let mut writer = Writer { lost: state.0, torn: state.1, ..Writer::new(disk, Style::Text) };
        writer.write_next(&queue, Some(Duration::ZERO));
        (writer.lost, writer.torn)
    }

    #[test]
    fn lines_that_stderr_does_not_take_are_counted_and_told_of_when_it_does() {
        let mut disk = Disk { room: 7, ..Disk::default() };
        let state = write(&mut disk, (0, false), &["one\n", "two two\n", "three\n"]);
        assert_eq!((state, &*disk.text), ((2, true), "one\ntwo"));
        let state = write(&mut disk, state, &["four\n"]);
        assert_eq!(state, (3, true), "there is still no room");
        disk.room = 1000;
        let state = write(&mut disk, state, &["five\n"]);
        assert_eq!(state, (0, false));
        let lines: Vec<_> = disk.text.lines().collect();
        assert_eq!((lines.len(), lines[0], lines[1], lines[3]), (4, "one", "two", "five"));
        assert!(lines[2].ends_with("WARN 3 log lines lost: stderr is blocked"), "{lines:?}");
    }

    #[test]
    fn several_lines_are_written_at_once_but_no_part_of_one() {
        assert_eq!(whole_lines(b"a\nb\n"), 4);
        let long = format!("{}\n", "x".repeat(2999));
        assert_eq!(whole_lines((long.clone() + &long).as_bytes()), 3000);
        let longer = format!("{}\n", "x".repeat(5999));
        assert_eq!(whole_lines((longer + &long).as_bytes()), 6000);
    }
}
