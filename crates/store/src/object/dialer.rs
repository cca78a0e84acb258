//! A thread that connects: a connector blocks.
use crate::{Connector, Target};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use tokio::sync::oneshot;

type Answer = oneshot::Sender<io::Result<OwnedFd>>;

/// Asks the thread, which ends with it.
#[derive(Debug)]
pub(super) struct ObjectDialer(Sender<Answer>);

impl ObjectDialer {
    /// Starts the thread for connections to one server.
    ///
    /// # Errors
    /// The host refuses a thread.
    pub(super) fn start(
        connector: Arc<dyn Connector>,
        target: Target,
        timeout: Duration,
    ) -> io::Result<Self> {
        let (asks, asked) = channel();
        let thread = std::thread::Builder::new().name("http-connect".into()).stack_size(256 << 10);
        thread.spawn(move || connect(&asked, &*connector, &target, timeout))?;
        Ok(Self(asks))
    }

    /// Connects. The stream blocks.
    ///
    /// # Errors
    /// There is no connection.
    pub(super) async fn connect(&self) -> io::Result<OwnedFd> {
        let (answer, answered) = oneshot::channel();
        let gone = || io::Error::other("the thread that connects has ended");
        self.0.send(answer).map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

fn connect(asked: &Receiver<Answer>, connector: &dyn Connector, target: &Target, timeout: Duration) {
    while let Ok(answer) = asked.recv() {
        // Whoever asked may have given up.
        if !answer.is_closed() {
            let _ = answer.send(connector.connect(target, timeout));
        }
    }
}
