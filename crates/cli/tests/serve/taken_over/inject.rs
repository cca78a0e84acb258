//! System calls of another process, by ptrace(2): what code in it could do.
use nix::errno::Errno;
use nix::unistd::Pid;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Bytes for what calls point to.
const SCRATCH: u64 = 64 << 10;

/// The main thread of a process, stopped. Dropped, it goes on as if nothing had happened.
pub(super) struct Injector {
    pid: Pid,
    memory: File,
    registers: arch::Registers,
    /// Address of an instruction that makes a system call.
    instruction: u64,
    scratch: u64,
    used: u64,
}

impl Injector {
    /// Stops a process. `None`: this host, or the architecture, does not allow that.
    pub(super) fn attach(process: u32) -> Result<Self, String> {
        let pid = Pid::from_raw(process.try_into().expect("a process"));
        nix::sys::ptrace::attach(pid).map_err(|error| format!("ptrace: {error}"))?;
        arch::wait(pid);
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
        let instruction = find_instruction(pid, &memory);
        let registers = arch::registers(pid)?;
        let mut injector = Self { pid, memory, registers, instruction, scratch: 0, used: 0 };
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let map = [0, SCRATCH, access as u64, kind as u64, u64::MAX, 0];
        injector.scratch = injector.call(libc::SYS_mmap, &map).expect("every process may map memory");
        Ok(injector)
    }

    /// Makes a system call.
    pub(super) fn call(&mut self, number: i64, arguments: &[u64]) -> Result<u64, Errno> {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        let result = arch::call(self.pid, &self.registers, self.instruction, number, all);
        match result {
            -4095..0 => Err(Errno::from_raw(-result as i32)),
            _ => Ok(result as u64),
        }
    }

    /// Stores bytes in the process, and returns their address.
    pub(super) fn put(&mut self, bytes: &[u8]) -> u64 {
        let address = self.scratch + self.used;
        self.used = (self.used + bytes.len() as u64).next_multiple_of(64);
        assert!(self.used <= SCRATCH, "too much for the scratch memory");
        self.memory.write_all_at(bytes, address).expect("its memory is written");
        address
    }

    /// Stores a path.
    pub(super) fn path(&mut self, path: &str) -> u64 {
        self.put(format!("{path}\0").as_bytes())
    }

    /// Reads bytes of the process.
    pub(super) fn get(&self, address: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.memory.read_exact_at(&mut bytes, address).expect("its memory is read");
        bytes
    }
}

impl Drop for Injector {
    fn drop(&mut self) {
        if self.scratch != 0 {
            let _ = self.call(libc::SYS_munmap, &[self.scratch, SCRATCH]);
        }
        // A call that the stop has interrupted is made again.
        arch::set_registers(self.pid, &self.registers);
        let _ = nix::sys::ptrace::detach(self.pid, None);
    }
}

fn find_instruction(pid: Pid, memory: &File) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    for line in maps.lines().filter(|line| !line.contains("[v")) {
        let mut words = line.split_whitespace();
        let (range, access) = (words.next().unwrap(), words.next().unwrap());
        if !access.contains('x') {
            continue;
        }
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).unwrap());
        let mut code = vec![0; (end - start) as usize];
        memory.read_exact_at(&mut code, start).unwrap();
        let size = arch::INSTRUCTION.len();
        if let Some(at) = code.windows(size).position(|bytes| bytes == arch::INSTRUCTION) {
            return start + at as u64;
        }
    }
    panic!("no instruction for system calls in {pid}");
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use nix::sys::ptrace;
    use nix::sys::signal::Signal;
    use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
    use nix::unistd::Pid;

    pub(super) const INSTRUCTION: &[u8] = &[0x0f, 0x05];
    pub(super) type Registers = libc::user_regs_struct;

    pub(super) fn wait(pid: Pid) -> Signal {
        match waitpid(pid, Some(WaitPidFlag::__WALL)).unwrap() {
            WaitStatus::Stopped(_, signal) => signal,
            status => panic!("{status:?}"),
        }
    }

    pub(super) fn registers(pid: Pid) -> Result<Registers, String> {
        Ok(ptrace::getregs(pid).expect("the process is stopped"))
    }

    pub(super) fn set_registers(pid: Pid, registers: &Registers) {
        let _ = ptrace::setregs(pid, *registers);
    }

    pub(super) fn call(pid: Pid, saved: &Registers, at: u64, number: i64, arguments: [u64; 6]) -> i64 {
        let mut registers = *saved;
        // No call is interrupted any more.
        (registers.rax, registers.orig_rax, registers.rip) = (number as u64, u64::MAX, at);
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        (registers.rdi, registers.rsi, registers.rdx) = (rdi, rsi, rdx);
        (registers.r10, registers.r8, registers.r9) = (r10, r8, r9);
        ptrace::setregs(pid, registers).unwrap();
        // A signal, such as that of a child that ends, comes before the call is made.
        loop {
            ptrace::step(pid, None).unwrap();
            if wait(pid) == Signal::SIGTRAP {
                break;
            }
        }
        ptrace::getregs(pid).unwrap().rax as i64
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    use nix::unistd::Pid;

    /// No call is made.
    pub(super) const INSTRUCTION: &[u8] = &[];
    pub(super) type Registers = ();

    pub(super) fn wait(_: Pid) {}

    pub(super) fn registers(_: Pid) -> Result<Registers, String> {
        Err("calls are injected on x86-64 only".to_owned())
    }

    pub(super) fn set_registers(_: Pid, (): &Registers) {}

    pub(super) fn call(_: Pid, (): &Registers, _: u64, _: i64, _: [u64; 6]) -> i64 {
        -i64::from(libc::ENOSYS)
    }
}
