//! A number of places that clients of the control socket share, by their processes.
use super::wire::Wire;
use crate::peer::allow;
use nix::sys::socket::{getsockopt, sockopt};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// Most places.
pub(crate) const MOST: usize = 8;
/// Most places of one process: half of them.
pub(crate) const EACH: usize = MOST / 2;

/// The places of one kind of request.
#[derive(Debug, Default)]
pub(crate) struct Places {
    taken: Mutex<HashMap<i32, usize>>,
}

/// A place, until this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    process: i32,
}

/// There is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// For nobody.
    All,
    /// For this process.
    Share,
}

/// Why a client has no place, and how a client is told that it is refused.
type Refusals<M> = (fn(Full) -> String, fn(String) -> M);

impl Places {
    /// Takes a place for the process at the other end of a connection.
    ///
    /// # Errors
    /// There is none for it. Processes that this one cannot see share one share.
    pub(crate) fn take(self: &Arc<Self>, client: &impl AsFd) -> Result<Place, Full> {
        // 0: it is in another PID name space.
        self.take_for(getsockopt(client, sockopt::PeerCredentials).map_or(0, |peer| peer.pid()))
    }

    /// Answers a client that may do `what` ("take over from") in a thread called `name`, if it has a place.
    ///
    /// `serve` returns the last message; `None`: the client has gone.
    ///
    /// # Errors
    /// The host refuses a thread, or the client has gone.
    pub(crate) fn answer<M: Serialize + DeserializeOwned + Send + 'static>(
        self: &Arc<Self>,
        stream: UnixStream,
        patience: Duration,
        [name, what]: [&str; 2],
        (full, failed): Refusals<M>,
        serve: impl FnOnce(&Wire<M>) -> Option<M> + Send + 'static,
    ) -> io::Result<()> {
        let (place, allowed) = (self.take(&stream), allow(&stream, what));
        let wire = Wire::new(stream, patience)?.of_a_client(patience);
        let place = match place {
            Ok(place) => place,
            Err(why) => return wire.say(&failed(full(why))),
        };
        let answer = move || {
            let message = allowed.map_or_else(|why| Some(failed(why)), |()| serve(&wire));
            drop(place);
            // A client that has gone misses it.
            let _ = message.map(|message| wire.say(&message));
        };
        std::thread::Builder::new().name(name.into()).spawn(answer).map(drop)
    }

    fn take_for(self: &Arc<Self>, process: i32) -> Result<Place, Full> {
        let mut taken = self.taken.lock();
        if taken.values().sum::<usize>() >= MOST {
            return Err(Full::All);
        }
        let own = taken.entry(process).or_default();
        if *own >= EACH {
            return Err(Full::Share);
        }
        *own += 1;
        Ok(Place { places: self.clone(), process })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock();
        if let Some(own) = taken.get_mut(&self.process) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.process);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_leaves_places_to_others() {
        let places = Arc::new(Places::default());
        let mut first: Vec<_> = (0..EACH).map(|_| places.take_for(1).unwrap()).collect();
        assert_eq!(places.take_for(1).unwrap_err(), Full::Share);
        let others: Vec<_> = (0..MOST - EACH).map(|process| places.take_for(process as i32 + 2)).collect();
        assert!(others.iter().all(Result::is_ok));
        assert_eq!(places.take_for(0).unwrap_err(), Full::All);
        first.pop();
        assert!(places.take_for(1).is_ok());
        drop((first, others));
        assert!(places.taken.lock().is_empty());
    }
}
