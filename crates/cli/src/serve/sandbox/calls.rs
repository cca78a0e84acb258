//! Which system calls the daemon may make (seccomp). The others fail with EPERM.
//!
//! Failing, not killing: a library that tries something new and can do without goes on, and so do the guests' disks.
//!
//! io_uring passes by seccomp. What it could be asked for is held by Landlock where that is about files and TCP; rings
//! cannot execute programs.
use super::SandboxError;
use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Allowed with whatever arguments.
const ALLOWED: &[c_long] = &[
    // Data of images, TAP devices, eventfds.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
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
    // Files that Landlock lets through.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
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
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    libc::SYS_umask,
    // Sockets; socket(2) itself is below.
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
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
    libc::SYS_ppoll,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_signalfd4,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_restart_syscall,
    // Memory; mmap and mprotect are below.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_brk,
    libc::SYS_memfd_create,
    // Threads and signals.
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_futex,
    libc::SYS_membarrier,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // About ourselves.
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_prlimit64,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getcpu,
    // To give up more: capabilities, a user, and system calls.
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_setgroups,
    libc::SYS_setgid,
    libc::SYS_setuid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_seccomp,
];

/// The same by their older numbers, which the C library of x86-64 still takes.
#[cfg(target_arch = "x86_64")]
const ALLOWED_OLDER: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_readlink,
    libc::SYS_access,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_poll,
    libc::SYS_epoll_wait,
    libc::SYS_dup2,
    libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_OLDER: &[c_long] = &[];

/// Requests of ioctl(2): TAP devices, sizes of block devices, non-blocking descriptors. Not those that speak for a terminal.
const IOCTLS: &[u64] = &[
    libc::FIONBIO,
    libc::TUNSETIFF,
    libc::TUNGETIFF,
    libc::TUNGETFEATURES,
    libc::TUNSETQUEUE,
    libc::TUNSETOFFLOAD,
    libc::TUNSETVNETHDRSZ,
    libc::TUNSETVNETLE,
    libc::SIOCGIFMTU,
    // linux/fs.h: BLKGETSIZE64, BLKSSZGET, BLKPBSZGET, BLKIOMIN, BLKIOOPT, BLKDISCARD, BLKZEROOUT.
    0x8008_1272,
    0x1268,
    0x127b,
    0x1278,
    0x1279,
    0x1277,
    0x127f,
];

/// What prctl(2) is asked for: a thread's name, a mapping's name, and to give up more.
const PRCTLS: &[i32] = &[
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_SET_VMA,
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_SET_DUMPABLE,
    libc::PR_CAPBSET_DROP,
];

/// What a daemon that takes no more devices needs no longer, on x86-64 by two numbers each.
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
/// The same, unless a VMM is to be connected to.
const SEALED_BUT_TO_CONNECT: &[c_long] = &[libc::SYS_socket, libc::SYS_connect];

fn failed(error: impl std::fmt::Display) -> SandboxError {
    SandboxError::Seccomp(error.to_string())
}

/// The rule that argument `index` compares so with `value`.
fn rule(index: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompRule, SandboxError> {
    let condition = SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value).map_err(failed)?;
    SeccompRule::new(vec![condition]).map_err(failed)
}

fn compile(rules: Rules, others: SeccompAction, these: SeccompAction) -> Result<BpfProgram, SandboxError> {
    let arch = std::env::consts::ARCH.try_into().map_err(failed)?;
    SeccompFilter::new(rules, others, these, arch).map_err(failed)?.try_into().map_err(failed)
}

fn refuse() -> SeccompAction {
    SeccompAction::Errno(libc::EPERM as u32)
}

/// Refuses the calling thread, and those it will make, all calls but those listed above.
pub(super) fn restrict() -> Result<(), SandboxError> {
    let mut rules: Rules = ALLOWED.iter().chain(ALLOWED_OLDER).map(|&call| (call, Vec::new())).collect();
    let eq = SeccompCmpOp::Eq;
    let each = |index, values: &mut dyn Iterator<Item = u64>| {
        values.map(|value| rule(index, SeccompCmpOp::Eq, value)).collect::<Result<Vec<_>, _>>()
    };
    rules.insert(libc::SYS_socket, vec![rule(0, eq.clone(), libc::AF_UNIX as u64)?]);
    rules.insert(libc::SYS_socketpair, vec![rule(0, eq.clone(), libc::AF_UNIX as u64)?]);
    rules.insert(libc::SYS_ioctl, each(1, &mut IOCTLS.iter().copied())?);
    rules.insert(libc::SYS_prctl, each(0, &mut PRCTLS.iter().map(|&option| option as u64))?);
    // A thread of ours: what the C library does to abort, and to change the user of all threads.
    rules.insert(libc::SYS_tgkill, vec![rule(0, eq, std::process::id().into())?]);
    // Memory is never made executable.
    let executable = libc::PROT_EXEC as u64;
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![rule(2, SeccompCmpOp::MaskedEq(executable), 0)?]);
    }
    let program = compile(rules, refuse(), SeccompAction::Allow)?;
    seccompiler::apply_filter(&program).map_err(failed)
}

/// Refuses all threads what opens files and, unless it is needed to `connect`, what makes sockets.
///
/// # Errors
/// The kernel lacks what it takes.
pub(crate) fn seal(connect: bool) -> Result<(), SandboxError> {
    let sockets: &[c_long] = if connect { &[] } else { SEALED_BUT_TO_CONNECT };
    let rules = SEALED.iter().chain(sockets).map(|&call| (call, Vec::new())).collect();
    let program = compile(rules, SeccompAction::Allow, refuse())?;
    seccompiler::apply_filter_all_threads(&program).map_err(failed)
}
