//! The results of a run, as `results.json` has them.
use crate::host::{Host, HostWatch};
use crate::peers::{PeerVersion, versions};
use crate::{BenchError, Row};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Instant;

/// The largest file that is read.
const LARGEST: u64 = 64 << 20;
/// The format that this program writes. Fields may be added.
const FORMAT: u32 = 1;

/// A benchmark that did not run.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Omitted {
    /// Name of the benchmark.
    pub bench: String,
    /// Why it did not run.
    pub reason: String,
}

/// The results of a run.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Results {
    /// Format of the file: 1.
    pub format: u32,
    /// Name and version of the program.
    pub program: String,
    /// The command line.
    pub command: Vec<String>,
    /// Variables of the environment that change what is measured.
    pub environment: Vec<[String; 2]>,
    /// Start of the run: date and time, UTC.
    pub started: String,
    /// Duration of the run.
    pub seconds: f64,
    /// The machine and its noise.
    pub host: Host,
    /// Versions of the peers with figures in this run.
    pub peers: Vec<PeerVersion>,
    /// Benchmarks that did not run.
    pub omitted: Vec<Omitted>,
    /// The figures.
    pub rows: Vec<Row>,
}

/// A run that has begun.
#[derive(Debug)]
pub struct Recorder {
    started: String,
    start: Instant,
    watch: HostWatch,
}

impl Recorder {
    /// Begins a run at `started`: date and time, UTC.
    #[must_use]
    pub fn start(started: String) -> Self {
        Self { started, start: Instant::now(), watch: HostWatch::start() }
    }

    /// The results of the run.
    #[must_use]
    pub fn finish(self, program: String, rows: Vec<Row>, omitted: Vec<Omitted>) -> Results {
        let environment = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok().filter(|name| name.starts_with("PARAVANE_"))?;
            Some([name, value.to_string_lossy().into_owned()])
        });
        let mut environment: Vec<[String; 2]> = environment.collect();
        environment.sort();
        Results {
            format: FORMAT,
            program,
            command: command(),
            environment,
            started: self.started,
            seconds: self.start.elapsed().as_secs_f64(),
            host: self.watch.finish(),
            peers: versions(&rows),
            omitted,
            rows,
        }
    }
}

/// The command line, without the folder of the program.
fn command() -> Vec<String> {
    let mut words: Vec<String> =
        std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(program) = words.first_mut() {
        *program = program.rsplit('/').next().unwrap_or_default().to_owned();
    }
    words
}

impl Results {
    /// Reads `results.json`, or the output of `paravane bench --json`.
    ///
    /// # Errors
    /// The file cannot be read, is too large, or is no results file.
    pub fn read(path: &Path) -> Result<Self, BenchError> {
        let name = || path.display().to_string();
        let failed = |source| BenchError::ReadResults { path: name(), source };
        let mut text = Vec::new();
        File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut text)).map_err(failed)?;
        if text.len() as u64 > LARGEST {
            return Err(BenchError::LargeResults(name()));
        }
        let no_results = |source| BenchError::NoResults { path: name(), source };
        if text.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[') {
            let rows = serde_json::from_slice(&text).map_err(no_results)?;
            return Ok(Self { rows, ..Self::default() });
        }
        let results: Self = serde_json::from_slice(&text).map_err(no_results)?;
        if results.format != FORMAT {
            return Err(BenchError::ForeignResults { path: name(), format: results.format });
        }
        Ok(results)
    }

    /// The command line as one would type it.
    #[must_use]
    pub fn command_line(&self) -> String {
        let quoted = |word: &String| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+".contains(c);
            if !word.is_empty() && word.chars().all(plain) {
                word.clone()
            } else {
                format!("'{}'", word.replace('\'', r"'\''"))
            }
        };
        self.command.iter().map(quoted).collect::<Vec<_>>().join(" ")
    }

    /// Names of the peers whose versions differ in `other`.
    pub(crate) fn changed_peers(&self, other: &Self) -> Vec<String> {
        let changed = |peer: &&PeerVersion| {
            let there = other.peers.iter().find(|there| there.name == peer.name);
            there.is_some_and(|there| there.version != peer.version)
        };
        self.peers.iter().filter(changed).map(|peer| peer.name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn read(text: &str) -> Result<Results, BenchError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        Results::read(file.path())
    }

    #[test]
    fn what_is_written_is_read() {
        let rows = crate::published::ioeventfd::rows();
        let results = Recorder::start("2026-01-01T00:00:00Z".to_owned()).finish(
            "paravane 1".to_owned(),
            rows,
            Vec::new(),
        );
        let again = read(&serde_json::to_string(&results).unwrap()).unwrap();
        assert_eq!((again.rows.len(), again.started), (results.rows.len(), results.started));
        let list = read(&serde_json::to_string(&results.rows).unwrap()).unwrap();
        assert_eq!((list.rows.len(), list.program.as_str()), (results.rows.len(), ""));
    }

    #[test]
    fn other_files_are_refused() {
        for (text, error) in [
            ("", "no results of paravane bench"),
            ("{\"format\": 2}", "format 2"),
            ("{}", "format 0"),
            ("[{\"bench\": 1}]", "no results of paravane bench"),
            ("[1e999]", "no results of paravane bench"),
        ] {
            let message = read(text).unwrap_err().to_string();
            assert!(message.contains(error), "{text}: {message}");
        }
        assert!(Results::read(Path::new("/nonexistent")).unwrap_err().to_string().contains("/nonexistent"));
    }

    #[test]
    fn a_command_line_can_be_pasted() {
        let command = ["paravane", "bench", "blk", "--filter", "it's"].map(str::to_owned).to_vec();
        let results = Results { command, ..Results::default() };
        assert_eq!(results.command_line(), r"paravane bench blk --filter 'it'\''s'");
    }
}
