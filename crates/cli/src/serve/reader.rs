//! Reads the file of devices again, outside of the daemon's sandbox.
//!
//! ```text
//!  daemon: start --file, user, a socket of the broker--> reader: a process of its own, without device code
//!    | sandbox: the file is out of reach
//!    '-- ConfigFile::read --a pipe--> reads and parses --its servers--> broker: may connect to them
//!                                          '-------------its text-----> the pipe
//! ```
//! So neither the daemon nor the broker can read what lies beside the file, such as keys. What the
//! broker may connect to is in the file as the operator wrote it: the reader has no socket of the
//! broker if the daemon could write the file. It ends with the daemon.
use super::broker::message::{Message, receive, send};
use super::config::Config;
use super::helper::{self, Helper};
use super::sandbox::helpers;
use super::sandbox::user::Target as User;
use crate::failure::Failure;
use anyhow::{Context, anyhow};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const READER: Helper = Helper { name: "reader", does: "reads the file of devices" };
/// Most bytes of an answer: more than a file may have, as JSON.
const MOST: u64 = 8 << 20;

/// The file of devices of a running daemon.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    path: PathBuf,
    /// The same without links and relative parts, as it was when the daemon started.
    pub(crate) real: PathBuf,
    /// The process that reads it. `None`: the daemon has no sandbox.
    reader: Option<OwnedFd>,
    /// Directory in which the daemon may write, if it could change the file.
    writable_by: Option<PathBuf>,
}

impl ConfigFile {
    /// A file that the daemon reads itself.
    pub(crate) fn direct(path: &Path) -> Self {
        Self { path: path.to_owned(), real: real(path), reader: None, writable_by: None }
    }

    /// A file that another process reads, which this starts.
    ///
    /// `broker`: tells the broker of its servers. `writable_by`: where the daemon may write, if it could
    /// change the file.
    ///
    /// # Errors
    /// The host refuses a process.
    pub(crate) fn start(
        path: &Path,
        user: Option<&str>,
        broker: Option<OwnedFd>,
        writable_by: Option<PathBuf>,
    ) -> Result<Self, anyhow::Error> {
        let near = READER.start(&[])?;
        let message = Message::File { path: path.to_owned(), user: user.map(ToOwned::to_owned) };
        send(&near, &message, broker.as_ref().map(AsFd::as_fd))?;
        Ok(Self { path: path.to_owned(), real: real(path), reader: Some(near), writable_by })
    }

    /// Warns of a daemon that could change the file.
    pub(crate) fn warn(&self) {
        if let Some(way) = &self.writable_by {
            tracing::warn!(
                "a guest that takes over this process could change {}, as the daemon may write in {}: a reload adds no \
                 servers; keep the file and images in different directories",
                self.path.display(),
                way.display()
            );
        }
    }

    /// Reads the file again. It may block, as storage may hang.
    ///
    /// # Errors
    /// The file cannot be read or is invalid. Or it is empty: whoever writes a file in place empties it first,
    /// and a reload at that moment would end every session.
    pub(crate) fn read(&self) -> Result<Config, String> {
        let text = match &self.reader {
            None => Config::text(&self.path).map_err(|error| error.to_string())?,
            Some(reader) => ask(reader)?,
        };
        if text.trim().is_empty() {
            return Err(format!(
                "{}: the file is empty: reload again when it is written; to remove all devices, leave a comment in it",
                self.path.display()
            ));
        }
        Config::parse(&self.path, &text).map_err(|error| error.to_string())
    }
}

/// A path that names the file from anywhere: as given, if it has gone.
pub(crate) fn real(path: &Path) -> PathBuf {
    path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_owned())
}

/// The text of the file.
fn ask(reader: &OwnedFd) -> Result<String, String> {
    let (near, far) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|error| format!("cannot create a pipe: {error}"))?;
    send(reader, &Message::Read, Some(far.as_fd())).map_err(|_| READER.has_ended())?;
    drop(far);
    let mut answer = Vec::new();
    File::from(near).take(MOST).read_to_end(&mut answer).map_err(|error| error.to_string())?;
    serde_json::from_slice(&answer).unwrap_or_else(|_| Err(READER.has_ended()))
}

/// The reader's process: `paravane reader`, started by the daemon with a socket as its stdin.
pub(crate) fn main() -> Result<ExitCode, Failure> {
    let (socket, _blocked) = helper::begin()?;
    let (file, user, broker) = match receive(&socket).context("stdin is not the socket of a daemon")? {
        Some((Message::File { path, user }, broker)) => (path, user, broker),
        Some(_) => return Err(Failure::request(anyhow!("unexpected message"))),
        None => return Ok(ExitCode::SUCCESS),
    };
    let user = user.as_deref().map(User::find).transpose().map_err(Failure::request)?;
    helpers::enter_reader(&file, user.as_ref())?;
    serve(&socket, &file, broker.as_ref());
    Ok(ExitCode::SUCCESS)
}

/// Reads the file whenever the daemon asks, until it has gone.
fn serve(socket: &OwnedFd, file: &Path, broker: Option<&OwnedFd>) {
    // An error is a message of a daemon that a guest has taken over.
    while let Ok(Some((message, answer))) = receive(socket) {
        let (Message::Read, Some(answer)) = (message, answer) else { continue };
        let text = Config::text(file).map_err(|error| error.to_string());
        if let (Some(broker), Ok(text)) = (broker, &text)
            && let Ok(config) = Config::parse(file, text)
        {
            allow(broker, &config);
        }
        // The daemon may wait no longer.
        let _ = serde_json::to_writer(File::from(answer), &text);
    }
}

/// Names the servers of a file to the broker, before the daemon can ask for them.
fn allow(broker: &OwnedFd, config: &Config) {
    let locations = config.devices.iter().flat_map(|device| device.kind.locations());
    for target in locations.filter_map(paravane_store::target) {
        // It may have ended.
        drop(send(broker, &Message::Allow(target), None));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fds;

    #[test]
    fn the_text_goes_to_the_daemon_and_its_servers_to_the_broker_first() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("devices.toml");
        let ((near, far), (broker, servers)) = (fds::pair().unwrap(), fds::pair().unwrap());
        let path = file.clone();
        let reader = std::thread::spawn(move || serve(&far, &path, Some(&broker)));
        let config =
            ConfigFile { path: file.clone(), real: file.clone(), reader: Some(near), writable_by: None };
        assert!(config.read().unwrap_err().contains("No such file"));
        let text = "[[blk]]\nname = \"a\"\nimage = \"nbd://store/x\"\nsocket = \"/s\"\n";
        std::fs::write(&file, text).unwrap();
        assert_eq!(config.read().unwrap().devices.len(), 1);
        let Some((Message::Allow(target), None)) = receive(&servers).unwrap() else { panic!() };
        let wanted = paravane_store::Target::Tcp { host: "store".into(), port: 10809 };
        assert_eq!(target, wanted);
        // Anything else is no reason to end.
        send(config.reader.as_ref().unwrap(), &Message::Connected, None).unwrap();
        std::fs::write(&file, "[[blk]]\n").unwrap();
        assert!(config.read().unwrap_err().contains("missing key"));
        drop(config);
        reader.join().unwrap();
        assert!(receive(&servers).unwrap().is_none(), "an invalid file names no server");
    }

    #[test]
    fn a_reader_that_has_ended_is_named() {
        let (near, far) = fds::pair().unwrap();
        drop(far);
        let config =
            ConfigFile { path: "/x".into(), real: "/x".into(), reader: Some(near), writable_by: None };
        assert!(config.read().unwrap_err().contains("restart the daemon"));
    }
}
