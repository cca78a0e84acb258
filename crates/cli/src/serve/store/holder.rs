//! Store in another process: `paravane hold`.
use super::text::{Answer, MAX_ANSWER, MAX_FDS, Name, Request};
use super::{DescriptorStore, StoreError, TIMEOUT};
use crate::fds::{self, Received};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect,
    shutdown, socket_with,
};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// Maximum number of descriptors that a holder returns: more than the kernel lets a process open.
const MAX_HELD: usize = 1 << 20;

/// Connection to a holder, which serves no other daemon meanwhile.
#[derive(Debug)]
pub(crate) struct HolderStore {
    socket: OwnedFd,
}

/// A descriptor of an earlier daemon.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) name: Name,
    pub(crate) fd: OwnedFd,
}

/// Connection to a holder that may serve another daemon at the moment.
#[derive(Debug)]
pub(crate) struct WaitingHolder(HolderStore);

impl WaitingHolder {
    /// Connects to the holder that listens on `path`.
    ///
    /// # Errors
    /// No holder listens.
    pub(crate) fn connect(path: &Path) -> Result<Self, StoreError> {
        let os = io::Error::from;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(os)?;
        set_socket_timeout(&socket, Timeout::Send, Some(TIMEOUT)).map_err(os)?;
        connect(&socket, &SocketAddrUnix::new(path).map_err(os)?).map_err(os)?;
        Ok(Self(HolderStore { socket }))
    }

    /// Waits until the holder serves this process.
    ///
    /// # Errors
    /// It serves another daemon all the time, refuses, or ends.
    pub(crate) fn wait(self, patience: Duration) -> Result<HolderStore, StoreError> {
        let Self(store) = self;
        let wait_at_most = |time| set_socket_timeout(&store.socket, Timeout::Recv, Some(time));
        wait_at_most(patience).map_err(io::Error::from)?;
        match store.answer() {
            Ok((Answer::Hello { .. }, fds)) if fds.is_empty() => {}
            Ok(_) => return Err(StoreError::Answer),
            Err(StoreError::Timeout) => return Err(StoreError::Busy(patience)),
            Err(error) => return Err(error),
        }
        wait_at_most(TIMEOUT).map_err(io::Error::from)?;
        Ok(store)
    }
}

impl HolderStore {
    /// Connects to the holder that listens on `path`, and waits until it serves this process.
    ///
    /// # Errors
    /// No holder listens, or it serves another daemon all the time.
    pub(crate) fn connect(path: &Path) -> Result<Self, StoreError> {
        WaitingHolder::connect(path)?.wait(TIMEOUT)
    }

    /// Copies of all held descriptors, in the order in which they were stored.
    ///
    /// The holder keeps them until they are removed: a daemon that dies before it has used them
    /// leaves them to its successor.
    ///
    /// # Errors
    /// The holder does not answer, or this process may not open that many descriptors.
    pub(crate) fn take(&mut self) -> Result<Vec<Held>, StoreError> {
        let mut all = Vec::new();
        loop {
            match self.ask(&Request::Take { from: all.len() }, &[])? {
                (Answer::Held(names), fds) if names.len() == fds.len() && !fds.is_empty() => {
                    all.extend(names.into_iter().zip(fds).map(|(name, fd)| Held { name, fd }));
                }
                (Answer::End { total }, fds) if fds.is_empty() && total == all.len() => return Ok(all),
                _ => {
                    self.end();
                    return Err(StoreError::Answer);
                }
            }
            if all.len() > MAX_HELD {
                return Err(StoreError::Answer);
            }
        }
    }

    /// Sends a request and waits for the answer.
    ///
    /// After an error, except a refusal, every later request fails with [`StoreError::Ended`]: an
    /// answer that is late must not be taken for that of the next request.
    fn ask(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Answer, Vec<OwnedFd>), StoreError> {
        let sent = fds::send(&self.socket, request.to_string().as_bytes(), fds, SendFlags::empty());
        let answer =
            sent.map_err(|error| StoreError::from(io::Error::from(error))).and_then(|()| self.answer());
        if answer.as_ref().is_err_and(|error| !matches!(error, StoreError::Refused(_))) {
            self.end();
        }
        answer
    }

    /// Ends the connection: every later request fails.
    fn end(&self) {
        // Fails if the holder has ended.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    fn answer(&self) -> Result<(Answer, Vec<OwnedFd>), StoreError> {
        let mut buffer = [0; MAX_ANSWER];
        let Received { len, fds, text_cut, fds_cut } =
            fds::receive(&self.socket, &mut buffer, MAX_FDS, RecvFlags::empty()).map_err(io::Error::from)?;
        if fds_cut {
            let limit = io::Error::other("cannot receive descriptors: RLIMIT_NOFILE is too low");
            return Err(StoreError::Os(limit));
        }
        match (len, text_cut) {
            (0, _) => Err(StoreError::Ended),
            (_, true) => Err(StoreError::Answer),
            (len, false) => match Answer::parse(&buffer[..len])? {
                Answer::Refused(why) => Err(StoreError::Refused(why)),
                answer => Ok((answer, fds)),
            },
        }
    }

    fn expect_done(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), StoreError> {
        match self.ask(request, fds)? {
            (Answer::Done, _) => Ok(()),
            _ => {
                self.end();
                Err(StoreError::Answer)
            }
        }
    }
}

impl Drop for HolderStore {
    /// Ends the connection, also if a process that is being started has a copy of it.
    fn drop(&mut self) {
        self.end();
    }
}

impl DescriptorStore for HolderStore {
    fn put(&mut self, name: &Name, fds: &[BorrowedFd<'_>]) -> Result<(), StoreError> {
        let request = Request::Store(name.clone());
        fds.chunks(MAX_FDS).try_for_each(|some| self.expect_done(&request, some))
    }

    fn remove(&mut self, name: &Name) -> Result<(), StoreError> {
        self.expect_done(&Request::Remove(name.clone()), &[])
    }

    fn limit(&mut self) -> Option<usize> {
        match self.ask(&Request::Limit, &[]) {
            Ok((Answer::Limit { most }, _)) => Some(most),
            // An earlier version.
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{accept, bind, listen};

    /// A holder with these answers, the first one without a request.
    fn holder(path: &Path, answers: &'static [&'static str]) -> std::thread::JoinHandle<()> {
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        std::thread::spawn(move || {
            let connection = accept(&listener).unwrap();
            for answer in answers {
                fds::send(&connection, answer.as_bytes(), &[], SendFlags::empty()).unwrap();
                // Its client may be gone.
                let _ = fds::receive(&connection, &mut [0; 1024], MAX_FDS, RecvFlags::empty());
            }
        })
    }

    fn name() -> Name {
        "a".parse().unwrap()
    }

    #[test]
    fn a_refusal_keeps_the_connection_and_a_wrong_answer_ends_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hold");
        let thread = holder(&path, &["HOLD=1\nHELD=0", "ERROR=no", "OK=1", "END=7"]);
        let mut store = HolderStore::connect(&path).unwrap();
        assert!(matches!(store.remove(&name()), Err(StoreError::Refused(why)) if why == "no"));
        store.remove(&name()).unwrap();
        assert!(matches!(store.take(), Err(StoreError::Answer)));
        assert!(matches!(store.remove(&name()), Err(StoreError::Ended)));
        assert!(matches!(store.take(), Err(StoreError::Ended)));
        thread.join().unwrap();
    }

    #[test]
    fn no_holder_and_one_of_another_version_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hold");
        assert!(matches!(HolderStore::connect(&path), Err(StoreError::Os(_))));
        let thread = holder(&path, &["HOLD=2\nHELD=0"]);
        assert!(matches!(HolderStore::connect(&path), Err(StoreError::Text(_))));
        thread.join().unwrap();
    }

    #[test]
    fn names_without_descriptors_are_no_answer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hold");
        let thread = holder(&path, &["HOLD=1\nHELD=1", "FDNAME=a"]);
        let mut store = HolderStore::connect(&path).unwrap();
        assert!(matches!(store.take(), Err(StoreError::Answer)));
        thread.join().unwrap();
    }
}
