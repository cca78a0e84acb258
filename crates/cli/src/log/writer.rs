//! Writes lines to stderr, and counts those that stderr does not take.
use super::lines::{Style, own_line};
use super::queue::{Batch, Queue};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, ErrorKind, Write};
use std::time::Duration;

/// Longest write of more than one line. A pipe takes so many bytes (PIPE_BUF) as a whole, and no line of another process comes
/// between.
const WHOLE: usize = 4096;

/// stderr without the lock and the buffer of [`std::io::Stderr`].
pub(super) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::io::write(io::stderr(), bytes) {
                Err(rustix::io::Errno::INTR) => {}
                // Somebody who shares it has set O_NONBLOCK.
                Err(rustix::io::Errno::AGAIN) => drop(poll_stderr(None)),
                result => return Ok(result?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether stderr takes a write, or has an error.
fn poll_stderr(time: Option<&Timespec>) -> bool {
    let stderr = io::stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    poll(&mut fds, time).is_ok() && !fds[0].revents().is_empty()
}

/// Where lines end.
pub(super) struct Writer<W> {
    out: W,
    style: Style,
    batch: Batch,
    /// Lines that were lost and not told of.
    lost: u64,
    /// The last line was cut off.
    torn: bool,
}

impl Writer<Stderr> {
    /// Writes what is queued as far as stderr takes it without a wait.
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

    pub(super) fn style(&self) -> Style {
        self.style
    }

    /// Waits for lines, for so long at most, and writes them.
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
            self.tell_lost();
        }
        self.batch = batch;
    }

    /// Writes whole lines, after what is to be said of those that were lost.
    fn write(&mut self, lines: &[u8]) {
        if !self.tell_lost() {
            self.lost += count(lines);
            return;
        }
        let written = self.write_some(lines);
        self.lost += count(&lines[written..]);
        self.torn = written > 0 && lines[written - 1] != b'\n';
    }

    /// Says how many lines were lost, if any were; `false`: it cannot be said yet.
    fn tell_lost(&mut self) -> bool {
        if self.lost == 0 {
            return true;
        }
        let words = match self.lost {
            1 => "1 log line lost: stderr did not take it".to_owned(),
            lost => format!("{lost} log lines lost: stderr did not take them"),
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

    /// Writes as much as can be written.
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

/// How many bytes are written at once: lines of up to [`WHOLE`] bytes in all, or one that is longer.
fn whole_lines(lines: &[u8]) -> usize {
    let end = |bytes: &[u8]| bytes.iter().rposition(|&byte| byte == b'\n').map(|at| at + 1);
    let first = || lines.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
    end(&lines[..lines.len().min(WHOLE)]).or_else(first).unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes so many bytes, then fails until it is given more room.
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
        assert!(lines[2].ends_with("WARN 3 log lines lost: stderr did not take them"), "{lines:?}");
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
