//! Changes of the host's network interfaces: a TAP device is deleted, made anew, set up or down.
//!
//! Without traffic, no queue notices. The kernel tells members of a multicast group (rtnetlink(7)),
//! which the process joins before its sandbox denies such sockets.
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Multicast group of interfaces (RTMGRP_LINK).
const GROUP: u32 = 1;
/// Types of messages: an interface is there or has changed, is gone.
const NEWLINK: u16 = 16;
const DELLINK: u16 = 17;
/// Attribute with the name of the interface.
const IFNAME: u16 = 3;
/// Lengths of a message's header, of what precedes its attributes, and of an attribute's header.
const HEADER: usize = 16;
const INTERFACE: usize = 16;
const ATTRIBUTE: usize = 4;
/// Most reads at once. The rest is read the next time.
const READS: usize = 64;

/// What has changed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    /// Interfaces of these names.
    Named(BTreeSet<String>),
    /// Perhaps all: there were too many changes.
    Unknown,
}

/// A socket that gets changes of the interfaces in this network namespace.
#[derive(Debug)]
pub(crate) struct NetworkEvents(OwnedFd);

impl NetworkEvents {
    /// Opens one that carries no rights: whoever gets hold of it can ask, and change nothing.
    ///
    /// The kernel compares the rights of a sender and those of who opened the socket.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn open() -> io::Result<Self> {
        let without_rights = || {
            let none = CapabilitySet::empty();
            set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
            Self::open_here()
        };
        // Rights are those of a thread.
        let thread = std::thread::Builder::new().name("netlink".into()).spawn(without_rights)?;
        thread.join().map_err(|_| io::Error::other("a thread panicked"))?
    }

    fn open_here() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&socket, &SocketAddrNetlink::new(0, GROUP))?;
        Ok(Self(socket))
    }

    /// What has changed since the last call. Never waits.
    pub(crate) fn take(&self) -> Changed {
        let (mut names, mut bytes) = (BTreeSet::new(), vec![0; 1 << 16]);
        for _ in 0..READS {
            match recv(&self.0, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((length, _)) => names.extend(interfaces(&bytes[..length])),
                Err(Errno::INTR) => {}
                Err(Errno::NOBUFS) => return Changed::Unknown,
                Err(_) => break,
            }
        }
        Changed::Named(names)
    }
}

/// Readable when something has changed.
impl AsFd for NetworkEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Names of the interfaces that messages are about.
fn interfaces(mut messages: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    while let Some((message, kind, rest)) = message(messages) {
        messages = rest;
        if let (NEWLINK | DELLINK, Some(attributes)) = (kind, message.get(INTERFACE..)) {
            names.extend(name(attributes));
        }
    }
    names
}

/// The first message without its header, its type, and the messages behind it.
fn message(messages: &[u8]) -> Option<(&[u8], u16, &[u8])> {
    let length = u32::from_ne_bytes(*messages.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*messages.get(4..)?.first_chunk()?);
    let message = messages.get(HEADER..length)?;
    Some((message, kind, messages.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

fn name(mut attributes: &[u8]) -> Option<String> {
    loop {
        let length = usize::from(u16::from_ne_bytes(*attributes.first_chunk()?));
        let kind = u16::from_ne_bytes(*attributes.get(2..)?.first_chunk()?);
        let value = attributes.get(ATTRIBUTE..length)?;
        if kind == IFNAME {
            let end = value.iter().position(|&byte| byte == 0).unwrap_or(value.len());
            return Some(String::from_utf8_lossy(&value[..end]).into_owned());
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = ((ATTRIBUTE + value.len()) as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn message_of(kind: u16, attributes: &[u8]) -> Vec<u8> {
        let mut bytes = ((HEADER + INTERFACE + attributes.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.resize(HEADER + INTERFACE, 0);
        bytes.extend(attributes);
        bytes
    }

    #[test]
    fn interfaces_are_named_whatever_else_a_message_has() {
        let one = [attribute(13, &[1, 2, 3]), attribute(IFNAME, b"tap0\0")].concat();
        let two = attribute(IFNAME, b"fifteen-letters\0");
        let messages = [message_of(DELLINK, &one), message_of(20, &two), message_of(NEWLINK, &two)].concat();
        assert_eq!(interfaces(&messages), ["tap0", "fifteen-letters"]);
    }

    /// Asks to delete an interface that does not exist, and returns the error.
    fn delete(events: &NetworkEvents) -> i32 {
        let mut request = message_of(DELLINK, &[]);
        // NLM_F_REQUEST and NLM_F_ACK.
        request[6..8].copy_from_slice(&5_u16.to_ne_bytes());
        request[HEADER + 4..][..4].copy_from_slice(&i32::MAX.to_ne_bytes());
        rustix::net::send(&events.0, &request, rustix::net::SendFlags::empty()).unwrap();
        let mut answer = [0; 8192];
        loop {
            // Meanwhile, interfaces of this host may change.
            let Ok((length, _)) = recv(&events.0, &mut answer[..], RecvFlags::empty()) else { continue };
            if answer[4] == 2 && length >= HEADER + 4 {
                return i32::from_ne_bytes(*answer[HEADER..].first_chunk().unwrap());
            }
        }
    }

    #[test]
    fn the_socket_carries_no_rights() {
        assert_eq!(delete(&NetworkEvents::open().unwrap()), -libc::EPERM);
        if rustix::process::geteuid().is_root() {
            assert_eq!(delete(&NetworkEvents::open_here().unwrap()), -libc::ENODEV, "what a root's would do");
        }
    }

    #[test]
    fn truncated_messages_are_ignored() {
        let whole = message_of(NEWLINK, &attribute(IFNAME, b"tap0\0"));
        for length in 0..whole.len() {
            assert!(interfaces(&whole[..length]).is_empty(), "{length}");
        }
        // Lengths that lead nowhere, or beyond the end.
        for length in [0_u32, 3, 15, u32::MAX] {
            let mut bytes = whole.clone();
            bytes[..4].copy_from_slice(&length.to_ne_bytes());
            assert!(interfaces(&bytes).is_empty(), "{length}");
        }
        for length in [0_u16, 3, u16::MAX] {
            let mut bytes = whole.clone();
            bytes[HEADER + INTERFACE..][..2].copy_from_slice(&length.to_ne_bytes());
            assert!(interfaces(&bytes).is_empty(), "{length}");
        }
    }
}
