//! The process in which Linux's code runs, and the memory that is shared with it.
use paravane_ring::{Area, DmaArea};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr::NonNull;
use vm_memory::{FileOffset, MmapRegion};

/// Whether the programs were built; says loudly if not.
pub(crate) fn here(test: &str) -> bool {
    if folder().is_some() {
        return true;
    }
    paravane_test_support::skip(test, "PARAVANE_LINUX_VIRTIO is not set; see scripts/linux-virtio");
    false
}

fn folder() -> Option<PathBuf> {
    std::env::var_os("PARAVANE_LINUX_VIRTIO").map(PathBuf::from)
}

/// The process. It ends when this is dropped, since its pipe does.
pub(crate) struct Peer {
    child: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    memory: MmapRegion,
    base: u64,
    heap: u64,
    /// Notifications from the process, and to it.
    kicks: File,
    interrupts: File,
}

impl Peer {
    pub(crate) fn start(program: &str) -> Self {
        let mut child = Command::new(folder().unwrap().join(program))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = child.stdin.take();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let mut hello = String::new();
        answers.read_line(&mut hello).unwrap();
        let numbers = numbers(hello.strip_prefix("memory ").expect("where the memory is"));
        let [fd, base, size, heap, wake, woken] = numbers.try_into().expect("six numbers");
        let path = |fd| format!("/proc/{}/fd/{fd}", child.id());
        let file = File::options().read(true).write(true).open(path(fd)).unwrap();
        let kicks = File::open(path(wake)).unwrap();
        let interrupts = File::options().write(true).open(path(woken)).unwrap();
        let memory = MmapRegion::from_file(FileOffset::new(file, 0), size as usize).unwrap();
        Self { child, commands, answers, memory, base, heap, kicks, interrupts }
    }

    /// The test's part of the memory, with addresses that hold in the process.
    pub(crate) fn ours(&self) -> DmaArea {
        let ptr = NonNull::new(self.memory.as_ptr()).unwrap();
        // SAFETY: the mapping has that size and lives as long as this; the test keeps this until
        // its queues are gone, and takes no references to the memory.
        let area = unsafe { Area::new(ptr, self.memory.size()) };
        let heap = self.heap as usize;
        DmaArea { area, addr: self.base }.slice(heap, self.memory.size() - heap).unwrap()
    }

    /// `len` bytes at an address of the process.
    pub(crate) fn at(&self, addr: u64, len: usize) -> Option<Area> {
        let ptr = NonNull::new(self.memory.as_ptr()).unwrap();
        // SAFETY: as above.
        let area = unsafe { Area::new(ptr, self.memory.size()) };
        area.slice(usize::try_from(addr.checked_sub(self.base)?).ok()?, len)
    }

    /// Copies out of the memory, as a device's `fetch` does.
    pub(crate) fn fetch(&self, addr: u64, out: &mut [u8]) -> bool {
        self.at(addr, out.len()).is_some_and(|area| area.read(0, out))
    }

    /// The 16-bit value at an address.
    pub(crate) fn u16_at(&self, addr: u64) -> u16 {
        let mut bytes = [0; 2];
        assert!(self.fetch(addr, &mut bytes));
        u16::from_le_bytes(bytes)
    }

    /// Has one step done; the numbers of the answer.
    pub(crate) fn ask(&mut self, command: &str) -> Vec<u64> {
        self.ask_all(&[command.to_owned()]).remove(0)
    }

    /// Has several done, and waits once.
    pub(crate) fn ask_all(&mut self, commands: &[String]) -> Vec<Vec<u64>> {
        let text: String = commands.iter().map(|command| format!("{command}\n")).collect();
        self.commands.as_mut().unwrap().write_all(text.as_bytes()).expect("the process takes commands");
        commands
            .iter()
            .map(|command| {
                let mut answer = String::new();
                self.answers.read_line(&mut answer).unwrap();
                assert!(answer.ends_with('\n'), "Linux's side died at: {command}");
                assert!(!answer.starts_with("error"), "{command}: {answer}");
                numbers(&answer)
            })
            .collect()
    }

    /// Starts a step that takes both sides; [`Peer::answer`] waits for its end.
    pub(crate) fn start_step(&mut self, command: &str) {
        let line = format!("{command}\n");
        self.commands.as_mut().unwrap().write_all(line.as_bytes()).expect("the process takes commands");
    }

    /// What the step that was started has answered.
    pub(crate) fn answer(&mut self) -> Vec<u64> {
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        assert!(answer.ends_with('\n'), "Linux's side died");
        numbers(&answer)
    }

    /// Notifies the process.
    pub(crate) fn wake(&mut self) {
        self.interrupts.write_all(&[0]).unwrap();
    }

    /// Sleeps until the process notifies.
    ///
    /// It fails by itself if nothing happens for long.
    pub(crate) fn sleep(&mut self) {
        let got = self.kicks.read(&mut [0; 4096]).unwrap();
        assert!(got > 0, "Linux's side died");
    }

    /// The one number that a command answers, as a truth.
    pub(crate) fn is(&mut self, command: &str) -> bool {
        match self.ask(command)[..] {
            [number] => number != 0,
            ref other => panic!("{command}: {other:?}"),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.commands.take());
        let ended = self.child.wait().unwrap();
        assert!(ended.success() || std::thread::panicking(), "Linux's side ended with {ended}");
    }
}

fn numbers(line: &str) -> Vec<u64> {
    line.split_whitespace().map(|word| word.parse().expect("a number")).collect()
}

/// A byte of the pattern of readable segments and answers.
///
/// The programs have the same.
pub(crate) fn pattern(seed: u64, position: usize) -> u8 {
    (seed.wrapping_mul(31) + position as u64 * 7) as u8
}

/// FNV-1a, as the programs compute it.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
