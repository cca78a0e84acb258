//! Store of the service manager (`FileDescriptorStoreMax=` in systemd.service(5)).
//!
//! The manager does not answer. Above its maximum it closes descriptors without a word.
use super::text::{MAX_FDS, Name, Request};
use super::{DescriptorStore, StoreError, TIMEOUT};
use crate::fds;
use rustix::net::SendFlags;
use std::ffi::OsStr;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Connects to the socket of a service manager: a path, or @ and an abstract name.
///
/// # Errors
/// Nothing listens there.
pub(crate) fn connect(name: &OsStr) -> io::Result<UnixDatagram> {
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    Ok(socket)
}

/// Connection to the service manager.
#[derive(Debug)]
pub(crate) struct ManagerStore {
    socket: UnixDatagram,
}

impl ManagerStore {
    /// Connects to the socket that NOTIFY_SOCKET names: a path, or @ and an abstract name.
    ///
    /// # Errors
    /// Nothing listens there.
    pub(crate) fn connect(name: &OsStr) -> io::Result<Self> {
        let socket = connect(name)?;
        // A message must not be lost because the manager is busy, nor block the daemon for ever.
        socket.set_write_timeout(Some(TIMEOUT))?;
        Ok(Self { socket })
    }

    fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), StoreError> {
        let sent = fds::send(&self.socket, request.to_string().as_bytes(), fds, SendFlags::empty());
        Ok(sent.map_err(io::Error::from)?)
    }
}

impl DescriptorStore for ManagerStore {
    fn put(&mut self, name: &Name, fds: &[BorrowedFd<'_>]) -> Result<(), StoreError> {
        let request = Request::Store(name.clone());
        fds.chunks(MAX_FDS).try_for_each(|some| self.send(&request, some))
    }

    fn remove(&mut self, name: &Name) -> Result<(), StoreError> {
        self.send(&Request::Remove(name.clone()), &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::RecvFlags;
    use std::io::{Read, Write, pipe};
    use std::os::fd::AsFd;

    /// A service manager's socket.
    fn manager(address: &SocketAddr) -> UnixDatagram {
        UnixDatagram::bind_addr(address).unwrap()
    }

    fn check(socket: &UnixDatagram, mut store: ManagerStore) {
        let mut buffer = [0; 1024];
        let mut next = || {
            let received = fds::receive(&socket, &mut buffer, fds::MOST, RecvFlags::DONTWAIT).unwrap();
            assert!(!received.text_cut && !received.fds_cut);
            (String::from_utf8_lossy(&buffer[..received.len]).into_owned(), received.fds)
        };
        let name = "vm0-disk".parse().unwrap();
        let (reader, mut writer) = pipe().unwrap();
        store.put(&name, &[reader.as_fd(), writer.as_fd()]).unwrap();
        let (text, fds) = next();
        assert_eq!((&*text, fds.len()), ("FDSTORE=1\nFDNAME=vm0-disk\nFDPOLL=0\n", 2));
        // They are the same open files.
        writer.write_all(b"x").unwrap();
        let mut byte = [0];
        std::fs::File::from(fds.into_iter().next().unwrap()).read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        // A message carries 253.
        store.put(&name, &vec![reader.as_fd(); 254]).unwrap();
        assert_eq!((next().1.len(), next().1.len()), (253, 1));
        store.remove(&name).unwrap();
        let (text, fds) = next();
        assert_eq!((&*text, fds.len()), ("FDSTOREREMOVE=1\nFDNAME=vm0-disk\n", 0));
    }

    #[test]
    fn the_manager_gets_descriptors_with_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = manager(&SocketAddr::from_pathname(&path).unwrap());
        check(&socket, ManagerStore::connect(path.as_os_str()).unwrap());
        let name = format!("paravane-test-{}", std::process::id());
        let socket = manager(&SocketAddr::from_abstract_name(&name).unwrap());
        check(&socket, ManagerStore::connect(OsStr::new(&format!("@{name}"))).unwrap());
    }

    #[test]
    fn a_manager_that_has_ended_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        ManagerStore::connect(path.as_os_str()).unwrap_err();
        let socket = manager(&SocketAddr::from_pathname(&path).unwrap());
        let mut store = ManagerStore::connect(path.as_os_str()).unwrap();
        drop(socket);
        store.remove(&"a".parse().unwrap()).unwrap_err();
    }
}
