//! What KVM counts of a vCPU: its file of binary statistics (Linux 5.14).
//!
//! ```text
//! header --descriptors_at--> descriptors, each with a name --data_at + offset--> the value
//! ```
//! See KVM_GET_STATS_FD in Documentation/virt/kvm/api.rst.
use kvm_bindings::{KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_TYPE_MASK, KVMIO};
use kvm_ioctls::VcpuFd;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use vmm_sys_util::ioctl::ioctl;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

vmm_sys_util::ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);

/// Most bytes of a name, and most values: KVM has names of 48 bytes, and 47 values.
const MAX_NAME: u32 = 256;
const MAX_VALUES: u32 = 1024;

/// `struct kvm_stats_header`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    flags: u32,
    name_size: u32,
    count: u32,
    id_at: u32,
    descriptors_at: u32,
    data_at: u32,
}

/// `struct kvm_stats_desc`, without the name that follows.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Descriptor {
    flags: u32,
    exponent: i16,
    /// Number of values.
    size: u16,
    offset: u32,
    bucket_size: u32,
}

/// The exits of one vCPU.
#[derive(Debug)]
pub(crate) struct VcpuStats {
    file: File,
    /// Offset of the number of exits.
    exits_at: u64,
}

impl VcpuStats {
    /// Opens the statistics of `vcpu`. Close them before the VM: kernels before 6.5 need that.
    ///
    /// # Errors
    /// The host has none, or in another format.
    pub(super) fn open(vcpu: &VcpuFd) -> io::Result<Self> {
        // SAFETY: this ioctl takes no argument and touches no memory of this process.
        let fd = unsafe { ioctl(vcpu, KVM_GET_STATS_FD()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and nobody else has it.
        Self::of(unsafe { File::from_raw_fd(fd) })
    }

    fn of(file: File) -> io::Result<Self> {
        let exits_at = find(&file, "exits")?;
        Ok(Self { file, exits_at })
    }

    /// Exits until now, those that KVM handles included.
    pub(crate) fn exits(&self) -> io::Result<u64> {
        read(&self.file, self.exits_at)
    }
}

/// Reads a structure.
fn read<T: FromBytes + FromZeros + IntoBytes>(file: &File, at: u64) -> io::Result<T> {
    let mut value = T::new_zeroed();
    file.read_exact_at(value.as_mut_bytes(), at)?;
    Ok(value)
}

/// Offset of the value called `name`, a sum since the vCPU was made.
fn find(file: &File, name: &str) -> io::Result<u64> {
    let Header { name_size, count, descriptors_at, data_at, .. } = read(file, 0)?;
    if name_size > MAX_NAME || count > MAX_VALUES {
        let what = format!("KVM's statistics have {count} values with names of {name_size} bytes");
        return Err(io::Error::new(ErrorKind::InvalidData, what));
    }
    let len = size_of::<Descriptor>() + name_size as usize;
    let mut descriptors = vec![0; count as usize * len];
    file.read_exact_at(&mut descriptors, descriptors_at.into())?;
    let found = descriptors.chunks_exact(len).find_map(|bytes| {
        let (descriptor, bytes) = Descriptor::read_from_prefix(bytes).ok()?;
        let is_sum = descriptor.flags & KVM_STATS_TYPE_MASK == KVM_STATS_TYPE_CUMULATIVE;
        let is_it = bytes.split(|&byte| byte == 0).next() == Some(name.as_bytes());
        (is_it && is_sum && descriptor.size == 1).then_some(descriptor.offset)
    });
    let offset =
        found.ok_or_else(|| io::Error::new(ErrorKind::NotFound, format!("KVM does not count {name}")))?;
    Ok(u64::from(data_at) + u64::from(offset))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const NAME: usize = 16;

    /// A file with the values of these names, types, and numbers of values.
    fn stats(values: &[(&str, u32, u16)], header: impl FnOnce(&mut Header)) -> File {
        let descriptors_at = 24 + NAME as u32;
        let data_at = descriptors_at + (values.len() * (16 + NAME)) as u32;
        let (name_size, count) = (NAME as u32, values.len() as u32);
        let mut head = Header { flags: 0, name_size, count, id_at: 24, descriptors_at, data_at };
        header(&mut head);
        let mut bytes = [head.as_bytes(), &[b'i'; NAME]].concat();
        let mut data = Vec::new();
        for (number, &(name, flags, size)) in values.iter().enumerate() {
            let offset = data.len() as u32;
            let descriptor = Descriptor { flags, exponent: 0, size, offset, bucket_size: 0 };
            bytes.extend_from_slice(descriptor.as_bytes());
            bytes.extend_from_slice(name.as_bytes());
            bytes.resize(bytes.len() + NAME - name.len(), 0);
            data.extend((0..size).flat_map(|_| (100 + number as u64).to_ne_bytes()));
        }
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[bytes, data].concat()).unwrap();
        file
    }

    #[test]
    fn the_sum_with_the_whole_name_is_found() {
        let values = [
            ("halt", 0x24, 3),
            ("exits", 1, 1),
            ("exits", 0, 2),
            ("io_exits", 0, 1),
            ("exits", 0x20, 1),
            ("exitsx", 0, 1),
        ];
        let stats = VcpuStats::of(stats(&values, |_| {})).unwrap();
        assert_eq!(stats.exits().unwrap(), 104);
    }

    #[test]
    fn a_file_of_another_kind_is_an_error() {
        let good = [("exits", 0, 1)];
        let spoilt: [fn(&mut Header); 5] = [
            |header| header.name_size = MAX_NAME + 1,
            |header| header.count = MAX_VALUES + 1,
            |header| header.count = 0,
            |header| header.descriptors_at = u32::MAX,
            |header| header.name_size = 0,
        ];
        for spoil in spoilt {
            assert!(VcpuStats::of(stats(&good, spoil)).is_err());
        }
        let outside = VcpuStats::of(stats(&good, |header| header.data_at = u32::MAX)).unwrap();
        assert!(outside.exits().is_err());
        assert!(VcpuStats::of(tempfile::tempfile().unwrap()).is_err());
    }
}
