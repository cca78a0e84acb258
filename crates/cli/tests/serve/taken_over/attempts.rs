//! What a process that was taken over tries, by the rows of the table in SECURITY.md.
use super::Stage;
use super::inject::Injector;
use libc::c_long;
use nix::errno::Errno;

/// Whether code in the process can do it.
pub(super) type Attempt = fn(&mut Injector, &Stage) -> bool;

/// Rows of the table, by their first columns.
pub(super) const ATTEMPTS: [(&str, Attempt); 15] = [
    ("end, trace, read or limit another process", harm),
    ("change the scheduling of another process", schedule),
    ("start a process", start),
    ("execute a program or memory", execute),
    ("make name spaces, mount, load kernel code", own_kernel),
    ("write files beside the images", |it, stage| it.can_open(&stage.beside, libc::O_RDWR)),
    ("read keys beside the file of devices", |it, stage| it.can_open(&stage.key, libc::O_RDONLY)),
    ("read other files", |it, stage| {
        let environment = format!("/proc/{}/environ", stage.victim());
        [&*stage.secret, "/etc/shadow", &environment]
            .into_iter()
            .any(|file| it.can_open(file, libc::O_RDONLY))
    }),
    ("change mode, owner, times or attributes of other files", change),
    ("remove files in the directories of its sockets", |it, stage| {
        let path = it.path(&stage.removable);
        it.can("unlinkat", libc::SYS_unlinkat, &[AT_CWD, path, 0])
    }),
    ("learn which files exist", |it, stage| {
        let (path, buffer) = (it.path(&stage.secret), it.put(&[0; 256]));
        // What exists and is no link: EINVAL.
        it.can("newfstatat", libc::SYS_newfstatat, &[AT_CWD, path, buffer, 0])
            || it.call(libc::SYS_readlinkat, &[AT_CWD, path, buffer, 256]) == Err(Errno::EINVAL)
    }),
    ("connect to Unix sockets of other services", |it, stage| {
        let mut address = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
        address.extend(stage.service.bytes().chain([0]));
        it.connects(libc::AF_UNIX, &address)
    }),
    ("connect to other servers by TCP", |it, stage| {
        let mut address = (libc::AF_INET as u16).to_ne_bytes().to_vec();
        address.extend(stage.port.to_be_bytes());
        address.extend([127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        it.connects(libc::AF_INET, &address)
    }),
    ("send datagrams, packets or netlink messages", |it, _| {
        [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_VSOCK].into_iter().any(
            |family| {
                [libc::SOCK_DGRAM, libc::SOCK_RAW]
                    .into_iter()
                    .any(|kind| it.can("socket", libc::SYS_socket, &[family as u64, kind as u64, 0]))
            },
        )
    }),
    ("use io_uring, which seccomp does not see into", |it, _| {
        let parameters = it.put(&[0; 120]);
        it.can("io_uring_setup", libc::SYS_io_uring_setup, &[4, parameters])
    }),
];

const AT_CWD: u64 = libc::AT_FDCWD as u64;

impl Injector {
    /// Whether a call succeeds. Its only other result is that the sandbox denies it.
    fn can(&mut self, name: &str, number: c_long, arguments: &[u64]) -> bool {
        match self.call(number, arguments) {
            Ok(_) => true,
            Err(Errno::EPERM | Errno::EACCES | Errno::ENOSYS) => false,
            Err(error) => panic!("{name}: {error}"),
        }
    }

    /// Whether any of these calls succeeds.
    fn can_any(&mut self, calls: &[(&str, c_long, &[u64])]) -> bool {
        let found = calls.iter().find(|(name, number, arguments)| self.can(name, *number, arguments));
        if let Some((name, ..)) = found {
            println!("{name} is allowed");
        }
        found.is_some()
    }

    fn can_open(&mut self, path: &str, flags: i32) -> bool {
        let path = self.path(path);
        let opened = self.call(libc::SYS_openat, &[AT_CWD, path, flags as u64, 0]);
        match opened {
            Ok(fd) => self.call(libc::SYS_close, &[fd]).is_ok(),
            Err(Errno::EPERM | Errno::EACCES) => false,
            Err(error) => panic!("openat: {error}"),
        }
    }

    fn connects(&mut self, family: i32, address: &[u8]) -> bool {
        let Ok(socket) = self.call(libc::SYS_socket, &[family as u64, libc::SOCK_STREAM as u64, 0]) else {
            return false;
        };
        let at = self.put(address);
        self.can("connect", libc::SYS_connect, &[socket, at, address.len() as u64])
    }
}

fn harm(it: &mut Injector, stage: &Stage) -> bool {
    let victim = stage.victim().into();
    let own = std::process::id().into();
    let zeroes = it.put(&[0; 128]);
    let owner = it.put(&[1_u32.to_ne_bytes(), stage.victim().to_ne_bytes()].concat());
    it.can_any(&[
        ("kill", libc::SYS_kill, &[victim, 9]),
        ("kill of a group", libc::SYS_kill, &[(-1_i64) as u64, 0]),
        ("tgkill", libc::SYS_tgkill, &[victim, victim, 9]),
        ("tkill", libc::SYS_tkill, &[victim, 9]),
        ("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo, &[victim, 9, zeroes]),
        ("rt_tgsigqueueinfo", libc::SYS_rt_tgsigqueueinfo, &[victim, victim, 9, zeroes]),
        ("pidfd_send_signal", libc::SYS_pidfd_send_signal, &[0, 9, 0, 0]),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, &[0, 0, 0]),
        ("ptrace", libc::SYS_ptrace, &[libc::PTRACE_SEIZE.into(), victim, 0, 0]),
        ("process_vm_readv", libc::SYS_process_vm_readv, &[victim, zeroes, 1, zeroes, 1, 0]),
        ("process_vm_writev", libc::SYS_process_vm_writev, &[victim, zeroes, 1, zeroes, 1, 0]),
        ("process_madvise", libc::SYS_process_madvise, &[0, zeroes, 1, 4, 0]),
        ("prlimit64", libc::SYS_prlimit64, &[victim, libc::RLIMIT_NOFILE.into(), zeroes, 0]),
        ("kcmp", libc::SYS_kcmp, &[own, victim, 0, 0, 0]),
        ("fcntl F_SETOWN", libc::SYS_fcntl, &[2, libc::F_SETOWN as u64, victim]),
        ("fcntl F_SETOWN_EX", libc::SYS_fcntl, &[2, 15, owner]),
        ("fcntl F_SETSIG", libc::SYS_fcntl, &[2, 10, 9]),
        ("fcntl F_SETLEASE", libc::SYS_fcntl, &[2, 1024, 0]),
        ("futex FUTEX_LOCK_PI", libc::SYS_futex, &[owner + 4, libc::FUTEX_LOCK_PI as u64, 0, 0, 0, 0]),
    ])
}

fn schedule(it: &mut Injector, stage: &Stage) -> bool {
    let victim = stage.victim().into();
    let (mask, parameters) = (it.put(&1_u64.to_ne_bytes()), it.put(&[0; 64]));
    it.can_any(&[
        ("sched_setaffinity", libc::SYS_sched_setaffinity, &[victim, 8, mask]),
        ("sched_setscheduler", libc::SYS_sched_setscheduler, &[victim, libc::SCHED_IDLE as u64, parameters]),
        ("sched_setparam", libc::SYS_sched_setparam, &[victim, parameters]),
        ("sched_setattr", libc::SYS_sched_setattr, &[victim, parameters, 0]),
        ("setpriority", libc::SYS_setpriority, &[libc::PRIO_PROCESS as u64, victim, 19]),
        ("ioprio_set", libc::SYS_ioprio_set, &[1, victim, 3 << 13]),
        ("migrate_pages", libc::SYS_migrate_pages, &[victim, 0, 0, 0]),
        ("move_pages", libc::SYS_move_pages, &[victim, 0, 0, 0, 0, 0]),
    ])
}

/// A process that starts does so without a stack, and ends at once.
fn start(it: &mut Injector, _: &Stage) -> bool {
    let (child, stack) = (libc::SIGCHLD as u64, 8_u64);
    let fork = [&[0; 32][..], &child.to_ne_bytes(), &stack.to_ne_bytes(), &[0; 16]].concat();
    let fork = it.put(&fork);
    it.can_any(&[
        ("clone", libc::SYS_clone, &[child, stack, 0, 0, 0]),
        ("clone3", libc::SYS_clone3, &[fork, 64]),
        #[cfg(target_arch = "x86_64")]
        ("fork", libc::SYS_fork, &[]),
        #[cfg(target_arch = "x86_64")]
        ("vfork", libc::SYS_vfork, &[]),
    ])
}

fn execute(it: &mut Injector, _: &Stage) -> bool {
    let (program, list) = (it.path("/bin/true"), it.put(&[0; 16]));
    let page = it.put(&[0; 64]) & !4095;
    let code = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    let kind = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    it.can_any(&[
        ("execve", libc::SYS_execve, &[program, list, list]),
        ("execveat", libc::SYS_execveat, &[AT_CWD, program, list, list, 0]),
        ("mmap", libc::SYS_mmap, &[0, 4096, code, kind, u64::MAX, 0]),
        ("mprotect", libc::SYS_mprotect, &[page, 4096, code]),
        ("pkey_mprotect", libc::SYS_pkey_mprotect, &[page, 4096, code, u64::MAX]),
    ])
}

fn own_kernel(it: &mut Injector, _: &Stage) -> bool {
    let zeroes = it.put(&[0; 128]);
    let space = libc::CLONE_NEWUSER as u64;
    it.can_any(&[
        ("unshare", libc::SYS_unshare, &[space]),
        ("clone", libc::SYS_clone, &[space | libc::SIGCHLD as u64, 0, 0, 0, 0]),
        ("clone of a thread", libc::SYS_clone, &[space | libc::CLONE_THREAD as u64, 0, 0, 0, 0]),
        ("setns", libc::SYS_setns, &[0, 0]),
        ("mount", libc::SYS_mount, &[zeroes, zeroes, zeroes, 0, 0]),
        ("chroot", libc::SYS_chroot, &[zeroes]),
        ("pivot_root", libc::SYS_pivot_root, &[zeroes, zeroes]),
        ("bpf", libc::SYS_bpf, &[0, zeroes, 128]),
        ("init_module", libc::SYS_init_module, &[zeroes, 128, zeroes]),
        ("perf_event_open", libc::SYS_perf_event_open, &[zeroes, 0, 0, 0, 0]),
        ("userfaultfd", libc::SYS_userfaultfd, &[0]),
        ("add_key", libc::SYS_add_key, &[zeroes, zeroes, zeroes, 0, 0]),
        ("personality", libc::SYS_personality, &[0]),
    ])
}

fn change(it: &mut Injector, stage: &Stage) -> bool {
    let (path, name) = (it.path(&stage.secret), it.path("user.x"));
    let own = u64::from(rustix::process::geteuid().as_raw());
    it.can_any(&[
        #[cfg(target_arch = "x86_64")]
        ("chmod", libc::SYS_chmod, &[path, 0o777]),
        ("fchmodat", libc::SYS_fchmodat, &[AT_CWD, path, 0o777]),
        #[cfg(target_arch = "x86_64")]
        ("chown", libc::SYS_chown, &[path, own, own]),
        ("fchownat", libc::SYS_fchownat, &[AT_CWD, path, own, own, 0]),
        ("utimensat", libc::SYS_utimensat, &[AT_CWD, path, 0, 0]),
        ("setxattr", libc::SYS_setxattr, &[path, name, name, 1, 0]),
        ("truncate", libc::SYS_truncate, &[path, 0]),
        ("linkat", libc::SYS_linkat, &[AT_CWD, path, AT_CWD, name, 0]),
        ("symlinkat", libc::SYS_symlinkat, &[path, AT_CWD, name]),
        ("mkdirat", libc::SYS_mkdirat, &[AT_CWD, name, 0o777]),
    ])
}
