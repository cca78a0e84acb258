//! Reloads that a client asks for and waits for: the daemon's side of `paravane reload`.
//!
//! ```text
//!   client (`paravane reload`)                           daemon
//!   {"reload": {}}                               ----->  same user or root?
//!                                                <-----  Ready; or Failed
//!   Begin: devices that may restart              ----->  main thread: reads its file, begins
//!                                                <-----  Working, every second: what it waits for
//!                                                <-----  Done: the outcome of each device; or Failed
//! ```
//! A client that goes ends nothing: the daemon's log and status say what has become of the reload.
pub(crate) mod messages;

use super::args::DaemonArgs;
use super::exports::{Exports, Restarts};
use super::places::{EACH, Full, MOST, Places};
use super::wire::{Parcel, Wire};
use crate::log;
use messages::{DAEMON, DeviceOutcome, Message, Outcome, Wish};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Longest wait for the client's message.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest time that a client can ask the daemon to wait.
const LONGEST: Duration = Duration::from_secs(3600);
/// Time between two messages to a client that waits.
const PERIOD: Duration = Duration::from_secs(1);
/// Time between two looks at the devices.
const INTERVAL: Duration = Duration::from_millis(10);
/// What the main thread answers.
pub(crate) enum Answer {
    /// A reload with this number has begun, with these outcomes so far, and that of the daemon's own settings.
    Begun(u64, Vec<DeviceOutcome>, Option<DeviceOutcome>),
    /// What a reload would do.
    Plan(Vec<DeviceOutcome>),
}

/// A reload that a client asks the main thread for.
pub(crate) struct Asked {
    pub(crate) wish: Wish,
    answer: Sender<Result<Answer, String>>,
}

impl Asked {
    /// Devices that may restart.
    pub(crate) fn restarts(&self) -> Restarts {
        Restarts::Named(self.wish.restart.clone())
    }

    /// The first name of those that may restart which is that of no device.
    pub(crate) fn unknown(&self, mut is_known: impl FnMut(&str) -> bool) -> Option<&str> {
        self.wish.restart.iter().map(String::as_str).find(|name| !is_known(name))
    }

    /// Answers the client. It may have gone.
    pub(crate) fn answer(self, answer: Answer) {
        drop(self.answer.send(Ok(answer)));
    }

    /// Tells the client that nothing has changed.
    pub(crate) fn failed(self, why: &str) {
        drop(self.answer.send(Err(why.to_owned())));
    }
}

/// Takes requests for reloads to the main thread.
pub(crate) struct ReloadServer {
    exports: Exports,
    places: Arc<Places>,
    /// At most as many as there are places.
    asked: Mutex<VecDeque<Asked>>,
}

impl ReloadServer {
    pub(crate) fn new(exports: Exports) -> Arc<Self> {
        Arc::new(Self { exports, places: Arc::default(), asked: Mutex::default() })
    }

    /// The next request, for the main thread.
    pub(crate) fn next(&self) -> Option<Asked> {
        self.asked.lock().pop_front()
    }

    /// Answers a client, in a thread.
    pub(crate) fn answer(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        let full = |full| match full {
            Full::All => format!("{MOST} clients wait for reloads: try again"),
            Full::Share => format!("this process waits for {EACH} reloads: try again"),
        };
        let server = self.clone();
        let names = ["reload-client", "reload the daemon of"];
        self.places.answer(stream, PATIENCE, names, (full, Message::Failed), move |wire| server.serve(wire))
    }

    /// `None`: the client has gone.
    fn serve(&self, wire: &Wire<Message>) -> Option<Message> {
        // What comes with the client's line would be lost.
        wire.say(&Message::Ready).ok()?;
        let wish = match wire.receive() {
            Ok(Some(Parcel { message: Message::Begin(wish), .. })) => wish,
            Ok(Some(_)) => return Some(Message::Failed("a message is out of order".to_owned())),
            Ok(None) | Err(_) => return None,
        };
        let patience = Duration::from_secs(wish.patience_s).min(LONGEST);
        wire.end_within(patience + PATIENCE);
        let deadline = Instant::now() + patience;
        let (answer, receiver) = channel();
        self.asked.lock().push_back(Asked { wish, answer });
        self.exports.notifier().signal();
        let (number, first, daemon) = match wait(wire, &receiver, deadline)? {
            Ok(Answer::Begun(number, first, daemon)) => (number, first, daemon),
            Ok(Answer::Plan(plan)) => return Some(Message::Done(plan)),
            Err(why) => return Some(Message::Failed(why)),
        };
        let mut outcomes = self.follow(wire, number, first, deadline)?;
        outcomes.extend(daemon);
        Some(Message::Done(outcomes))
    }

    /// Waits until nothing is left to do, or for the deadline. `None`: the client has gone.
    ///
    /// `last` are the outcomes at the beginning: another reload may have begun before the first look.
    fn follow(
        &self,
        wire: &Wire<Message>,
        number: u64,
        mut last: Vec<DeviceOutcome>,
        deadline: Instant,
    ) -> Option<Vec<DeviceOutcome>> {
        let mut told = Instant::now();
        loop {
            match self.exports.outcomes(number) {
                Some(outcomes) => last = outcomes,
                // The devices of another reload, or of another daemon.
                None => {
                    let waiting = last.iter_mut().filter(|device| device.outcome == Outcome::Waiting);
                    waiting.for_each(|device| device.why = Some("another reload has begun".to_owned()));
                    return Some(last);
                }
            }
            let waits: Vec<_> = last.iter().filter(|device| device.outcome == Outcome::Waiting).collect();
            if waits.is_empty() || Instant::now() >= deadline {
                return Some(last);
            }
            if told.elapsed() >= PERIOD {
                let what = waits.iter().map(|device| {
                    let why = device.why.as_deref().unwrap_or("its turn");
                    format!("{} (waits for {why})", device.name)
                });
                wire.say(&Message::Working(what.take(8).collect::<Vec<_>>().join(", "))).ok()?;
                told = Instant::now();
            }
            std::thread::sleep(INTERVAL);
        }
    }
}

/// Waits for the main thread, which reads the file. `None`: the client has gone.
fn wait(
    wire: &Wire<Message>,
    receiver: &Receiver<Result<Answer, String>>,
    deadline: Instant,
) -> Option<Result<Answer, String>> {
    loop {
        match receiver.recv_timeout(PERIOD) {
            Ok(answer) => return Some(answer),
            Err(RecvTimeoutError::Disconnected) => return Some(Err("the daemon ends".to_owned())),
            Err(RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                return Some(Err(
                    "the daemon has not read its file in time; it reloads when it has".to_owned()
                ));
            }
            Err(RecvTimeoutError::Timeout) => {
                wire.say(&Message::Working("the daemon to read its file".to_owned())).ok()?;
            }
        }
    }
}

/// Settings of the daemon that a reload has changed, or cannot change.
pub(crate) struct DaemonChange {
    /// The outcome; `None`: there is no difference.
    pub(crate) outcome: Option<DeviceOutcome>,
    /// What the daemon has from now on.
    pub(crate) now: DaemonArgs,
}

impl DaemonChange {
    /// Compares the daemon's settings with those of its file.
    pub(crate) fn between(had: &DaemonArgs, wanted: &DaemonArgs) -> Self {
        let now = DaemonArgs { log_level: wanted.log_level, log_rate: wanted.log_rate, ..had.clone() };
        let (changed, refused) = (had.differing(&now), now.differing(wanted));
        let why = "applies when the daemon is restarted, or taken over from";
        let outcome = |outcome, keys, why: Option<&str>| {
            Some(DeviceOutcome { name: DAEMON.to_owned(), outcome, keys, why: why.map(str::to_owned) })
        };
        let outcome = match (refused.is_empty(), changed.is_empty()) {
            (false, _) => outcome(Outcome::Refused, refused, Some(why)),
            (true, false) => outcome(Outcome::Changed, changed, None),
            (true, true) => None,
        };
        Self { outcome, now }
    }

    /// Applies and logs it.
    pub(crate) fn apply(&self, verbose: u8) {
        log::set_level(self.now.log_level(), verbose);
        log::set_rate(self.now.log_rate(verbose));
        if let Some(DeviceOutcome { outcome: Outcome::Refused, keys, why, .. }) = &self.outcome {
            tracing::warn!("[daemon] {}: {}", keys.join(", "), why.as_deref().unwrap_or_default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemons_settings_are_compared() {
        let had = DaemonArgs::default();
        assert!(DaemonChange::between(&had, &had).outcome.is_none());
        let change = DaemonChange::between(&had, &DaemonArgs { log_rate: Some(7), ..had.clone() });
        assert_eq!(change.now.log_rate, Some(7));
        assert_eq!(change.outcome.unwrap().outcome, Outcome::Changed);
        let wanted = DaemonArgs { log_rate: Some(7), io_threads: Some(3), ..had.clone() };
        let change = DaemonChange::between(&had, &wanted);
        let outcome = change.outcome.unwrap();
        assert_eq!((outcome.outcome, outcome.keys), (Outcome::Refused, vec!["io-threads".to_owned()]));
        assert_eq!(change.now, DaemonArgs { log_rate: Some(7), ..had });
    }
}
