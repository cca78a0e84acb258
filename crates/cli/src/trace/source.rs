//! The daemon that traces, as the client sees it.
use crate::printable::printable_json;
use crate::serve::control;
use crate::serve::trace::lines::{Answer, Ask, TraceLine, TraceRequest};
use anyhow::{Context, anyhow, bail};
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Maximum length of a daemon's line in bytes.
const MAX_LINE: usize = 1 << 16;
/// Longest wait for the first line.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two looks at signals and the deadline.
const PERIOD: Duration = Duration::from_millis(100);

/// Answers of one daemon.
#[derive(Debug)]
pub(super) struct Source {
    stream: BufReader<UnixStream>,
    /// A part of a line.
    line: Vec<u8>,
    pub(super) pid: u32,
    /// Number of requests that are missing.
    pub(super) dropped: u64,
}

/// What comes next.
#[derive(Debug)]
pub(super) enum Event {
    Request(TraceLine),
    /// No request yet.
    Nothing,
    End,
}

impl Source {
    /// Asks the daemon at `control`, else those of this user; one has the device.
    pub(super) fn open(control: Option<&Path>, request: TraceRequest) -> Result<Self, anyhow::Error> {
        let device = request.device.clone();
        let ask = Ask::Trace(request);
        if let Some(path) = control {
            return match Self::ask(path, &ask).with_context(|| path.display().to_string())? {
                Some(source) => Ok(source),
                None => Err(anyhow!("{}: no device is named {device:?}", path.display())),
            };
        }
        let directory = control::known_directory()?;
        let mut found: Option<(PathBuf, Self)> = None;
        let mut problems = Vec::new();
        for path in control::sockets(&directory).with_context(|| directory.display().to_string())? {
            match (Self::ask(&path, &ask), &found) {
                (Ok(Some(_)), Some((other, _))) => {
                    bail!(
                        "two daemons have a device {device:?}: choose one with --control {} or {}",
                        other.display(),
                        path.display()
                    );
                }
                (Ok(Some(source)), None) => found = Some((path, source)),
                (Ok(None), _) => {}
                // Left behind by a killed daemon.
                (Err(error), _) if is_refused(&error) => {}
                (Err(error), _) => problems.push(format!("{}: {error:#}", path.display())),
            }
        }
        match (found, problems.is_empty()) {
            (Some((_, source)), _) => Ok(source),
            (None, true) => Err(anyhow!("no daemon in {} has a device {device:?}", directory.display())),
            (None, false) => Err(anyhow!("{}", problems.join("; "))),
        }
    }

    /// `None`: the daemon has no such device.
    fn ask(path: &Path, ask: &Ask) -> Result<Option<Self>, anyhow::Error> {
        let stream = control::request(path, ask)?;
        let mut source = Self { stream: BufReader::new(stream), line: Vec::new(), pid: 0, dropped: 0 };
        source.stream.get_ref().set_read_timeout(Some(PERIOD))?;
        let end = Instant::now() + ANSWER_TIMEOUT;
        let first = loop {
            match source.line() {
                Ok(line) => break line.context("no answer")?,
                Err(error) if is_late(&error) && Instant::now() < end => {}
                Err(error) if is_late(&error) => bail!("no answer within {} s", ANSWER_TIMEOUT.as_secs()),
                Err(error) => return Err(error.into()),
            }
        };
        // An older daemon sends a report.
        let answer =
            serde_json::from_slice(&printable_json(&first)).context("the daemon cannot trace: update it")?;
        match answer {
            Answer::Started { pid, .. } => {
                source.pid = pid;
                Ok(Some(source))
            }
            Answer::NoDevice(_) => Ok(None),
            Answer::Error(why) => Err(anyhow!("{why}")),
            _ => Err(anyhow!("unexpected answer")),
        }
    }

    /// The next line; `None`: the end. Reads once at most: a line that comes in parts takes several
    /// calls, and the others fail with [`ErrorKind::WouldBlock`].
    fn line(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let bytes = self.stream.fill_buf()?;
        if bytes.is_empty() {
            // A part of a line is no request.
            return Ok(None);
        }
        let end = bytes.iter().position(|byte| *byte == b'\n').map(|end| end + 1);
        let count = end.unwrap_or(bytes.len());
        if self.line.len() + count > MAX_LINE {
            return Err(std::io::Error::other("line too long"));
        }
        self.line.extend_from_slice(&bytes[..count]);
        self.stream.consume(count);
        match end {
            Some(_) => Ok(Some(std::mem::take(&mut self.line))),
            None => Err(ErrorKind::WouldBlock.into()),
        }
    }

    /// Waits briefly for the next request.
    pub(super) fn next(&mut self) -> Result<Event, anyhow::Error> {
        let line = match self.line() {
            Ok(Some(line)) => line,
            Ok(None) => return Ok(Event::End),
            Err(error) if is_late(&error) => return Ok(Event::Nothing),
            Err(error) => return Err(error).context("cannot read from the daemon"),
        };
        Ok(
            match serde_json::from_slice(&printable_json(&line)).context("unexpected answer of the daemon")? {
                Answer::Request(line) => Event::Request(line),
                Answer::Dropped(count) => {
                    self.dropped = count;
                    Event::Nothing
                }
                Answer::Error(why) => return Err(anyhow!("{why}")),
                Answer::End(_) => Event::End,
                Answer::Started { .. } | Answer::NoDevice(_) => Event::Nothing,
            },
        )
    }
}

fn is_refused(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref().map(std::io::Error::kind);
    kind == Some(ErrorKind::ConnectionRefused)
}

/// A line is not there yet.
fn is_late(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn lines_may_come_in_parts_and_have_a_limit() {
        let (mut daemon, client) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut source = Source { stream: BufReader::new(client), line: Vec::new(), pid: 0, dropped: 0 };
        daemon.write_all(b"{\"dropped\"").unwrap();
        assert!(matches!(source.next().unwrap(), Event::Nothing));
        daemon.write_all(b": 7}\n").unwrap();
        assert!(matches!(source.next().unwrap(), Event::Nothing));
        assert_eq!(source.dropped, 7);
        daemon.write_all(&vec![b' '; MAX_LINE + 1]).unwrap();
        let error = std::iter::repeat_with(|| source.next()).find_map(Result::err).unwrap();
        assert!(error.root_cause().to_string().contains("line too long"));
    }

    #[test]
    fn a_daemon_that_goes_ends_the_trace() {
        let (mut daemon, client) = UnixStream::pair().unwrap();
        let mut source = Source { stream: BufReader::new(client), line: Vec::new(), pid: 0, dropped: 0 };
        daemon.write_all(b"{\"requ").unwrap();
        drop(daemon);
        let mut events = std::iter::repeat_with(|| source.next().unwrap());
        assert!(matches!(events.find(|event| !matches!(event, Event::Nothing)), Some(Event::End)));
    }
}
