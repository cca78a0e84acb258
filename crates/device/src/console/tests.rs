use super::*;
use crate::rig::{BASE, DATA, Rig, SIZE, segment};
use crate::rng::Rng;
use crate::{Rest, ServeError, Served};
use paravane_ring::QueueError;
use paravane_test_support::{patience, wait_until};
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

/// A console with both of its queues, each in a memory of its own.
struct Scene {
    transmit: Rig<Rng>,
    receive: Rig<Console>,
    folder: tempfile::TempDir,
}

impl Scene {
    fn new(back_end: BackEnd, buffer: usize, folder: tempfile::TempDir) -> Self {
        let mut console = Console::new(back_end, Some(Window { columns: 80, rows: 25 }), buffer).unwrap();
        let features = console.features();
        let [receive, transmit] =
            [RECEIVE, TRANSMIT].map(|queue| console.start_queue(queue, features).unwrap());
        let transmit = Rig::with_handler(Rng::new(), features, transmit);
        Self { transmit, receive: Rig::with_handler(console, features, receive), folder }
    }

    fn socket(buffer: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        Self::new(BackEnd::Socket(listener), buffer, folder)
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.folder.path().join("socket")).unwrap();
        stream.set_read_timeout(Some(patience())).unwrap();
        wait_until("the reader is taken", || self.carried().attached);
        stream
    }

    fn carried(&self) -> Carried {
        self.receive.device.counters().carried()
    }

    /// Has the guest write, which waits until all of it is taken.
    fn write(&mut self, bytes: &[u8]) {
        self.begin_write(bytes);
        assert_eq!(self.transmit.run().unwrap().len(), 1);
    }

    fn begin_write(&mut self, bytes: &[u8]) {
        self.transmit.poke(DATA, bytes);
        self.transmit.add(&[segment(DATA, bytes.len())], &[]);
    }

    /// The guest's input: what comes into its next buffer.
    fn read(&mut self, len: usize) -> Vec<u8> {
        self.receive.add(&[], &[segment(DATA, len)]);
        let used = self.receive.run().unwrap();
        self.receive.peek(DATA, used[0].len as usize)
    }
}

fn read_exact(stream: &mut impl Read, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Bytes that tell where they belong.
fn numbered(len: usize, from: usize) -> Vec<u8> {
    (from..from + len).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
}

#[test]
fn the_device_describes_itself() {
    let mut scene = Scene::socket(BUFFER);
    let console = &mut scene.receive.device;
    assert_eq!(console.device_id(), 3);
    assert_eq!(console.features() & F_SIZE, F_SIZE);
    assert_eq!(console.queue_sizes().len(), 2);
    let mut config = [7; 16];
    console.read_config(0, &mut config);
    assert_eq!(config, [80, 0, 25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert!(console.start_queue(2, 0).is_err());
}

#[test]
fn output_survives_its_readers() {
    let mut scene = Scene::socket(BUFFER);
    scene.write(b"before the first, ");
    let mut first = scene.connect();
    scene.write(b"to the first");
    assert_eq!(read_exact(&mut first, 30), b"before the first, to the first");
    drop(first);
    wait_until("the reader's end is noticed", || !scene.carried().attached);
    scene.write(b"between, ");
    scene.write(b"both");
    let mut second = scene.connect();
    assert_eq!(read_exact(&mut second, 13), b"between, both");
    let Carried { output, dropped, waiting, .. } = scene.carried();
    assert_eq!((output, dropped, waiting), (43, 0, 0));
}

#[test]
fn a_guest_waits_for_a_slow_reader() {
    const LEN: usize = 4 << 20;
    let mut scene = Scene::socket(4096);
    let mut reader = scene.connect();
    scene.begin_write(&numbered(LEN, 0));
    wait_until("the buffers are full", || {
        scene.transmit.serve().unwrap();
        scene.carried().waiting == 4096 && scene.transmit.handler.rest(true) != Rest::Serve
    });
    assert_eq!(scene.transmit.driver.pop_used().unwrap(), None);
    let all = std::thread::spawn(move || read_exact(&mut reader, LEN));
    assert_eq!(scene.transmit.run().unwrap().len(), 1);
    assert_eq!(all.join().unwrap(), numbered(LEN, 0));
    assert_eq!(scene.carried().dropped, 0);
}

#[test]
fn without_a_reader_the_newest_output_is_kept() {
    let mut scene = Scene::socket(10_000);
    let all = numbered(3 << 20, 0);
    scene.write(&all);
    for part in all.chunks(7000).take(5) {
        scene.write(part);
    }
    let expected = [&all[..35_000]].concat()[25_000..].to_vec();
    assert_eq!(scene.carried().dropped, (3 << 20) + 25_000);
    let mut reader = scene.connect();
    assert_eq!(read_exact(&mut reader, 10_000), expected);
}

#[test]
fn a_reader_that_leaves_lets_the_guest_go_on() {
    let mut scene = Scene::socket(4096);
    let reader = scene.connect();
    scene.begin_write(&numbered(2 << 20, 0));
    wait_until("the buffers are full", || {
        scene.transmit.serve().unwrap();
        scene.carried().waiting == 4096 && scene.transmit.handler.rest(true) != Rest::Serve
    });
    drop(reader);
    assert_eq!(scene.transmit.run().unwrap().len(), 1);
    let mut reader = scene.connect();
    assert_eq!(read_exact(&mut reader, 4096), numbered(4096, (2 << 20) - 4096));
}

#[test]
fn input_waits_for_buffers_of_the_guest() {
    const LEN: usize = 600_000;
    let mut scene = Scene::socket(BUFFER);
    let mut client = scene.connect();
    let typist = std::thread::spawn(move || {
        client.write_all(&numbered(LEN, 0)).unwrap();
        client
    });
    let mut all = Vec::new();
    while all.len() < LEN {
        let len = 1 + all.len() % 5000;
        all.extend(scene.read(len));
    }
    assert_eq!(all, numbered(LEN, 0));
    assert_eq!(scene.carried().input, LEN as u64);
    drop(typist.join().unwrap());
}

#[test]
fn a_driver_that_comes_back_finds_its_input() {
    let mut scene = Scene::socket(BUFFER);
    let mut client = scene.connect();
    client.write_all(b"typed while nobody was there").unwrap();
    scene.receive.handler.drain(&mut scene.receive.live, true);
    let features = scene.receive.device.features();
    let handler = scene.receive.device.start_queue(RECEIVE, features).unwrap();
    scene.receive.handler = handler;
    let mut all = Vec::new();
    while all.len() < 28 {
        all.extend(scene.read(10));
    }
    assert_eq!(all, b"typed while nobody was there");
}

#[test]
fn a_stop_takes_the_rest_of_the_output() {
    let mut scene = Scene::socket(4096);
    let mut reader = scene.connect();
    let all = numbered(2 << 20, 0);
    scene.begin_write(&all);
    wait_until("the buffers are full", || {
        scene.transmit.serve().unwrap();
        scene.carried().waiting == 4096 && scene.transmit.handler.rest(true) != Rest::Serve
    });
    assert!(!scene.transmit.handler.at_rest());
    let sent = scene.carried().output as usize;
    let served = scene.transmit.handler.drain(&mut scene.transmit.live, true);
    assert_eq!(served, Served { taken: 0, completed: 1, interrupt: true });
    // Of a chain that is longer than the buffer, the end.
    let head = read_exact(&mut reader, sent + 4096);
    let tail = read_exact(&mut reader, 4096);
    assert!(head == all[..sent + 4096] && tail == all[all.len() - 4096..]);
    // A reset forgets the chain.
    scene.begin_write(&all);
    scene.transmit.serve().unwrap();
    let served = scene.transmit.handler.drain(&mut scene.transmit.live, false);
    assert_eq!(served, Served::default());
    assert!(scene.transmit.handler.at_rest());
}

#[test]
fn a_terminal_can_be_closed_and_opened_again() {
    let pty = Pty::open().unwrap();
    let path: PathBuf = pty.path().to_owned();
    let mut scene = Scene::new(BackEnd::Pty(pty), BUFFER, tempfile::tempdir().unwrap());
    scene.write(b"login: ");
    for name in ["first\n", "other\n"] {
        let mut terminal = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        assert_eq!(read_exact(&mut terminal, 7), b"login: ");
        terminal.write_all(name.as_bytes()).unwrap();
        assert_eq!(scene.read(64), name.as_bytes());
        drop(terminal);
        wait_until("the end is noticed", || !scene.carried().attached);
        scene.write(b"login: ");
    }
}

#[test]
fn a_log_is_appended_to() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    std::fs::write(&path, "earlier\n").unwrap();
    let file = OpenOptions::new().append(true).open(&path).unwrap();
    let mut scene = Scene::new(BackEnd::Log(file), BUFFER, folder);
    scene.write(b"booted\n");
    wait_until("the log has it", || std::fs::read(&path).unwrap() == b"earlier\nbooted\n");
}

#[test]
fn a_log_without_room_keeps_the_output() {
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut scene = Scene::new(BackEnd::Log(full), BUFFER, tempfile::tempdir().unwrap());
    scene.write(b"kept");
    let Carried { output, dropped, waiting, .. } = scene.carried();
    assert_eq!((output, dropped, waiting), (0, 0, 4));
}

#[test]
fn streams_carry_both_ways() {
    let (input, mut typist) = std::io::pipe().unwrap();
    let (mut screen, output) = std::io::pipe().unwrap();
    let back_end = BackEnd::Streams { input: input.into(), output: output.into() };
    let mut scene = Scene::new(back_end, BUFFER, tempfile::tempdir().unwrap());
    scene.write(b"prompt");
    assert_eq!(read_exact(&mut screen, 6), b"prompt");
    typist.write_all(b"answer").unwrap();
    assert_eq!(scene.read(64), b"answer");
    // Output goes on after the end of the input.
    drop(typist);
    scene.write(b"more");
    assert_eq!(read_exact(&mut screen, 4), b"more");
}

#[test]
fn what_a_driver_must_not_do_latches() {
    let latched = |result: Result<_, ServeError>| match result {
        Err(ServeError::Queue(error)) => error,
        Ok(_) | Err(ServeError::Host(_)) => panic!("the queue did not latch"),
    };
    let mut scene = Scene::socket(BUFFER);
    scene.transmit.add(&[segment(DATA, 8)], &[segment(DATA, 8)]);
    assert!(matches!(latched(scene.transmit.serve()), QueueError::Request { .. }));
    let mut scene = Scene::socket(BUFFER);
    scene.transmit.add(&[segment(BASE + SIZE, 8)], &[]);
    assert!(matches!(latched(scene.transmit.serve()), QueueError::Address { .. }));
    for (readable, writable, is_request) in [
        (vec![segment(DATA, 8)], vec![segment(DATA, 8)], true),
        (vec![segment(DATA, 8)], vec![], true),
        (vec![], vec![segment(BASE + SIZE, 8)], false),
    ] {
        let mut scene = Scene::socket(BUFFER);
        scene.connect().write_all(b"input").unwrap();
        wait_until("the input is there", || scene.receive.device.port.has_input());
        scene.receive.add(&readable, &writable);
        let error = latched(scene.receive.serve());
        assert_eq!(matches!(error, QueueError::Request { .. }), is_request, "{error}");
        assert!(scene.receive.device.port.has_input(), "it waits for a driver that does better");
    }
}
