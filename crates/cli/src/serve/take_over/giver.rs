//! The running daemon's side.
//!
//! ```text
//!   idle --request--> offered --Begin--> begun --all sent and taken, or a failure--> done: the daemon exits
//!     ^------------------'
//!      refused, no Begin in time
//! ```
use super::super::exports::Exports;
use super::super::wire::{Parcel, Wire};
use super::{Message, Offer, PATIENCE, VERSION};
use crate::peer::allow;
use paravane_export::Handover;
use parking_lot::Mutex;
use std::collections::HashSet;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Longest wait for the new daemon to resume a device that was sent to it.
const TAKEN_PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Offered,
    Begun,
    /// Number of devices that were handed over, or the first error.
    Done(Result<usize, String>),
}

/// Hands the devices of this daemon over, once.
pub(crate) struct Giver {
    exports: Exports,
    control: UnixListener,
    metrics: Option<TcpListener>,
    /// Ends the listeners' accepting: the new daemon does.
    pub(crate) moved: [Arc<Notify>; 2],
    stop_timeout: Duration,
    take_overs: u64,
    state: Mutex<State>,
}

/// Why a daemon hands nothing over, or did so in vain.
#[derive(Debug)]
enum Fault {
    /// The daemon serves on.
    Refused(String),
    /// The connection failed before Begin. The daemon serves on.
    Lost(io::Error),
    /// The devices are gone.
    Failed(String),
}

impl Giver {
    pub(crate) fn new(
        exports: Exports,
        control: UnixListener,
        metrics: Option<TcpListener>,
        stop_timeout: Duration,
        take_overs: u64,
    ) -> Arc<Self> {
        Arc::new(Self {
            exports,
            control,
            metrics,
            moved: Default::default(),
            stop_timeout,
            take_overs,
            state: Mutex::new(State::Idle),
        })
    }

    /// Whether the devices are being handed over, or were.
    pub(crate) fn has_begun(&self) -> bool {
        matches!(*self.state.lock(), State::Begun | State::Done(_))
    }

    /// The number of devices that were handed over, when the daemon shall exit.
    pub(crate) fn outcome(&self) -> Option<Result<usize, String>> {
        match &*self.state.lock() {
            State::Done(result) => Some(result.clone()),
            _ => None,
        }
    }

    /// Answers a daemon that wants to take over, in a thread.
    pub(crate) fn answer(self: &Arc<Self>, stream: UnixStream, version: u32) -> io::Result<()> {
        let giver = self.clone();
        let allowed = allow(&stream, "take over from");
        let wire = Wire::new(stream, PATIENCE)?.of_a_client(PATIENCE);
        let give = move || giver.serve(&wire, allowed, version);
        std::thread::Builder::new().name("hand-over".into()).spawn(give)?;
        Ok(())
    }

    fn serve(&self, wire: &Wire<Message>, allowed: Result<(), String>, version: u32) {
        if let Err(why) = allowed.and_then(|()| self.claim(version)) {
            tracing::warn!("take-over refused: {why}");
            let _ = wire.say(&Message::Refused(why));
            return;
        }
        let result = match self.hand_over(wire) {
            Ok(count) => Ok(count),
            Err(Fault::Refused(why)) => {
                tracing::warn!("take-over refused: {why}");
                let _ = wire.say(&Message::Refused(why));
                *self.state.lock() = State::Idle;
                return;
            }
            Err(Fault::Lost(error)) => {
                tracing::info!("take-over ended before it began: {error}");
                *self.state.lock() = State::Idle;
                return;
            }
            Err(Fault::Failed(why)) => Err(why),
        };
        *self.state.lock() = State::Done(result);
        self.exports.notifier().signal();
    }

    /// Allows one daemon at a time.
    fn claim(&self, version: u32) -> Result<(), String> {
        if version != VERSION {
            return Err(format!(
                "it uses version {version} of handovers, this daemon version {VERSION}: restart instead"
            ));
        }
        let mut state = self.state.lock();
        match *state {
            State::Idle => *state = State::Offered,
            _ => return Err("another daemon takes over already".to_owned()),
        }
        Ok(())
    }

    fn hand_over(&self, wire: &Wire<Message>) -> Result<usize, Fault> {
        let devices = self.exports.offered().map_err(Fault::Refused)?;
        let offer = Offer {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            devices: devices.clone(),
            metrics: self.metrics.as_ref().and_then(|listener| listener.local_addr().ok()),
            take_overs: self.take_overs,
        };
        wire.say(&Message::Offer(offer)).map_err(Fault::Lost)?;
        match wire.receive().map_err(Fault::Lost)? {
            Some(Parcel { message: Message::Begin, .. }) => {}
            Some(_) => return Err(Fault::Refused("a message is out of order".to_owned())),
            None => return Err(Fault::Lost(io::Error::other("the new daemon has closed the connection"))),
        }
        let (sender, arrivals) = channel();
        wire.end_within(self.stop_timeout.saturating_add(TAKEN_PATIENCE));
        // The state first: the main thread must not take a reload in between.
        *self.state.lock() = State::Begun;
        self.exports.begin_hand_over(&devices, sender).map_err(Fault::Refused)?;
        tracing::info!("handing over all devices to another daemon");
        self.send_all(wire, &arrivals).map_err(Fault::Failed)
    }

    /// Sends all devices as they are drained, and waits until they are taken.
    fn send_all(&self, wire: &Wire<Message>, arrivals: &Receiver<Sent>) -> Result<usize, String> {
        let lost = |error: io::Error| format!("the new daemon has failed: {error}");
        for moved in &self.moved {
            moved.notify_one();
        }
        wire.send(&Message::Control, &[], &[self.control.as_fd()]).map_err(lost)?;
        if let Some(metrics) = &self.metrics {
            wire.send(&Message::Metrics, &[], &[metrics.as_fd()]).map_err(lost)?;
        }
        let deadline = Instant::now() + self.stop_timeout;
        let (mut sent, mut failed) = (HashSet::new(), Vec::new());
        loop {
            let (name, result) = match arrivals
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(arrival) => arrival,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    failed.extend(self.exports.not_handed_over());
                    for name in &failed {
                        let seconds = self.stop_timeout.as_secs();
                        let why =
                            format!("requests in flight not finished within {seconds} s (--stop-timeout)");
                        tracing::error!(device = name, "device not handed over: {why}");
                        wire.say(&Message::Failed { name: name.clone(), why }).map_err(lost)?;
                    }
                    break;
                }
            };
            match result {
                Ok(Handover { record, fds }) => {
                    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                    wire.send(&Message::Device(name.clone()), &record, &fds).map_err(lost)?;
                    sent.insert(name);
                }
                Err(why) => {
                    tracing::error!(device = name, "device not handed over: {why}");
                    wire.say(&Message::Failed { name, why }).map_err(lost)?;
                }
            }
        }
        wire.say(&Message::End).map_err(lost)?;
        let count = sent.len();
        wire.wait_at_most(Some(TAKEN_PATIENCE));
        wire.end_within(TAKEN_PATIENCE * 5);
        while !sent.is_empty() {
            let names = |sent: HashSet<String>| {
                let mut names: Vec<_> = sent.into_iter().collect();
                names.sort();
                names.join(", ")
            };
            match wire.receive() {
                Ok(Some(Parcel { message: Message::Taken(name), .. })) => drop(sent.remove(&name)),
                Ok(Some(Parcel { message: Message::Failed { name, why }, .. })) => {
                    sent.remove(&name);
                    tracing::error!(device = name, "the new daemon has not resumed the session: {why}");
                }
                Ok(Some(_)) => return Err("the new daemon sends messages out of order".to_owned()),
                Ok(None) => return Err(format!("the new daemon has exited before it took {}", names(sent))),
                Err(error) => return Err(format!("the new daemon has not taken {}: {error}", names(sent))),
            }
        }
        match failed.is_empty() {
            true => Ok(count),
            false => Err(format!("not handed over: {}", failed.join(", "))),
        }
    }
}

/// A device that is drained: its name and its state.
pub(crate) type Sent = (String, Result<Handover, String>);
