//! `paravane hold`: descriptors outlive their daemon.
//!
//! Daemons that are killed are this test program, run again with a role.
use crate::daemon::{Daemon, Folder, assert_refused, is_root, paravane, patience, skip, without_sandbox};
use crate::fds::{self, Received};
use crate::store::text::{Answer, MAX_ANSWER, Request};
use crate::store::{DescriptorStore, HolderStore, Name, StoreError, WaitingHolder};
use paravane_test_support::Random;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Role of this program as a child.
const ROLE: &str = "PARAVANE_TEST_HOLD_ROLE";
/// Folder of the child's socket and notes.
const FOLDER: &str = "PARAVANE_TEST_HOLD_FOLDER";
/// Descriptors of a large daemon.
const MANY: usize = 1000;

fn holder(folder: &Folder, more: &[&str]) -> Command {
    let mut command = paravane();
    command.args(["hold", "--socket", &folder.text("hold")]).args(more).args(without_sandbox());
    command
}

fn start(folder: &Folder, more: &[&str]) -> Daemon {
    let mut daemon = Daemon::spawn(&mut holder(folder, more));
    daemon.wait_for("ready");
    daemon
}

fn connect(folder: &Folder) -> HolderStore {
    HolderStore::connect(&folder.path("hold")).unwrap()
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// Names of all held descriptors.
fn names(store: &mut HolderStore) -> Vec<String> {
    store.take().unwrap().iter().map(|held| held.name.to_string()).collect()
}

/// The usual limit is 1024.
fn raise_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

/// Runs this program as a daemon with a role, until it is killed.
struct Role(Child);

impl Role {
    fn start(role: &str, folder: &Folder) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "hold::a_daemon_with_a_role", "--nocapture", "--test-threads=1"]);
        let child = command.env(ROLE, role).env(FOLDER, folder.root()).spawn().unwrap();
        let role = Self(child);
        let deadline = Instant::now() + patience();
        while !folder.path("done").exists() {
            assert!(Instant::now() < deadline, "the daemon is not done");
            std::thread::sleep(Duration::from_millis(5));
        }
        role
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the role does; nothing without a role.
#[test]
fn a_daemon_with_a_role() {
    let (Ok(role), Ok(folder)) = (std::env::var(ROLE), std::env::var(FOLDER)) else { return };
    let folder = Path::new(&folder);
    let socket = folder.join("hold");
    let note = match role.as_str() {
        "many" => store_many(&mut HolderStore::connect(&socket).unwrap()),
        // A copy of the daemon's own end stays open in the holder.
        "itself" => {
            let connection = raw(&socket);
            ask(&connection, "FDSTORE=1\nFDNAME=itself", &[connection.as_fd()]);
            std::mem::forget(connection);
            String::new()
        }
        "unread" => {
            let (connection, (reader, _writer)) = (raw(&socket), std::io::pipe().unwrap());
            for number in 0..3 {
                let text = format!("FDSTORE=1\nFDNAME=unread{number}\nFDPOLL=0\n");
                fds::send(&connection, text.as_bytes(), &[reader.as_fd()], SendFlags::empty()).unwrap();
            }
            std::mem::forget(connection);
            String::new()
        }
        other => panic!("no role {other}"),
    };
    std::fs::write(folder.join("note"), note).unwrap();
    std::fs::rename(folder.join("note"), folder.join("done")).unwrap();
    loop {
        std::thread::park();
    }
}

/// Device and inode of a descriptor's file.
fn file(fd: impl AsFd) -> String {
    let stat = fstat(fd).unwrap();
    format!("{}:{}", stat.st_dev, stat.st_ino)
}

/// Stores 1000 descriptors of several kinds. Returns a line for each: name and file.
fn store_many(store: &mut HolderStore) -> String {
    raise_limit();
    let mut note = String::new();
    let mut put = |name: &str, fds: &[OwnedFd]| {
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        store.put(&name.parse().unwrap(), &borrowed).unwrap();
        fds.iter().for_each(|fd| note += &format!("{name} {}\n", file(fd)));
    };
    // More under a name than a message carries.
    let memory = |number: usize| {
        let fd = memfd_create(c"memory", MemfdFlags::CLOEXEC).unwrap();
        rustix::io::pwrite(&fd, &number.to_le_bytes(), 0).unwrap();
        fd
    };
    put("memory", &(0..600).map(memory).collect::<Vec<_>>());
    for number in 0..100 {
        let events = eventfd(number + 1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        put(&format!("kick {number}"), &[events]);
    }
    for number in 0..100_u8 {
        let (reader, writer) = std::io::pipe().unwrap();
        rustix::io::write(&writer, &[number; 7]).unwrap();
        put(&format!("pipe {number}"), &[reader.into(), writer.into()]);
    }
    for number in 0..50_u8 {
        let (near, far) = UnixDatagram::pair().unwrap();
        near.send(&[number; 9]).unwrap();
        put(&format!("socket {number}"), &[near.into(), far.into()]);
    }
    note
}

#[test]
fn a_thousand_descriptors_outlive_a_killed_daemon() {
    raise_limit();
    let folder = Folder::new();
    let holder = start(&folder, &[]);
    let owner = Role::start("many", &folder);
    owner.kill();
    let note = std::fs::read_to_string(folder.path("done")).unwrap();
    // A successor that dies while it starts leaves them to the next one.
    for _ in 0..2 {
        let mut store = connect(&folder);
        let all = store.take().unwrap();
        assert_eq!(all.len(), MANY);
        let found: String = all.iter().map(|held| format!("{} {}\n", held.name, file(&held.fd))).collect();
        assert_eq!(found, note);
    }
    let mut store = connect(&folder);
    let mut by_name = BTreeMap::<_, Vec<OwnedFd>>::new();
    for held in store.take().unwrap() {
        by_name.entry(held.name.to_string()).or_default().push(held.fd);
    }
    let read = |fd: &OwnedFd| {
        let mut bytes = [0; 16];
        let len = rustix::io::read(fd, &mut bytes).unwrap();
        bytes[..len].to_vec()
    };
    for (number, fd) in by_name["memory"].iter().enumerate() {
        assert_eq!(read_at_start(fd), number.to_le_bytes());
    }
    for number in 0..100_u8 {
        assert_eq!(read(&by_name[&format!("kick {number}")][0]), (u64::from(number) + 1).to_ne_bytes());
        let pipe = &by_name[&format!("pipe {number}")];
        assert_eq!(read(&pipe[0]), [number; 7]);
        rustix::io::write(&pipe[1], b"more").unwrap();
        assert_eq!(read(&pipe[0]), b"more");
    }
    for number in 0..50_u8 {
        assert_eq!(read(&by_name[&format!("socket {number}")][1]), [number; 9]);
    }
    store.remove(&name("memory")).unwrap();
    assert_eq!(store.take().unwrap().len(), MANY - 600);
    let (status, log) = holder.end();
    assert!(status.success());
    let last = log.iter().rfind(|line| line.contains("exiting")).unwrap();
    assert!(last.contains("held=400"), "{last}");
    assert!(!folder.path("hold").exists());
}

fn read_at_start(fd: &OwnedFd) -> [u8; 8] {
    let mut bytes = [0; 8];
    assert_eq!(rustix::io::pread(fd, &mut bytes, 0).unwrap(), 8);
    bytes
}

#[test]
fn one_daemon_is_served_at_a_time() {
    let folder = Folder::new();
    let mut holder = start(&folder, &[]);
    let mut first = connect(&folder);
    let second = WaitingHolder::connect(&folder.path("hold")).unwrap();
    let pid = std::process::id();
    holder.wait_for("daemon waits for another one to end");
    for _ in 0..3 {
        match HolderStore::connect(&folder.path("hold")) {
            Err(StoreError::Refused(why)) => assert_eq!(why, format!("process {pid} waits already")),
            other => panic!("{other:?}"),
        }
    }
    first.put(&name("a"), &[std::io::stdin().as_fd()]).unwrap();
    drop(first);
    let mut second = second.wait(patience()).unwrap();
    assert_eq!(names(&mut second), ["a"]);
    // One that waits and ends makes room for another one.
    drop(WaitingHolder::connect(&folder.path("hold")).unwrap());
    let third = WaitingHolder::connect(&folder.path("hold")).unwrap();
    let busy = third.wait(Duration::from_millis(1)).unwrap_err();
    assert!(matches!(busy, StoreError::Busy(_)), "{busy}");
}

#[test]
fn a_dead_daemon_makes_room_though_its_connection_is_open() {
    let folder = Folder::new();
    let _holder = start(&folder, &[]);
    let owner = Role::start("itself", &folder);
    let waiting = WaitingHolder::connect(&folder.path("hold")).unwrap();
    owner.kill();
    assert_eq!(names(&mut waiting.wait(patience()).unwrap()), ["itself"]);
}

#[test]
fn the_last_messages_of_a_killed_daemon_count() {
    let folder = Folder::new();
    let _holder = start(&folder, &[]);
    Role::start("unread", &folder).kill();
    assert_eq!(names(&mut connect(&folder)), ["unread0", "unread1", "unread2"]);
}

/// Connects without the program's own client, and reads the greeting.
fn raw(path: &Path) -> OwnedFd {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    assert!(matches!(answer(&socket).0, Answer::Hello { .. }));
    socket
}

fn answer(socket: &OwnedFd) -> (Answer, Vec<OwnedFd>) {
    let mut buffer = [0; MAX_ANSWER];
    let Received { len, fds, text_cut, fds_cut } =
        fds::receive(&socket, &mut buffer, fds::MOST, RecvFlags::empty()).unwrap();
    assert!(!text_cut && !fds_cut);
    (Answer::parse(&buffer[..len]).unwrap(), fds)
}

fn ask(socket: &OwnedFd, text: &str, fds: &[BorrowedFd<'_>]) -> Answer {
    fds::send(&socket, text.as_bytes(), fds, SendFlags::empty()).unwrap();
    answer(socket).0
}

#[test]
fn what_exceeds_a_bound_is_refused_with_an_answer() {
    let folder = Folder::new();
    let _holder = start(&folder, &["--max-descriptors", "300"]);
    let socket = raw(&folder.path("hold"));
    let (reader, _writer) = std::io::pipe().unwrap();
    let fds = |count: usize| vec![reader.as_fd(); count];
    let long = format!("FDSTORE=1\nFDNAME={}", "n".repeat(256));
    let longer = format!("FDSTORE=1\nFDNAME=a\n{}", "\n".repeat(1024));
    let cases: &[(&str, usize, &str)] = &[
        ("READY=1", 0, "unknown key \"READY\""),
        ("\n", 1, "line without '='"),
        ("FDSTORE=1\nFDNAME=a", 0, "FDSTORE=1 without descriptors"),
        ("FDSTORE=1", 1, "other keys do not fit"),
        ("FDSTORE=1\nFDNAME=a:b", 1, "printable ASCII"),
        ("FDSTORE=1\nFDNAME=a\nFDPOLL=1", 1, "FDPOLL has an invalid value"),
        ("FDSTOREREMOVE=1\nFDNAME=a", 1, "only FDSTORE=1 has descriptors"),
        ("TAKE=1", 1, "only FDSTORE=1 has descriptors"),
        (&long, 1, "printable ASCII"),
        (&longer, 1, "longer than 1024 bytes"),
    ];
    for &(text, count, why) in cases {
        match ask(&socket, text, &fds(count)) {
            Answer::Refused(answer) => assert!(answer.contains(why), "{text:?}: {answer}"),
            other => panic!("{text:?}: {other:?}"),
        }
        assert_eq!(ask(&socket, "TAKE=1", &[]), Answer::End { total: 0 });
    }
    let store = Request::Store(name("a")).to_string();
    assert_eq!(ask(&socket, &store, &fds(253)), Answer::Done);
    match ask(&socket, &store, &fds(48)) {
        Answer::Refused(why) => assert!(why.contains("--max-descriptors"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(ask(&socket, &store, &fds(47)), Answer::Done);
    assert_eq!(ask(&socket, "TAKE=1\nFROM=300", &[]), Answer::End { total: 300 });
    assert_eq!(ask(&socket, "FDSTOREREMOVE=1\nFDNAME=b", &[]), Answer::Done);
    assert_eq!(ask(&socket, "FDSTOREREMOVE=1\nFDNAME=a", &[]), Answer::Done);
    assert_eq!(ask(&socket, "TAKE=1\nFROM=300", &[]), Answer::End { total: 0 });
}

#[test]
fn no_message_ends_the_holder() {
    const WORDS: [&str; 16] = [
        "FDSTORE=1",
        "FDSTOREREMOVE=1",
        "TAKE=1",
        "TAKE=1",
        "FROM=0",
        "FROM=99",
        "FROM=18446744073709551615",
        "FDNAME=a",
        "FDNAME=b",
        "FDNAME=b:c",
        "FDNAME=",
        "FDPOLL=0",
        "FDPOLL=1",
        "=",
        "1",
        "\0",
    ];
    let folder = Folder::new();
    let holder = start(&folder, &["--max-descriptors", "100"]);
    let mut socket = raw(&folder.path("hold"));
    let (reader, _writer) = std::io::pipe().unwrap();
    let mut random = Random::new(1);
    let (mut done, mut refused) = (0, 0);
    for _ in 0..5000 {
        let words: Vec<_> = (0..=random.below(3)).map(|_| WORDS[random.below(WORDS.len())]).collect();
        let separator = ["", "\n", "\n", "\n"][random.below(4)];
        let fds = vec![reader.as_fd(); [0, 0, 1, 2, 253][random.below(5)]];
        match ask(&socket, &words.join(separator), &fds) {
            Answer::Refused(_) => refused += 1,
            Answer::Hello { .. } => panic!("a greeting"),
            _ => done += 1,
        }
        if random.once_in(100) {
            // Not only dropped: a child of another test may have a copy for a moment.
            rustix::net::shutdown(&socket, Shutdown::Both).unwrap();
            socket = raw(&folder.path("hold"));
        }
    }
    assert!(done > 50 && refused > 1000, "{done} done, {refused} refused");
    rustix::net::shutdown(&socket, Shutdown::Both).unwrap();
    assert!(holder.end().0.success());
}

#[test]
fn a_daemon_that_does_not_read_is_disconnected() {
    let folder = Folder::new();
    let mut holder = start(&folder, &[]);
    let socket = raw(&folder.path("hold"));
    let (reader, _writer) = std::io::pipe().unwrap();
    assert_eq!(ask(&socket, "FDSTORE=1\nFDNAME=a", &[reader.as_fd()]), Answer::Done);
    // Its answers fill the socket, then the holder closes it.
    while fds::send(&socket, b"TAKE=1", &[], SendFlags::empty()).is_ok() {}
    holder.wait_for("daemon disconnected: it does not read");
    assert_eq!(names(&mut connect(&folder)), ["a"]);
}

#[test]
fn signals_end_it_and_its_socket_is_replaced_if_stale() {
    let folder = Folder::new();
    let mut first = start(&folder, &[]);
    let mode = std::fs::metadata(folder.path("hold")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // The second one does not disturb the first one.
    let output = holder(&folder, &[]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("in use by another process"), "{stderr}");
    first.signal(Signal::HUP);
    drop(connect(&folder));
    first.wait_for("daemon disconnected");
    first.signal(Signal::KILL);
    first.wait();
    assert!(folder.path("hold").exists());
    let second = start(&folder, &[]);
    assert_eq!(names(&mut connect(&folder)), [""; 0]);
    let (status, log) = second.end();
    assert!(status.success(), "{log:?}");
    assert!(!folder.path("hold").exists());
}

#[test]
fn the_service_manager_hears_that_it_is_ready() {
    let folder = Folder::new();
    let manager = UnixDatagram::bind(folder.path("notify")).unwrap();
    manager.set_read_timeout(Some(patience())).unwrap();
    let mut command = holder(&folder, &[]);
    let daemon = Daemon::spawn(command.env("NOTIFY_SOCKET", folder.path("notify")));
    let next = || {
        let mut buffer = [0; 256];
        let len = manager.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..len]).into_owned()
    };
    assert_eq!(next(), "READY=1\n");
    daemon.end();
    assert_eq!(next(), "STOPPING=1\n");
}

#[test]
fn it_runs_with_one_thread_and_without_privileges() {
    let folder = Folder::new();
    if !crate::daemon::sandbox_usable("it_runs_with_one_thread_and_without_privileges") {
        return;
    }
    let holder = start(&folder, &[]);
    let mut store = connect(&folder);
    store.put(&name("a"), &[std::io::stdin().as_fd()]).unwrap();
    let text = std::fs::read_to_string(format!("/proc/{}/status", holder.pid())).unwrap();
    let none = "0000000000000000";
    for (key, value) in [
        ("Seccomp", "2"),
        ("Seccomp_filters", "1"),
        ("NoNewPrivs", "1"),
        ("Threads", "1"),
        ("CapInh", none),
        ("CapPrm", none),
        ("CapEff", none),
        ("CapAmb", none),
    ] {
        assert!(text.lines().any(|line| line == format!("{key}:\t{value}")), "{key} is not {value}:\n{text}");
    }
    assert!(!is_root() || text.contains(&format!("CapBnd:\t{none}")), "{text}");
}

#[test]
fn a_limit_that_is_too_low_is_named() {
    let folder = Folder::new();
    let run = |script: &str, more: &[&str]| {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_paravane"), "hold"]);
        command.args(["--socket", &folder.text("hold")]).args(more).env_remove("RUST_LOG").output().unwrap()
    };
    let output = run("ulimit -n 1000; exec \"$@\"", &["--max-descriptors", "716"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("RLIMIT_NOFILE is 1000; --max-descriptors 716 needs 1001"), "{stderr}");
    assert!(!folder.path("hold").exists());
    let output = run("exec \"$@\"", &["--max-descriptors", "0"]);
    assert_refused(&output, "--max-descriptors");
}

#[test]
fn other_users_are_refused() {
    let folder = Folder::new();
    if !is_root() {
        return skip("other_users_are_refused", "needs root");
    }
    let mut holder = start(&folder, &[]);
    // The mode of the socket refuses them first.
    let open = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    open(folder.root(), 0o755);
    open(&folder.path("hold"), 0o666);
    let script = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); \
                  s.connect(sys.argv[1]); sys.stdout.write(s.recv(1024).decode())";
    let mut command = Command::new("python3");
    command.args(["-c", script, &folder.text("hold")]).current_dir("/").uid(65534).gid(65534);
    match command.output() {
        Ok(output) => {
            let answer = "ERROR=permission denied: run as the user of the holder\n";
            assert_eq!(String::from_utf8_lossy(&output.stdout), answer, "{output:?}");
        }
        Err(error) => return skip("other_users_are_refused", format_args!("python3: {error}")),
    }
    holder.wait_for("connection refused: permission denied");
}
