//! The holder's listening socket, and who may connect to it.
use anyhow::{Context, bail};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
};
use rustix::process::umask;
use std::fs::{Metadata, remove_file, symlink_metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// A listening socket of mode 0600. Dropping it removes its file.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file.
    file: (u64, u64),
}

fn identity(file: &Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

impl Listener {
    /// Binds the socket. Replaces one that has no listener.
    ///
    /// # Errors
    /// Another process listens there, another file has the name, or the kernel refuses.
    pub(super) fn bind(path: &Path) -> Result<Self, anyhow::Error> {
        let address = SocketAddrUnix::new(path)?;
        if let Ok(file) = symlink_metadata(path) {
            if !file.file_type().is_socket() {
                bail!("exists and is not a socket");
            }
            // Of another type, so that no holder takes this for a daemon: EPROTOTYPE if any socket
            // is bound to the file, ECONNREFUSED if none is.
            let probe = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
            match connect(&probe, &address) {
                Err(Errno::CONNREFUSED) => remove_file(path)?,
                Err(Errno::PROTOTYPE) | Ok(()) => bail!("in use by another process"),
                Err(error) => return Err(error.into()),
            }
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // The file is created with its final mode, so there is no race. The process has one thread.
        let before = umask(Mode::from_raw_mode(0o177));
        let bound = bind(&socket, &address);
        umask(before);
        bound?;
        let file = identity(&symlink_metadata(path).context("removed by another process")?);
        listen(&socket, BACKLOG)?;
        Ok(Self { socket, path: path.to_owned(), file })
    }

    /// Accepts a connection. `None`: there is none any more.
    ///
    /// # Errors
    /// The kernel refuses; a later call may succeed.
    pub(super) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(connection) => Ok(Some(connection)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another process may have replaced the file.
        if symlink_metadata(&self.path).is_ok_and(|file| identity(&file) == self.file)
            && let Err(error) = remove_file(&self.path)
        {
            tracing::warn!(%error, "cannot remove {}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixDatagram, UnixListener};

    #[test]
    fn the_socket_is_private_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(symlink_metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(listener.accept().unwrap().is_none());
        let taken = Listener::bind(&path).unwrap_err();
        assert_eq!(taken.to_string(), "in use by another process");
        assert!(listener.accept().unwrap().is_none(), "the second one disturbs the first one");
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn stale_sockets_are_replaced_and_others_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        drop(Listener::bind(&path).unwrap());
        let (stream, datagram) = (folder.path().join("stream"), folder.path().join("datagram"));
        let _stream = UnixListener::bind(&stream).unwrap();
        let _datagram = UnixDatagram::bind(&datagram).unwrap();
        std::fs::write(&path, "text").unwrap();
        for path in [&stream, &datagram, &path] {
            Listener::bind(path).unwrap_err();
            assert!(path.exists());
        }
    }

    #[test]
    fn the_file_of_another_process_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = Listener::bind(&path).unwrap();
        remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
    }
}
