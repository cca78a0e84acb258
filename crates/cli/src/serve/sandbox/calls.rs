//! Restricts system calls (seccomp). Denied calls fail with EPERM.
//!
//! They fail rather than kill: a library that tries an optional call continues, and so do the
//! guests.
//!
//! io_uring bypasses seccomp. Landlock restricts its operations on files and TCP, and rings cannot
//! execute programs.
pub(super) mod helpers;
mod limits;

use super::error::SandboxError;
use libc::c_long;
use limits::{Limit, Values};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule};
use std::collections::BTreeMap;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls of every process: messages, the log, memory, the C library, and the end.
///
/// mmap and mprotect are in `limits`.
const COMMON: &[c_long] = &[
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_ppoll,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Allowed with any arguments.
const ALLOWED: &[c_long] = &[
    // Data of images, TAP devices, eventfds.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Files, within the paths that Landlock allows.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_statfs,
    libc::SYS_readlinkat,
    libc::SYS_faccessat2,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_flock,
    // The mark of an image that is frozen below an overlay.
    libc::SYS_fgetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_fremovexattr,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    // Of open files: Landlock does not restrict the mode and the owner of a path.
    libc::SYS_fchmod,
    libc::SYS_umask,
    // Sockets; socket(2) itself is below.
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_shutdown,
    // Waiting.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_signalfd4,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    // Memory; mmap and mprotect are below.
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_memfd_create,
    // Threads and signals; clone is in `limits`, and `restrict` hides clone3.
    libc::SYS_clone3,
    libc::SYS_membarrier,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    // The C library asks for each thread by its number.
    libc::SYS_sched_getaffinity,
    libc::SYS_rt_sigtimedwait,
    // This process.
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getrusage,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getcpu,
    // Dropping further privileges: capabilities, user, system calls.
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_setgroups,
    libc::SYS_setgid,
    libc::SYS_setuid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_seccomp,
];

/// Older numbers of the same calls, which the C library still uses on x86-64.
#[cfg(target_arch = "x86_64")]
const ALLOWED_OLDER: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_readlink,
    libc::SYS_access,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_poll,
    libc::SYS_epoll_wait,
    // By Ceph's libraries.
    libc::SYS_epoll_create,
    libc::SYS_dup2,
    libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_OLDER: &[c_long] = &[];

/// Number of a request of ioctl(2), which is signed in musl and unsigned in glibc.
const fn request(number: libc::Ioctl) -> u64 {
    number as u32 as u64
}

/// Allowed requests of ioctl(2): TAP and block devices, non-blocking descriptors, new pseudo-terminals.
///
/// None puts input into a terminal.
const IOCTLS: &[u64] = &[
    request(libc::FIONBIO),
    request(libc::TIOCGPTN),
    request(libc::TIOCSPTLCK),
    request(libc::TCGETS2),
    request(libc::TCSETS2),
    request(libc::TUNSETIFF),
    request(libc::TUNGETIFF),
    request(libc::TUNGETFEATURES),
    request(libc::TUNSETQUEUE),
    request(libc::TUNSETOFFLOAD),
    request(libc::TUNSETVNETHDRSZ),
    request(libc::TUNSETVNETLE),
    request(libc::SIOCGIFMTU as libc::Ioctl),
    request(libc::SIOCGIFFLAGS as libc::Ioctl),
    // linux/fs.h: BLKROGET, BLKGETSIZE64, BLKSSZGET, BLKPBSZGET, BLKIOMIN, BLKIOOPT, BLKDISCARD,
    // BLKZEROOUT.
    0x125e,
    0x8008_1272,
    0x1268,
    0x127b,
    0x1278,
    0x1279,
    0x1277,
    0x127f,
];

/// Allowed operations of prctl(2): thread and mapping names, privilege drop.
const PRCTLS: &[u64] = &[
    libc::PR_SET_NAME as u64,
    libc::PR_GET_NAME as u64,
    libc::PR_SET_VMA as u64,
    libc::PR_SET_NO_NEW_PRIVS as u64,
    libc::PR_SET_DUMPABLE as u64,
    libc::PR_CAPBSET_DROP as u64,
];

/// Calls that a process may make.
///
/// Any process may also use futexes and descriptors, and signal its threads.
#[derive(Debug)]
pub(super) struct Calls {
    /// Allowed with any arguments.
    allowed: &'static [&'static [c_long]],
    /// Allowed with some arguments.
    limits: &'static [&'static [Limit<'static>]],
    /// Allowed requests of ioctl(2).
    ioctls: &'static [u64],
    /// Allowed operations of prctl(2).
    prctls: &'static [u64],
}

/// `paravane serve`.
pub(super) const DAEMON: Calls = Calls {
    allowed: &[COMMON, ALLOWED, ALLOWED_OLDER],
    limits: &[&[limits::DATA_ONLY, limits::THREADS], limits::SCHEDULING, limits::LOCAL_SOCKETS],
    ioctls: IOCTLS,
    prctls: PRCTLS,
};

/// `paravane serve` with a disk in a Ceph cluster.
pub(super) const DAEMON_WITH_CEPH: Calls = Calls {
    limits: &[
        &[limits::DATA_ONLY, limits::THREADS, limits::INTERNET_SOCKETS],
        limits::SCHEDULING,
        limits::LOCAL_SOCKETS,
    ],
    ..DAEMON
};

/// `paravane hold`: messages, the log, and nothing that opens files or creates sockets.
pub(super) const HOLDER: Calls =
    Calls { allowed: &[COMMON, HELD, HELD_OLDER], limits: &[&[limits::DATA_ONLY]], ioctls: &[], prctls: &[] };

/// `paravane inspector`: descriptors of messages, processes that look at them.
pub(super) const INSPECTOR: Calls = Calls {
    allowed: &[COMMON, INSPECTED, INSPECTED_OLDER],
    limits: &[&[limits::DATA_ONLY, limits::PROCESSES]],
    ioctls: &[],
    prctls: &[],
};

const INSPECTED: &[c_long] = &[
    // Messages with descriptors, and what these are.
    libc::SYS_recvfrom,
    libc::SYS_getsockopt,
    libc::SYS_readlinkat,
    // A process for each look; clone is in `limits`.
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
];

/// Older numbers of the same calls.
#[cfg(target_arch = "x86_64")]
const INSPECTED_OLDER: &[c_long] = &[libc::SYS_poll, libc::SYS_readlink];
#[cfg(not(target_arch = "x86_64"))]
const INSPECTED_OLDER: &[c_long] = &[];

const HELD: &[c_long] = &[
    // Messages with descriptors, and who sends them.
    libc::SYS_accept4,
    libc::SYS_sendmsg,
    libc::SYS_getsockopt,
    libc::SYS_pidfd_open,
    // Signals, the log, the service manager.
    libc::SYS_read,
    // Its own socket, at the end.
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_unlinkat,
    // The C library.
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_geteuid,
];

/// Older numbers of the same calls.
#[cfg(target_arch = "x86_64")]
const HELD_OLDER: &[c_long] = &[libc::SYS_poll, libc::SYS_lstat, libc::SYS_unlink];
#[cfg(not(target_arch = "x86_64"))]
const HELD_OLDER: &[c_long] = &[];

/// Denied once no more devices are added; on x86-64 also by older numbers.
const SEALED: &[c_long] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_setgroups,
    libc::SYS_setgid,
    libc::SYS_setuid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
];
/// Also denied unless a device connects to its VMM.
const SEALED_BUT_TO_CONNECT: &[c_long] = &[libc::SYS_socket, libc::SYS_connect];

fn compile(rules: Rules, others: SeccompAction, these: SeccompAction) -> Result<BpfProgram, SandboxError> {
    let arch = std::env::consts::ARCH.try_into().map_err(SandboxError::seccomp)?;
    SeccompFilter::new(rules, others, these, arch)
        .map_err(SandboxError::seccomp)?
        .try_into()
        .map_err(SandboxError::seccomp)
}

fn refuse() -> SeccompAction {
    SeccompAction::Errno(libc::EPERM as u32)
}

/// Denies all other calls to the calling thread and the threads that it will start.
pub(super) fn restrict(calls: &Calls) -> Result<(), SandboxError> {
    let mut rules: Rules = calls.allowed.iter().copied().flatten().map(|&call| (call, Vec::new())).collect();
    let limits = calls.limits.iter().copied().flatten().chain(limits::COMMON);
    for limit in limits {
        rules.entry(limit.call).or_default().extend(limit.rules()?);
    }
    // A call with an empty list of rules would be allowed with any arguments.
    if !calls.ioctls.is_empty() {
        let limit = Limit { call: libc::SYS_ioctl, arguments: &[(1, Values::OneOf(calls.ioctls))] };
        rules.insert(libc::SYS_ioctl, limit.rules()?);
    }
    if !calls.prctls.is_empty() {
        let limit = Limit { call: libc::SYS_prctl, arguments: &[(0, Values::OneOf(calls.prctls))] };
        rules.insert(libc::SYS_prctl, limit.rules()?);
    }
    if rules.contains_key(&libc::SYS_clone3) {
        // The C library uses clone(2) instead. First, as the other filter may deny a filter.
        let hidden = [(libc::SYS_clone3, Vec::new())].into();
        apply(hidden, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?;
    }
    apply(rules, refuse(), SeccompAction::Allow)
}

fn apply(rules: Rules, others: SeccompAction, these: SeccompAction) -> Result<(), SandboxError> {
    seccompiler::apply_filter(&compile(rules, others, these)?).map_err(SandboxError::seccomp)
}

/// Denies all threads to open files and, without `connect`, to create sockets.
///
/// # Errors
/// The kernel refuses the filter.
pub(crate) fn seal(connect: bool) -> Result<(), SandboxError> {
    let sockets: &[c_long] = if connect { &[] } else { SEALED_BUT_TO_CONNECT };
    let rules = SEALED.iter().chain(sockets).map(|&call| (call, Vec::new())).collect();
    let program = compile(rules, SeccompAction::Allow, refuse())?;
    seccompiler::apply_filter_all_threads(&program).map_err(SandboxError::seccomp)
}
