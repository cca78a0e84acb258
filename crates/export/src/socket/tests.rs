use super::*;
use crate::protocol::tests::FRAMING;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

const HEADER: usize = FRAMING.header;

/// A connection whose messages stay on the socket, and the client's end.
fn kept() -> (Connection, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    let mut connection = Connection::new(near.into(), &FRAMING);
    connection.keep().unwrap();
    (connection, far)
}

/// The next process continues the connection.
fn next(connection: Connection) -> Connection {
    let (socket, part, fds) = connection.into_parts();
    assert!(part.is_empty() && fds.is_empty(), "nothing was taken off the socket");
    Connection::new(socket, &FRAMING)
}

fn message(payload: &[u8]) -> Vec<u8> {
    [&(payload.len() as u32).to_le_bytes(), &[0; 8][..], payload].concat()
}

fn receive(connection: &mut Connection) -> Option<usize> {
    match connection.receive().unwrap() {
        Received::Message(_) => Some(connection.message().len() - HEADER),
        _ => None,
    }
}

fn done(answer: PendingAnswer, at_once: bool) -> Pending {
    Pending::Done { len: HEADER + 8, answer, at_once }
}

#[test]
fn a_message_stays_until_it_is_settled() {
    let (mut connection, mut far) = kept();
    far.write_all(&[message(&[1; 8]), message(&[])].concat()).unwrap();
    for _ in 0..3 {
        assert_eq!(receive(&mut connection), Some(8));
        connection = next(connection);
        connection.keep().unwrap();
    }
    assert_eq!(receive(&mut connection), Some(8));
    connection.settle(Some((b"answer", None))).unwrap();
    assert_eq!(receive(&mut connection), Some(0));
    connection.settle(None).unwrap();
    assert_eq!(receive(&mut connection), None);
    let mut answer = [0; 6];
    far.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"answer");
    drop(far);
    assert!(matches!(connection.receive().unwrap(), Received::Closed));
}

#[test]
fn a_message_that_comes_byte_by_byte_stays_too() {
    let (mut connection, mut far) = kept();
    for byte in message(&[1; 8]) {
        assert_eq!(receive(&mut connection), None);
        far.write_all(&[byte]).unwrap();
    }
    assert!(connection.has_part() && connection.next_look() <= Some(PEEK_INTERVAL));
    assert_eq!(receive(&mut connection), Some(8));
    assert!(!connection.has_part());
    connection.settle(None).unwrap();
    assert_eq!(receive(&mut connection), None);
    // Cut off.
    far.write_all(&message(&[1; 8])[..HEADER + 3]).unwrap();
    assert_eq!(receive(&mut connection), None);
    // A program that another test starts may still have a copy of a descriptor that is dropped.
    far.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(matches!(connection.receive(), Err(SocketError::CutOff)));
}

#[test]
fn descriptors_come_with_their_message_each_time() {
    let (mut connection, far) = kept();
    let (pipe, _) = std::io::pipe().unwrap();
    let parts = [message(&[1; 8]), message(&[])];
    for part in &parts {
        send(far.as_fd(), part, Some(pipe.as_fd())).unwrap();
    }
    for _ in 0..2 {
        let Received::Message(fds) = connection.receive().unwrap() else { panic!("no message") };
        assert_eq!((fds.len(), connection.message().len() - HEADER), (1, 8));
        connection = next(connection);
        connection.keep().unwrap();
    }
    let Received::Message(_) = connection.receive().unwrap() else { panic!("no message") };
    connection.settle(None).unwrap();
    let Received::Message(fds) = connection.receive().unwrap() else { panic!("no second message") };
    assert_eq!((fds.len(), connection.message().len() - HEADER), (1, 0));
}

#[test]
fn descriptors_of_the_next_message_stay_with_it() {
    let (mut connection, far) = kept();
    let (pipe, _) = std::io::pipe().unwrap();
    // Each followed by one with a descriptor: without payload, with one, in parts.
    for (first, parts) in [(message(&[]), 1), (message(&[1; 8]), 1), (message(&[1; 8]), 2)] {
        let (begin, end) = first.split_at(first.len() / parts);
        send(far.as_fd(), begin, None).unwrap();
        if !end.is_empty() {
            send(far.as_fd(), end, None).unwrap();
        }
        for _ in 0..2 {
            send(far.as_fd(), &message(&[2; 8]), Some(pipe.as_fd())).unwrap();
        }
        for (len, count) in [(first.len() - HEADER, 0), (8, 1), (8, 1)] {
            let Received::Message(fds) = connection.receive().unwrap() else { panic!("no message") };
            assert_eq!((connection.message().len() - HEADER, fds.len()), (len, count));
            connection.settle(None).unwrap();
        }
    }
}

#[test]
fn descriptors_in_the_middle_of_a_message_are_its_own() {
    let (mut connection, far) = kept();
    let (pipe, _) = std::io::pipe().unwrap();
    let whole = message(&[1; 8]);
    for at in [1, HEADER - 1, HEADER, HEADER + 1, whole.len() - 1] {
        for fd_first in [true, false] {
            let (begin, end) = whole.split_at(at);
            let (fd, no_fd) = (Some(pipe.as_fd()), None);
            send(far.as_fd(), begin, if fd_first { fd } else { no_fd }).unwrap();
            send(far.as_fd(), end, if fd_first { no_fd } else { fd }).unwrap();
            send(far.as_fd(), &message(&[]), fd).unwrap();
            for len in [8, 0] {
                let Received::Message(fds) = connection.receive().unwrap() else { panic!("no message") };
                assert_eq!((connection.message().len() - HEADER, fds.len()), (len, 1), "cut at {at}");
                connection.settle(None).unwrap();
            }
        }
    }
}

#[test]
fn a_message_that_is_done_is_answered_by_the_next_process_once() {
    for at_once in [true, false] {
        let (mut connection, mut far) = kept();
        far.write_all(&message(&[1; 8])).unwrap();
        assert_eq!(receive(&mut connection), Some(8));
        // Killed before it has settled the message.
        let mut connection = next(connection);
        let pending = done(PendingAnswer::Bytes(b"answer".to_vec()), at_once);
        assert!(connection.recover(&pending).unwrap());
        connection.settle(Some((b"answer", None))).unwrap();
        // Killed after that, with the same record.
        let mut connection = next(connection);
        let recovered = connection.recover(&pending);
        match at_once {
            true => assert!(!recovered.unwrap()),
            false => assert!(matches!(recovered, Err(SocketError::Unanswered))),
        }
        assert_eq!(receive(&mut connection), None);
        far.set_nonblocking(true).unwrap();
        let mut answers = Vec::new();
        let _ = far.read_to_end(&mut answers);
        assert_eq!(answers, b"answer");
    }
}

#[test]
fn a_message_without_an_answer_is_taken_once() {
    for at_once in [true, false] {
        let (mut connection, mut far) = kept();
        far.write_all(&[message(&[1; 8]), message(&[1; 8])].concat()).unwrap();
        assert_eq!(receive(&mut connection), Some(8));
        let pending = done(PendingAnswer::None, at_once);
        let mut connection = next(connection);
        assert!(connection.recover(&pending).unwrap());
        connection.settle(None).unwrap();
        let mut connection = next(connection);
        assert!(!connection.recover(&pending).unwrap());
        assert_eq!(receive(&mut connection), Some(8), "the second one, though it has the same bytes");
    }
}

#[test]
fn a_message_is_handled_again_if_its_answer_was_a_descriptor() {
    let (mut connection, mut far) = kept();
    far.write_all(&message(&[1; 8])).unwrap();
    assert_eq!(receive(&mut connection), Some(8));
    let mut connection = next(connection);
    assert!(!connection.recover(&done(PendingAnswer::Again, true)).unwrap());
    assert_eq!(receive(&mut connection), Some(8));
}

#[test]
fn without_io_uring_settling_takes_two_steps() {
    let (mut connection, mut far) = kept();
    connection.exchange = None;
    far.write_all(&[message(&[1; 8]), message(&[2; 8])].concat()).unwrap();
    for _ in 0..2 {
        assert_eq!(receive(&mut connection), Some(8));
        assert!(connection.is_unsettled() && !connection.settles_at_once());
        connection.settle(Some((b"answer", None))).unwrap();
        let mut answer = [0; 6];
        far.read_exact(&mut answer).unwrap();
    }
    assert_eq!(receive(&mut connection), None);
}
