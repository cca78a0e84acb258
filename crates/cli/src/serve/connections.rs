//! A bounded number of connections, shared fairly by clients.
//!
//! ```text
//!   accept --> silent --whole request--> waiting for the report --> reading the response --> closed
//!                 '--------------------- evicted, oldest first -----------'
//! ```
//! When the table is full, the client with the most connections loses its oldest one: a silent one
//! first, then one that has been reading for longer than [`GRACE`]. A connection that waits for the
//! report is never evicted: the daemon keeps that wait short. Nor is one that traces requests: their
//! number is limited.
use parking_lot::Mutex;
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

/// Reading time before a connection can be evicted.
const GRACE: Duration = Duration::from_secs(1);
/// Time between attempts to evict a connection.
const RETRY: Duration = Duration::from_millis(20);

/// A client: an IPv4 address, an IPv6 /64 network, or the control socket's users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Client(u64);

impl Client {
    /// All users of the control socket.
    pub(crate) const LOCAL: Self = Self(0);

    pub(crate) fn at(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self(address.to_bits().into()),
            // One host may have a network of this size and change its address at will.
            IpAddr::V6(address) => Self((address.to_bits() >> 64) as u64),
        }
    }
}

/// Serves in a thread called `name` until the process ends. Logs `failed` if that ends before.
///
/// # Errors
/// The thread or its descriptors cannot be created.
pub(crate) fn in_thread(
    name: &str,
    failed: &'static str,
    serve: impl Future<Output = io::Result<()>> + Send + 'static,
) -> Result<(), anyhow::Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    std::thread::Builder::new().name(name.into()).spawn(move || {
        if let Err(error) = runtime.block_on(serve) {
            tracing::error!(%error, "{failed}");
        }
    })?;
    Ok(())
}

/// Accepts a connection by `poll`. `None`: the listener has moved to another process.
pub(crate) async fn accept_until<T>(
    moved: &Notify,
    mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
) -> Option<T> {
    let mut moved = pin!(moved.notified());
    std::future::poll_fn(|context| match moved.as_mut().poll(context) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => poll(context).map(Some),
    })
    .await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Silent,
    Waiting,
    Reading { since: Instant },
}

#[derive(Debug)]
struct Connection {
    number: u64,
    client: Client,
    state: State,
    task: AbortHandle,
}

/// The connections of one listener.
#[derive(Debug)]
pub(crate) struct Connections {
    most: usize,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// Oldest first.
    open: Vec<Connection>,
    count: u64,
}

/// Keeps a connection in the table until dropped.
#[derive(Debug)]
pub(crate) struct ConnectionGuard {
    connections: Arc<Connections>,
    number: u64,
}

impl Connections {
    /// Creates a table of at most `most` connections.
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, table: Mutex::default() })
    }

    /// Serves a connection in a new task once there is room.
    pub(crate) async fn serve<F>(self: &Arc<Self>, client: Client, serve: impl FnOnce(ConnectionGuard) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        while !self.make_room() {
            tokio::time::sleep(RETRY).await;
        }
        {
            // Locked until the connection is in the table: the task cannot remove it before.
            let mut table = self.table.lock();
            let number = table.count;
            table.count += 1;
            let guard = ConnectionGuard { connections: self.clone(), number };
            let task = tokio::spawn(serve(guard)).abort_handle();
            table.open.push(Connection { number, client, state: State::Silent, task });
        }
        // A request that has arrived is read before the next eviction.
        tokio::task::yield_now().await;
    }

    fn make_room(&self) -> bool {
        let mut table = self.table.lock();
        if table.open.len() < self.most {
            return true;
        }
        let now = Instant::now();
        let states: Vec<_> = table.open.iter().map(|open| (open.client, open.state)).collect();
        let Some(victim) = victim(&states, now) else { return false };
        let victim = table.open.remove(victim);
        tracing::debug!(limit = self.most, "connection evicted: too many connections");
        victim.task.abort();
        true
    }

    fn set(&self, number: u64, state: State) {
        if let Some(open) = self.table.lock().open.iter_mut().find(|open| open.number == number) {
            open.state = state;
        }
    }
}

impl ConnectionGuard {
    /// The request has arrived.
    pub(crate) fn waits(&self) {
        self.connections.set(self.number, State::Waiting);
    }

    /// The response is being sent.
    pub(crate) fn reads(&self) {
        self.connections.set(self.number, State::Reading { since: Instant::now() });
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let number = self.number;
        self.connections.table.lock().open.retain(|open| open.number != number);
    }
}

/// Index of the connection to evict. `open` is sorted by age, oldest first.
fn victim(open: &[(Client, State)], now: Instant) -> Option<usize> {
    let silent = |state| state == State::Silent;
    let slow = |state| match state {
        State::Reading { since } => now.saturating_duration_since(since) >= GRACE,
        _ => false,
    };
    oldest_of_most(open, silent).or_else(|| oldest_of_most(open, slow))
}

/// Index of the oldest connection of the client with the most connections.
///
/// Of those in a state of `those`.
fn oldest_of_most(open: &[(Client, State)], those: impl Fn(State) -> bool) -> Option<usize> {
    let candidates = || open.iter().enumerate().filter(|(_, (_, state))| those(*state));
    let count = |client: Client| open.iter().filter(|(other, _)| *other == client).count();
    let most = candidates().map(|(_, (client, _))| count(*client)).max()?;
    candidates().find(|(_, (client, _))| count(*client) == most).map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_with_the_most_connections_loses_its_oldest() {
        let now = Instant::now();
        let (a, b) = (Client(1), Client(2));
        let late = State::Reading { since: now };
        let slow = State::Reading { since: now.checked_sub(GRACE).unwrap() };
        let silent = State::Silent;
        assert_eq!(victim(&[(b, silent), (a, silent), (a, silent)], now), Some(1));
        assert_eq!(victim(&[(a, silent), (b, silent)], now), Some(0));
        // A connection that waits stays while there are others.
        assert_eq!(victim(&[(a, slow), (a, State::Waiting), (b, silent)], now), Some(2));
        assert_eq!(victim(&[(b, slow), (a, late), (a, slow), (a, State::Waiting)], now), Some(2));
        assert_eq!(victim(&[(a, State::Waiting), (a, late)], now), None);
    }

    #[test]
    fn addresses_of_one_network_are_one_client() {
        let client = |text: &str| Client::at(text.parse().unwrap());
        assert_eq!(client("2001:db8::1"), client("2001:db8::ffff:2"));
        assert_ne!(client("2001:db8::1"), client("2001:db8:0:1::1"));
        assert_ne!(client("192.0.2.1"), client("192.0.2.2"));
        assert_eq!(client("192.0.2.1"), client("::ffff:192.0.2.1"));
    }
}
