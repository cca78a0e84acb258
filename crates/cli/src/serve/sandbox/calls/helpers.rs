//! Calls of the processes beside the daemon: the broker and the reader.
//!
//! Neither has io_uring, name spaces, signals to others, or datagrams.
use super::limits::{DATA_ONLY, LIBRARIES, STREAMS, THREADS};
use super::{COMMON, Calls};
use libc::c_long;

/// `paravane broker`: resolves names and connects, in threads.
pub(crate) const BROKER: Calls = Calls {
    allowed: &[COMMON, BASIC, CONNECTING, OLDER],
    limits: &[LIBRARIES, STREAMS, &[THREADS]],
    ioctls: IOCTLS,
    prctls: &[libc::PR_SET_NAME as u64, libc::PR_SET_VMA as u64],
};

/// `paravane reader`: reads a file.
pub(crate) const READER: Calls = Calls {
    allowed: &[COMMON, BASIC, OLDER],
    limits: &[&[DATA_ONLY]],
    ioctls: &[],
    prctls: &[libc::PR_SET_VMA as u64],
};

/// Messages and files.
const BASIC: &[c_long] = &[
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_read,
    // Within the paths that Landlock allows.
    libc::SYS_openat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_readv,
    // The C library.
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
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
