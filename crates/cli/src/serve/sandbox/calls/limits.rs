//! Calls that are allowed with some arguments only.
//!
//! The kernel checks numbers, never what a pointer leads to. So a call that names a process or a
//! command by a number is limited here; one that names a file by its path is left to Landlock.
use crate::serve::sandbox::error::SandboxError;
use libc::c_long;
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

/// Values of one argument.
#[derive(Clone, Copy, Debug)]
pub(super) enum Values {
    /// One of these.
    OneOf(&'static [u64]),
    /// One of these, with further bits outside of the mask.
    Masked(u64, &'static [u64]),
    /// This process: 0, or its number, which is that of its main thread, too.
    OwnProcess,
}

/// A limit on arguments of a call: all of them must match.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit<'a> {
    pub(super) call: c_long,
    /// Index of an argument, and its values.
    pub(super) arguments: &'a [(u8, Values)],
}

impl Limit<'_> {
    /// The rules of the filter, of which one must match.
    pub(super) fn rules(self) -> Result<Vec<SeccompRule>, SandboxError> {
        let mut combinations = vec![Vec::new()];
        for &(index, values) in self.arguments {
            let conditions = conditions(index, values)?;
            let with = |condition: &SeccompCondition| {
                let condition = condition.clone();
                combinations.iter().cloned().map(move |mut all| {
                    all.push(condition.clone());
                    all
                })
            };
            combinations = conditions.iter().flat_map(with).collect();
        }
        combinations.into_iter().map(|all| SeccompRule::new(all).map_err(SandboxError::seccomp)).collect()
    }
}

fn conditions(index: u8, values: Values) -> Result<Vec<SeccompCondition>, SandboxError> {
    let own = [0, std::process::id().into()];
    let (mask, list) = match values {
        Values::OneOf(list) => (None, list),
        Values::Masked(mask, list) => (Some(mask), list),
        Values::OwnProcess => (None, &own[..]),
    };
    let operator = || mask.map_or(SeccompCmpOp::Eq, SeccompCmpOp::MaskedEq);
    let condition = |&value| {
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator(), value)
            .map_err(SandboxError::seccomp)
    };
    list.iter().map(condition).collect()
}

/// Memory that can be executed.
const EXECUTABLE: u64 = libc::PROT_EXEC as u64;
const NOT_EXECUTABLE: Values = Values::Masked(EXECUTABLE, &[0]);

/// A thread of this process, without a name space of its own.
const THREAD: u64 = libc::CLONE_THREAD as u64;
const NEW_PLACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// Commands of fcntl(2). None names a process, as F_SETOWN does: signals would go there.
const FCNTLS: &[u64] = &[
    libc::F_DUPFD as u64,
    libc::F_GETFD as u64,
    libc::F_SETFD as u64,
    libc::F_GETFL as u64,
    libc::F_SETFL as u64,
    libc::F_OFD_GETLK as u64,
    libc::F_OFD_SETLK as u64,
    libc::F_DUPFD_CLOEXEC as u64,
    libc::F_ADD_SEALS as u64,
    libc::F_GET_SEALS as u64,
    libc::F_GETPIPE_SZ as u64,
    libc::F_SETPIPE_SZ as u64,
    // F_DUPFD_QUERY of linux/fcntl.h.
    1027,
];

/// Operations of futex(2) without PI, which names the thread that is to run.
const FUTEXES: &[u64] = &[
    libc::FUTEX_WAIT as u64,
    libc::FUTEX_WAKE as u64,
    libc::FUTEX_REQUEUE as u64,
    libc::FUTEX_CMP_REQUEUE as u64,
    libc::FUTEX_WAKE_OP as u64,
    libc::FUTEX_WAIT_BITSET as u64,
    libc::FUTEX_WAKE_BITSET as u64,
];
/// Without FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME.
const FUTEX_COMMAND: u64 = libc::FUTEX_CMD_MASK as u32 as u64;

/// For every process.
///
/// The C library aborts and changes the user of all threads by tgkill.
pub(super) const COMMON: &[Limit<'static>] = &[
    Limit { call: libc::SYS_mprotect, arguments: &[(2, NOT_EXECUTABLE)] },
    Limit { call: libc::SYS_tgkill, arguments: &[(0, Values::OwnProcess)] },
    Limit { call: libc::SYS_fcntl, arguments: &[(1, Values::OneOf(FCNTLS))] },
    Limit { call: libc::SYS_futex, arguments: &[(1, Values::Masked(FUTEX_COMMAND, FUTEXES))] },
];

/// Memory of data only.
pub(super) const DATA_ONLY: Limit<'static> =
    Limit { call: libc::SYS_mmap, arguments: &[(2, NOT_EXECUTABLE)] };

/// Files may be mapped to be executed, but not written to: modules of the C library that resolve
/// names. Landlock says which files.
pub(super) const LIBRARIES: &[Limit<'static>] = &[
    DATA_ONLY,
    Limit {
        call: libc::SYS_mmap,
        arguments: &[
            (2, Values::Masked(EXECUTABLE | libc::PROT_WRITE as u64, &[EXECUTABLE])),
            (3, Values::Masked(libc::MAP_ANONYMOUS as u64, &[0])),
        ],
    },
];

/// Threads of this process. clone3(2), whose arguments cannot be checked, does not exist for it.
pub(super) const THREADS: Limit<'static> =
    Limit { call: libc::SYS_clone, arguments: &[(0, Values::Masked(THREAD | NEW_PLACES, &[THREAD]))] };

/// Copies of this process, without a name space of their own.
pub(super) const PROCESSES: Limit<'static> =
    Limit { call: libc::SYS_clone, arguments: &[(0, Values::Masked(NEW_PLACES, &[0]))] };

/// Scheduling of this process. A thread may run behind all others.
pub(super) const SCHEDULING: &[Limit<'static>] = &[
    Limit { call: libc::SYS_prlimit64, arguments: &[(0, Values::OwnProcess)] },
    Limit { call: libc::SYS_sched_setaffinity, arguments: &[(0, Values::OwnProcess)] },
    Limit {
        call: libc::SYS_sched_setscheduler,
        arguments: &[(0, Values::OwnProcess), (1, Values::OneOf(&[libc::SCHED_IDLE as u64]))],
    },
    // Whether two descriptors are of one open file; fcntl tells from Linux 6.10 on.
    Limit { call: libc::SYS_kcmp, arguments: &[(0, Values::OwnProcess), (1, Values::OwnProcess)] },
];

const LOCAL: u64 = libc::AF_UNIX as u64;
const INTERNET: &[u64] = &[libc::AF_INET as u64, libc::AF_INET6 as u64];
const SOCKET_TYPE: u64 = 0xf;

/// Unix sockets.
pub(super) const LOCAL_SOCKETS: &[Limit<'static>] = &[
    Limit { call: libc::SYS_socket, arguments: &[(0, Values::OneOf(&[LOCAL]))] },
    Limit { call: libc::SYS_socketpair, arguments: &[(0, Values::OneOf(&[LOCAL]))] },
];

/// Sockets of librbd, which resolves names itself. Landlock says to which ports they connect.
pub(super) const INTERNET_SOCKETS: Limit<'static> =
    Limit { call: libc::SYS_socket, arguments: &[(0, Values::OneOf(INTERNET))] };

/// Unix sockets and TCP. The resolver of musl knows nothing but UDP to begin with.
pub(super) const STREAMS: &[Limit<'static>] = &[
    Limit {
        call: libc::SYS_socket,
        arguments: &[
            (0, Values::OneOf(&[LOCAL, libc::AF_INET as u64, libc::AF_INET6 as u64])),
            (1, Values::Masked(SOCKET_TYPE, &[libc::SOCK_STREAM as u64])),
        ],
    },
    #[cfg(target_env = "musl")]
    Limit {
        call: libc::SYS_socket,
        arguments: &[
            (0, Values::OneOf(INTERNET)),
            (1, Values::Masked(SOCKET_TYPE, &[libc::SOCK_DGRAM as u64])),
        ],
    },
];
