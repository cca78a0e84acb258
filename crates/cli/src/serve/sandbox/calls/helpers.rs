//! Calls of the processes beside the daemon: the broker and the reader.
//!
//! Neither has io_uring, name spaces, signals to others, or datagrams.
use super::Calls;
use super::limits::{DATA_ONLY, LIBRARIES, STREAMS, THREADS};
use libc::c_long;

/// `paravane broker`: resolves names and connects, in threads.
pub(crate) const BROKER: Calls = Calls {
    allowed: &[BASIC, CONNECTING, OLDER],
    limits: &[LIBRARIES, STREAMS, &[THREADS]],
    ioctls: IOCTLS,
    prctls: &[libc::PR_SET_NAME as u64, libc::PR_SET_VMA as u64],
};

/// `paravane reader`: reads a file.
pub(crate) const READER: Calls = Calls {
    allowed: &[BASIC, OLDER],
    limits: &[&[DATA_ONLY]],
    ioctls: &[],
    prctls: &[libc::PR_SET_VMA as u64],
};

/// Messages, files, memory, and the end.
const BASIC: &[c_long] = &[
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    // Within the paths that Landlock allows.
    libc::SYS_openat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_readv,
    libc::SYS_ppoll,
    // Memory; mmap and mprotect are in `limits`.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // The C library and the end of the process.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
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

/// Connections, names and threads.
const CONNECTING: &[c_long] = &[
    libc::SYS_connect,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_sendmmsg,
    libc::SYS_uname,
    libc::SYS_geteuid,
    libc::SYS_getuid,
    libc::SYS_getegid,
    libc::SYS_getgid,
    libc::SYS_readlinkat,
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
];

/// Older numbers of the same calls, which the C library still uses on x86-64.
#[cfg(target_arch = "x86_64")]
const OLDER: &[c_long] = &[libc::SYS_open, libc::SYS_stat, libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[c_long] = &[];

/// Sockets that do not block.
const IOCTLS: &[u64] = &[super::request(libc::FIONBIO), super::request(libc::FIONREAD)];
