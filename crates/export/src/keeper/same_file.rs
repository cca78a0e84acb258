//! Whether two descriptors are of the same open file.
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// F_DUPFD_QUERY in linux/fcntl.h, since Linux 6.10.
const F_DUPFD_QUERY: libc::c_int = 1024 + 3;
/// KCMP_FILE in linux/kcmp.h.
const KCMP_FILE: libc::c_int = 0;

/// Whether `other` is open and is the open file of `fd`.
///
/// `false` also if the kernel does not tell.
pub(super) fn is_same(fd: BorrowedFd<'_>, other: RawFd) -> bool {
    // SAFETY: the call takes any number for `other`, and changes nothing.
    match unsafe { libc::fcntl(fd.as_raw_fd(), F_DUPFD_QUERY, other) } {
        same @ (0 | 1) => same == 1,
        // An older kernel, or `other` is closed.
        _ => {
            let own = std::process::id();
            // SAFETY: the call takes any numbers, and changes nothing.
            unsafe { libc::syscall(libc::SYS_kcmp, own, own, KCMP_FILE, fd.as_raw_fd(), other) == 0 }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn duplicates_are_of_the_same_file() {
        let (reader, writer) = std::io::pipe().unwrap();
        let duplicate = reader.try_clone().unwrap();
        if !is_same(reader.as_fd(), duplicate.as_raw_fd()) {
            paravane_test_support::skip("same_file", "the kernel tells by neither F_DUPFD_QUERY nor kcmp(2)");
            return;
        }
        assert!(is_same(reader.as_fd(), reader.as_raw_fd()));
        assert!(!is_same(reader.as_fd(), writer.as_raw_fd()));
        assert!(!is_same(reader.as_fd(), -1));
    }
}
