//! Clients that disconnect and leave descriptors behind.
//!
//! These could keep sessions alive, or block the server.
use crate::driver::Random;
use crate::raw::{Ask, Machine, Raw};
use crate::rig::{DISK, Rig, skip};
use paravane_spec::vhost_user::{StateTransfer, VringState, flags, request};
use paravane_test_support::{patience, wait_until};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use zerocopy::IntoBytes;

/// Requests whose descriptor is kept, with their payloads.
fn requests() -> Vec<(u32, Vec<u8>)> {
    let queue = 0_u64.as_bytes().to_vec();
    let transfer = StateTransfer { direction: 1, phase: 0 }.as_bytes().to_vec();
    vec![
        (request::SET_VRING_KICK, queue.clone()),
        (request::SET_VRING_CALL, queue.clone()),
        (request::SET_VRING_ERR, queue),
        (request::SET_BACKEND_REQ_FD, vec![]),
        (request::SET_DEVICE_STATE_FD, transfer),
    ]
}

/// The next client is served, and so is its disk.
fn the_next_one_works(rig: &Rig, what: &str) {
    let raw = Raw::connect(&rig.socket());
    raw.socket.set_read_timeout(Some(patience())).unwrap();
    let offered = raw.send(request::GET_FEATURES, &[], &[]).and_then(|()| raw.receive());
    assert!(offered.is_ok(), "{what}: the next client is not served: {offered:?}");
    let mut machine = Machine::new(0, 64, 4);
    machine.attach(&raw, 0, false);
    machine.fill(DISK, &mut Random::new(5));
    machine.finish(&mut std::fs::read(rig.image()).unwrap());
}

/// Sends a descriptor through a socket, to stay in its peer.
fn leave(socket: &UnixStream, fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(socket, &[rustix::io::IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL).map(drop)
}

#[test]
fn a_client_that_hands_over_its_own_end_and_goes_is_noticed() {
    let rig = Rig::new(1);
    for (request, payload) in requests() {
        let raw = Raw::connect(&rig.socket());
        raw.begin(0);
        // The server may disconnect it for that.
        let _ = raw.send(request, &payload, &[raw.socket.as_fd()]);
        drop(raw);
        the_next_one_works(&rig, &format!("request {request}"));
    }
}

/// A waiting connection holds the client's own end, and its own.
#[test]
fn a_connection_that_waits_for_its_turn_keeps_nothing() {
    let rig = Rig::new(1);
    let (raw, waiting) = (Raw::connect(&rig.socket()), Raw::connect(&rig.socket()));
    raw.begin(0);
    match leave(&waiting.socket, raw.socket.as_fd()) {
        Err(Errno::PERM) => {}
        // Before Linux 6.16.
        sent => {
            let why = format!("this kernel lets waiting connections take descriptors: {sent:?}");
            return skip("a_connection_that_waits_for_its_turn_keeps_nothing", &why);
        }
    }
    drop((raw, waiting));
    the_next_one_works(&rig, "a connection that waited");
}

#[test]
fn sockets_are_taken_for_nothing_but_requests_to_the_client() {
    let rig = Rig::new(1);
    let folder = tempfile::tempdir().unwrap();
    let listener = || OwnedFd::from(UnixListener::bind(folder.path().join("listener")).unwrap());
    for (at, (request, payload)) in requests().into_iter().enumerate() {
        let pair = UnixStream::pair().unwrap();
        let mut fds: Vec<OwnedFd> = vec![
            std::net::TcpListener::bind("127.0.0.1:0").unwrap().into(),
            rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap(),
        ];
        if at == 0 {
            fds.push(listener());
        }
        // A descriptor that is only written to may be an end of a pair.
        if [request::SET_VRING_KICK, request::SET_DEVICE_STATE_FD].contains(&request) {
            fds.push(pair.0.try_clone().unwrap().into());
        }
        for fd in fds {
            let raw = Raw::connect(&rig.socket());
            raw.begin(0);
            raw.send(request, &payload, &[fd.as_fd()]).unwrap();
            assert!(raw.is_closed(), "request {request} with {fd:?}");
        }
        // A connection in the backlog.
        let raw = Raw::connect(&rig.socket());
        raw.begin(0);
        let other = Raw::connect(&rig.socket());
        raw.send(request, &payload, &[other.socket.as_fd()]).unwrap();
        assert!(raw.is_closed(), "request {request} with the end of another connection");
    }
    the_next_one_works(&rig, "after all of them");
}

/// A valid socket holds the client's own end of the connection, unread.
#[test]
fn what_lies_in_a_socket_that_a_client_hands_over_is_thrown_away() {
    let rig = Rig::new(1);
    let requests = [request::SET_BACKEND_REQ_FD, request::SET_VRING_CALL, request::SET_VRING_ERR];
    for (request, before) in requests.into_iter().flat_map(|request| [(request, true), (request, false)]) {
        let payload: &[u8] = if request == request::SET_BACKEND_REQ_FD { &[] } else { &[0; 8] };
        let raw = Raw::connect(&rig.socket());
        raw.begin(0);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let fill = || {
            // A socket that is only written to accepts nothing any more.
            let refused =
                if before || request == request::SET_BACKEND_REQ_FD { Ok(()) } else { Err(Errno::PIPE) };
            assert_eq!(leave(&ours, raw.socket.as_fd()), refused);
            // The pair itself too: no other process has it then.
            assert_eq!(leave(&ours, ours.as_fd()), refused);
        };
        if before {
            fill();
        }
        raw.say(request, payload, &[theirs.as_fd()]);
        if !before {
            fill();
        }
        drop((raw, ours, theirs));
        the_next_one_works(&rig, "own end in the queue");
    }
}

/// Its own end came with the first bytes of a message; the last byte never comes.
#[test]
fn half_a_message_keeps_no_session() {
    let rig = Rig::new(1);
    let raw = Raw::connect(&rig.socket());
    raw.begin(0);
    let header = paravane_vhost::message::message(request::SET_VRING_CALL, flags::VERSION, &[0; 8]);
    raw.send_bytes(&header[..11], &[raw.socket.as_fd()]).unwrap();
    drop(raw);
    the_next_one_works(&rig, "half a message");
}

/// Makes an eventfd with a full counter: a writer blocks until a read.
fn full() -> OwnedFd {
    let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    fill(&full);
    full
}

fn fill(event: &OwnedFd) {
    rustix::io::write(event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
}

#[test]
fn an_eventfd_that_is_full_keeps_no_session() {
    let rig = Rig::new(1);
    for queue_is_live in [true, false] {
        for later in [true, false] {
            for goes in [true, false] {
                let what = format!("live {queue_is_live}, filled later {later}, goes {goes}");
                let mut machine = Machine::new(0, 64, 4);
                let raw = Raw::connect(&rig.socket());
                let call = if later { eventfd(0, EventfdFlags::CLOEXEC).unwrap() } else { full() };
                if queue_is_live {
                    machine.attach(&raw, 0, false);
                    raw.say(request::SET_VRING_CALL, &0_u64, &[call.as_fd()]);
                } else {
                    // It is what the queue starts with.
                    let own = std::mem::replace(&mut machine.call, call.try_clone().unwrap());
                    machine.attach(&raw, 0, false);
                    machine.call = own;
                }
                if later {
                    // Interrupts that have arrived leave room.
                    let read = rustix::io::preadv2(
                        &call,
                        &mut [rustix::io::IoSliceMut::new(&mut [0; 8])],
                        u64::MAX,
                        rustix::io::ReadWriteFlags::NOWAIT,
                    );
                    let _ = read;
                    fill(&call);
                }
                for slot in 0..4 {
                    machine.ask(slot, Ask::Read, 0, 512);
                }
                machine.kick();
                wait_until(&format!("{what}: a request"), || machine.reap(&mut vec![0; DISK]) > 0);
                if !goes {
                    let state = VringState { index: 0, num: 0 };
                    raw.send(request::GET_VRING_BASE, state.as_bytes(), &[]).unwrap();
                    let answered = raw.receive();
                    assert!(answered.is_ok(), "{what}: {answered:?}");
                }
                drop(raw);
                the_next_one_works(&rig, &what);
            }
        }
    }
}
