//! Loads kernel, initial RAM disk and command line into RAM.
//!
//! The boot parameters tell the kernel where they are.
//!
//! ```text
//! file --magic--> bzImage: setup header kept, 64-bit entry at 0x200 behind the start
//!            '--> vmlinux: segments where they ask for, entry as the file says
//! initial RAM disk: as high as RAM and kernel allow, above the end of the kernel
//! ```
//! The files may contain anything: what does not fit is an error.
use super::format;
use super::layout::{ACPI, BOOT_PARAMS, CMDLINE, CMDLINE_ROOM, HIGH, LOW_END};
use linux_loader::loader::{BzImage, Elf, KernelLoader, KernelLoaderResult};
use paravane_dma::interop::View;
use paravane_dma::{Access, AccessGuard, DmaError, Memory};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Offsets in the boot parameters; those of the setup header hold in files, too.
///
/// See Documentation/arch/x86/zero-page.rst.
mod offset {
    pub(super) const ACPI_RSDP: usize = 0x070;
    pub(super) const E820_ENTRIES: usize = 0x1e8;
    /// Start of the setup header.
    ///
    /// It ends at [`JUMP_TARGET`] plus the byte before it.
    pub(super) const HEADER: usize = 0x1f1;
    pub(super) const SYSSIZE: usize = 0x1f4;
    pub(super) const BOOT_FLAG: usize = 0x1fe;
    pub(super) const JUMP_TARGET: usize = 0x202;
    pub(super) const MAGIC: usize = 0x202;
    pub(super) const VERSION: usize = 0x206;
    pub(super) const LOADER: usize = 0x210;
    pub(super) const RAMDISK_IMAGE: usize = 0x218;
    pub(super) const RAMDISK_SIZE: usize = 0x21c;
    pub(super) const CMDLINE: usize = 0x228;
    pub(super) const RAMDISK_MAX: usize = 0x22c;
    pub(super) const XLOADFLAGS: usize = 0x236;
    pub(super) const CMDLINE_SIZE: usize = 0x238;
    pub(super) const PREF_ADDRESS: usize = 0x258;
    pub(super) const INIT_SIZE: usize = 0x260;
    /// Largest end of a setup header.
    pub(super) const HEADER_END: usize = 0x290;
    pub(super) const E820: usize = 0x2d0;
}

const PARAMS_SIZE: usize = 0x1000;
const HDRS: u32 = u32::from_le_bytes(*b"HdrS");
const BOOT_FLAG: u16 = 0xaa55;
/// Loader type for loaders without an assigned number.
const UNKNOWN_LOADER: u8 = 0xff;
/// First protocol version with a flag for the 64-bit entry.
const VERSION: u16 = 0x020c;
/// Bit of [`offset::XLOADFLAGS`]: the kernel has a 64-bit entry.
const KERNEL_64: u16 = 1;
/// Offset of a bzImage's 64-bit entry.
const ENTRY_64: u64 = 0x200;
/// Limits for command line and RAM disk if the header states none.
const CMDLINE_DEFAULT: u32 = 2047;
const RAMDISK_MAX_DEFAULT: u32 = 0x7fff_ffff;

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// A guest's files cannot be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The file is no kernel for this machine.
    #[error("{} is {found}; give a bzImage, or an x86-64 vmlinux", path.display())]
    NoKernel {
        /// Path of the file.
        path: PathBuf,
        /// What it seems to be.
        found: String,
    },
    /// The kernel is too old, or 32-bit.
    #[error(
        "{} has no 64-bit entry (boot protocol {version:#x}); give a kernel for x86-64, from Linux 3.8 on",
        path.display()
    )]
    No64Bit {
        /// Path of the kernel.
        path: PathBuf,
        /// Version of the boot protocol.
        version: u16,
    },
    /// The kernel is shorter than its header says.
    #[error(
        "{} ends early: it has {len} bytes of {needed} or more; copy or download it again",
        path.display()
    )]
    Short {
        /// Path of the kernel.
        path: PathBuf,
        /// Length of the file in bytes.
        len: u64,
        /// Length in bytes by the header, less what may be missing of the last 16.
        needed: u64,
    },
    /// The loader refuses the kernel.
    #[error(
        "{} cannot be loaded into {} MiB of guest memory: {reason}; raise --memory, or copy the file again",
        path.display(), memory >> 20
    )]
    Refused {
        /// Path of the kernel.
        path: PathBuf,
        /// Guest memory in bytes.
        memory: u64,
        /// Cause.
        reason: String,
    },
    /// Guest memory is too small.
    #[error(
        "guest memory of {} MiB is too small: the kernel needs {} MiB to unpack; raise --memory",
        memory >> 20, needed.div_ceil(1 << 20)
    )]
    Room {
        /// End of the unpacked kernel in bytes.
        needed: u64,
        /// Guest memory in bytes.
        memory: u64,
    },
    /// The initial RAM disk is too large.
    #[error(
        "there is no room for an initial RAM disk of {size} bytes between {start:#x} and {end:#x}; raise --memory"
    )]
    Initrd {
        /// Size of the RAM disk in bytes.
        size: u64,
        /// First free address, at the end of the kernel.
        start: u64,
        /// Highest end of the RAM disk.
        end: u64,
    },
    /// The command line is too long.
    #[error("the command line has {len} bytes: the kernel takes {most}")]
    LongCmdline {
        /// Length in bytes.
        len: usize,
        /// Limit of the kernel in bytes.
        most: u64,
    },
    /// The command line cannot be passed on.
    #[error("the command line holds a zero byte")]
    ZeroInCmdline,
    /// A write lies outside guest memory.
    #[error("guest memory cannot be written: {0}")]
    Memory(#[from] DmaError),
    /// The loader has no view of guest memory.
    #[error("guest memory cannot be lent to the loader: {0}")]
    View(std::io::Error),
}

/// A kernel in RAM.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// Its first instruction.
    pub(super) entry: u64,
    /// First byte above the memory that it needs before it reads its RAM disk.
    end: u64,
    /// Its setup header, at its offset in the boot parameters.
    params: Params,
}

/// The boot parameters.
#[derive(Debug)]
struct Params([u8; PARAMS_SIZE]);

impl Params {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        std::array::from_fn(|byte| self.0[at + byte])
    }
}

fn read(path: &Path) -> impl Fn(std::io::Error) -> LoadError {
    |source| LoadError::Read { path: path.to_owned(), source }
}

/// Loads the kernel.
///
/// # Errors
/// The file is no kernel, or it does not fit.
pub(crate) fn kernel(memory: &Memory, ram: u64, path: &Path) -> Result<Kernel, LoadError> {
    let mut file = File::open(path).map_err(read(path))?;
    // Anything but a regular file may never end, or block.
    let mut start = Vec::new();
    file.by_ref().take(PARAMS_SIZE as u64).read_to_end(&mut start).map_err(read(path))?;
    start.resize(PARAMS_SIZE, 0);
    let view = View::new(memory).map_err(LoadError::View)?;
    let refused = |error: linux_loader::loader::Error| LoadError::Refused {
        path: path.to_owned(),
        memory: ram,
        reason: error.to_string(),
    };
    let no_kernel = |found: String| LoadError::NoKernel { path: path.to_owned(), found };
    let field = |at: usize| u16::from_le_bytes([start[at], start[at + 1]]);
    let kernel = if start.starts_with(b"\x7fELF") {
        if let Some(found) = format::foreign_elf(&start) {
            return Err(no_kernel(found));
        }
        let loaded = Elf::load(&view, None, &mut file, None).map_err(refused)?;
        vmlinux(&loaded)
    } else if start[offset::MAGIC..].starts_with(&HDRS.to_le_bytes()) {
        let version = field(offset::VERSION);
        if version < VERSION || field(offset::XLOADFLAGS) & KERNEL_64 == 0 {
            return Err(LoadError::No64Bit { path: path.to_owned(), version });
        }
        let (len, needed) = (file.metadata().map_err(read(path))?.len(), bz_image_len(&start));
        if len < needed {
            return Err(LoadError::Short { path: path.to_owned(), len, needed });
        }
        let loaded = BzImage::load(&view, None, &mut file, None).map_err(refused)?;
        bz_image(&loaded, &start)
    } else {
        return Err(no_kernel(format::found(&start).into()));
    };
    if kernel.end > ram {
        return Err(LoadError::Room { needed: kernel.end, memory: ram });
    }
    if kernel.entry < HIGH || kernel.entry >= kernel.end {
        return Err(no_kernel(format!("a program that begins at {:#x}, where no kernel can", kernel.entry)));
    }
    Ok(kernel)
}

/// Least length in bytes of a bzImage that begins with `start`.
fn bz_image_len(start: &[u8]) -> u64 {
    const SECTOR: u64 = 512;
    // In units of 16 bytes, rounded up.
    let protected = u32::from_le_bytes(std::array::from_fn(|byte| start[offset::SYSSIZE + byte]));
    let setup = match start[offset::HEADER] {
        // By the boot protocol, 0 means 4.
        0 => 4,
        sectors => u64::from(sectors),
    };
    (setup + 1) * SECTOR + (u64::from(protected) * 16).saturating_sub(15)
}

fn vmlinux(loaded: &KernelLoaderResult) -> Kernel {
    let mut params = Params([0; PARAMS_SIZE]);
    params.put(offset::BOOT_FLAG, &BOOT_FLAG.to_le_bytes());
    params.put(offset::MAGIC, &HDRS.to_le_bytes());
    params.put(offset::VERSION, &VERSION.to_le_bytes());
    params.put(offset::CMDLINE_SIZE, &CMDLINE_DEFAULT.to_le_bytes());
    params.put(offset::RAMDISK_MAX, &RAMDISK_MAX_DEFAULT.to_le_bytes());
    Kernel { entry: loaded.kernel_load.0, end: loaded.kernel_end, params }
}

fn bz_image(loaded: &KernelLoaderResult, file: &[u8]) -> Kernel {
    let end = offset::JUMP_TARGET + usize::from(file[offset::JUMP_TARGET - 1]);
    let end = end.min(offset::HEADER_END);
    let mut params = Params([0; PARAMS_SIZE]);
    params.put(offset::HEADER, &file[offset::HEADER..end]);
    // It unpacks itself to its preferred address, or in place if that is higher.
    let at = u64::from_le_bytes(params.get(offset::PREF_ADDRESS)).max(loaded.kernel_load.0);
    let unpacked = at.saturating_add(u32::from_le_bytes(params.get(offset::INIT_SIZE)).into());
    let entry = loaded.kernel_load.0.saturating_add(ENTRY_64);
    Kernel { entry, end: loaded.kernel_end.max(unpacked), params }
}

/// Files and tables beside the kernel.
pub(super) struct Extras<'a> {
    /// The initial RAM disk.
    pub(super) initrd: Option<&'a Path>,
    /// The command line.
    pub(super) cmdline: &'a str,
    /// The ACPI tables, for [`ACPI`].
    pub(super) tables: &'a [u8],
    /// Reserved range that is not RAM: start and size.
    pub(super) reserved: &'a [(u64, u64)],
}

impl Kernel {
    /// Puts these into RAM, and the boot parameters last.
    ///
    /// # Errors
    /// Something does not fit.
    pub(super) fn finish(
        mut self,
        memory: &AccessGuard<'_>,
        ram: u64,
        extras: &Extras<'_>,
    ) -> Result<(), LoadError> {
        self.initrd(memory, ram, extras.initrd)?;
        self.cmdline(memory, extras.cmdline)?;
        memory.write(ACPI, extras.tables, Access::WRITE)?;
        let params = &mut self.params;
        params.put(offset::LOADER, &[UNKNOWN_LOADER]);
        params.put(offset::ACPI_RSDP, &ACPI.to_le_bytes());
        let map =
            [(0, LOW_END, E820_RAM), (LOW_END, HIGH - LOW_END, E820_RESERVED), (HIGH, ram - HIGH, E820_RAM)];
        let reserved = extras.reserved.iter().map(|&(start, size)| (start, size, E820_RESERVED));
        let mut entries = 0_u8;
        for (start, size, kind) in map.into_iter().chain(reserved) {
            let at = offset::E820 + 20 * usize::from(entries);
            params.put(at, &start.to_le_bytes());
            params.put(at + 8, &size.to_le_bytes());
            params.put(at + 16, &kind.to_le_bytes());
            entries += 1;
        }
        params.put(offset::E820_ENTRIES, &[entries]);
        Ok(memory.write(BOOT_PARAMS, &params.0, Access::WRITE)?)
    }

    fn initrd(&mut self, memory: &AccessGuard<'_>, ram: u64, path: Option<&Path>) -> Result<(), LoadError> {
        let Some(path) = path else { return Ok(()) };
        let file = File::open(path).map_err(read(path))?;
        let size = file.metadata().map_err(read(path))?.len();
        let most = u64::from(u32::from_le_bytes(self.params.get(offset::RAMDISK_MAX))) + 1;
        let (start, end) = (self.end.next_multiple_of(4096), ram.min(most));
        let at = end.checked_sub(size).map(|at| at & !4095).filter(|&at| at >= start);
        let at = at.ok_or(LoadError::Initrd { size, start, end })?;
        let mut piece = vec![0; 1 << 20];
        let mut done = 0;
        while done < size {
            let len = usize::try_from(size - done).map_or(piece.len(), |left| left.min(piece.len()));
            file.read_exact_at(&mut piece[..len], done).map_err(read(path))?;
            memory.write(at + done, &piece[..len], Access::WRITE)?;
            done += len as u64;
        }
        // Both are below `end`, which is below 4 GiB.
        self.params.put(offset::RAMDISK_IMAGE, &(at as u32).to_le_bytes());
        self.params.put(offset::RAMDISK_SIZE, &(size as u32).to_le_bytes());
        Ok(())
    }

    fn cmdline(&mut self, memory: &AccessGuard<'_>, cmdline: &str) -> Result<(), LoadError> {
        let most = u64::from(u32::from_le_bytes(self.params.get(offset::CMDLINE_SIZE))).min(CMDLINE_ROOM - 1);
        if cmdline.len() as u64 > most {
            return Err(LoadError::LongCmdline { len: cmdline.len(), most });
        }
        if cmdline.contains('\0') {
            return Err(LoadError::ZeroInCmdline);
        }
        memory.write(CMDLINE, &[cmdline.as_bytes(), b"\0"].concat(), Access::WRITE)?;
        self.params.put(offset::CMDLINE, &(CMDLINE as u32).to_le_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_dma::{Backing, Region, RegionConfig};
    use std::io::Write;
    use tempfile::NamedTempFile;

    const RAM: u64 = 32 << 20;
    const SETUP: usize = 2 * 512;
    const MACHINE: u16 = 62;
    const CODE: [u8; 0x240] = [0xc5; 0x240];
    const PREFERRED: u64 = 16 << 20;

    fn memory() -> Memory {
        let config = RegionConfig { gpa: 0, size: RAM, backing: Backing::Pages, writable: true };
        Memory::new(vec![Region::new(config).unwrap()]).unwrap()
    }

    fn file(bytes: &[u8]) -> NamedTempFile {
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    /// One sector of set-up code, then the kernel, which wants 1 MiB at 16 MiB.
    fn bz_image() -> Vec<u8> {
        let mut image = vec![0; SETUP];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(offset::HEADER, &[1]);
        put(offset::BOOT_FLAG, &BOOT_FLAG.to_le_bytes());
        // The jump over the header, to 0x268.
        put(0x200, &[0xeb, 0x66]);
        put(offset::MAGIC, b"HdrS");
        put(offset::VERSION, &0x020f_u16.to_le_bytes());
        // Loaded high.
        put(0x211, &[1]);
        put(0x214, &0x10_0000_u32.to_le_bytes());
        put(offset::RAMDISK_MAX, &0x7fff_ffff_u32.to_le_bytes());
        put(offset::XLOADFLAGS, &KERNEL_64.to_le_bytes());
        put(offset::CMDLINE_SIZE, &40_u32.to_le_bytes());
        put(offset::PREF_ADDRESS, &PREFERRED.to_le_bytes());
        put(offset::INIT_SIZE, &(1_u32 << 20).to_le_bytes());
        [image.as_slice(), &CODE].concat()
    }

    /// One segment at 16 MiB, four times as long in memory as in the file.
    fn vmlinux() -> Vec<u8> {
        let mut image = vec![0; 64 + 56];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"\x7fELF\x02\x01\x01");
        put(16, &2_u16.to_le_bytes());
        put(18, &MACHINE.to_le_bytes());
        put(24, &(PREFERRED + 0x40).to_le_bytes());
        put(32, &64_u64.to_le_bytes());
        put(54, &56_u16.to_le_bytes());
        put(56, &1_u16.to_le_bytes());
        put(64, &1_u32.to_le_bytes());
        put(72, &120_u64.to_le_bytes());
        put(80, &(u64::MAX << 31 | PREFERRED).to_le_bytes());
        put(88, &PREFERRED.to_le_bytes());
        put(96, &(CODE.len() as u64).to_le_bytes());
        put(104, &(4 * CODE.len() as u64).to_le_bytes());
        [image.as_slice(), &CODE].concat()
    }

    fn load(image: &[u8]) -> Result<(Memory, Kernel), LoadError> {
        let memory = memory();
        let kernel = kernel(&memory, RAM, file(image).path())?;
        Ok((memory, kernel))
    }

    fn bytes(memory: &Memory, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        memory.handle().enter().read(addr, &mut bytes, Access::READ).unwrap();
        bytes
    }

    fn word(memory: &Memory, at: usize) -> u32 {
        memory.handle().enter().read_obj(BOOT_PARAMS + at as u64, Access::READ).unwrap()
    }

    fn finish(
        memory: &Memory,
        kernel: Kernel,
        initrd: Option<&Path>,
        cmdline: &str,
    ) -> Result<(), LoadError> {
        let extras = Extras { initrd, cmdline, tables: b"tables", reserved: &[(0xe000_0000, 1 << 20)] };
        kernel.finish(&memory.handle().enter(), RAM, &extras)
    }

    #[test]
    fn a_bz_image_is_entered_at_its_64_bit_entry() {
        let (memory, kernel) = load(&bz_image()).unwrap();
        assert_eq!((kernel.entry, kernel.end), (0x10_0200, 17 << 20));
        assert_eq!(bytes(&memory, 0x10_0000, CODE.len()), CODE);
        let initrd = file(&[7; 5000]);
        finish(&memory, kernel, Some(initrd.path()), "console=ttyS0").unwrap();
        assert_eq!(word(&memory, offset::MAGIC), HDRS);
        let at = word(&memory, offset::RAMDISK_IMAGE).into();
        assert_eq!((at, word(&memory, offset::RAMDISK_SIZE)), (RAM - 8192, 5000));
        assert_eq!(bytes(&memory, at, 5001), [vec![7; 5000], vec![0]].concat());
        assert_eq!(bytes(&memory, word(&memory, offset::CMDLINE).into(), 14), b"console=ttyS0\0");
        assert_eq!(bytes(&memory, word(&memory, offset::ACPI_RSDP).into(), 6), b"tables");
        // Behind the two entries below 1 MiB: RAM, then what is reserved.
        assert_eq!(bytes(&memory, BOOT_PARAMS + offset::E820_ENTRIES as u64, 1), [4]);
        let entry = |number: usize| {
            let at = offset::E820 + 20 * number;
            [word(&memory, at), word(&memory, at + 8), word(&memory, at + 16)]
        };
        assert_eq!(entry(0), [0, LOW_END as u32, E820_RAM]);
        assert_eq!(entry(2), [HIGH as u32, (RAM - HIGH) as u32, E820_RAM]);
        assert_eq!(entry(3), [0xe000_0000, 1 << 20, E820_RESERVED]);
        // Nothing of the code behind the header came with it.
        assert_eq!(word(&memory, 0x268), 0);
    }

    #[test]
    fn a_vmlinux_is_entered_where_it_says() {
        let (memory, kernel) = load(&vmlinux()).unwrap();
        assert_eq!((kernel.entry, kernel.end), (PREFERRED + 0x40, PREFERRED + 4 * CODE.len() as u64));
        assert_eq!(bytes(&memory, PREFERRED, CODE.len()), CODE);
        finish(&memory, kernel, None, "quiet").unwrap();
        assert_eq!((word(&memory, offset::MAGIC), word(&memory, offset::RAMDISK_SIZE)), (HDRS, 0));
    }

    #[test]
    fn what_cannot_be_booted_is_refused() {
        assert!(matches!(load(b""), Err(LoadError::NoKernel { .. })));
        assert!(matches!(load(&[0x90; 5000]), Err(LoadError::NoKernel { .. })));
        let changed = |mut image: Vec<u8>, at: usize, bytes: &[u8]| {
            image[at..at + bytes.len()].copy_from_slice(bytes);
            load(&image).unwrap_err()
        };
        assert!(matches!(changed(vmlinux(), 4, &[1]), LoadError::NoKernel { .. }));
        assert!(matches!(changed(vmlinux(), 18, &[183, 0]), LoadError::NoKernel { .. }));
        assert!(matches!(changed(vmlinux(), 88, &RAM.to_le_bytes()), LoadError::Refused { .. }));
        assert!(matches!(changed(vmlinux(), 104, &RAM.to_le_bytes()), LoadError::Room { .. }));
        assert!(matches!(changed(vmlinux(), 24, &[0; 8]), LoadError::NoKernel { .. }));
        assert!(matches!(
            changed(bz_image(), offset::VERSION, &[4, 2]),
            LoadError::No64Bit { version: 0x204, .. }
        ));
        assert!(matches!(changed(bz_image(), offset::XLOADFLAGS, &[0]), LoadError::No64Bit { .. }));
        assert!(matches!(changed(bz_image(), offset::INIT_SIZE, &[0xff; 4]), LoadError::Room { .. }));
        assert!(matches!(changed(bz_image(), offset::HEADER, &[200]), LoadError::Short { .. }));
        // A download that was cut off.
        let whole = |len: usize| (len as u32).div_ceil(16).to_le_bytes();
        let mut image = bz_image();
        image[offset::SYSSIZE..][..4].copy_from_slice(&whole(CODE.len()));
        assert!(load(&image).is_ok());
        image[offset::SYSSIZE..][..4].copy_from_slice(&whole(CODE.len() + 32));
        let error = load(&image).unwrap_err();
        assert!(matches!(error, LoadError::Short { len, .. } if len == image.len() as u64), "{error}");
        assert!(matches!(kernel(&memory(), RAM, Path::new("/none")), Err(LoadError::Read { .. })));
    }

    #[test]
    fn what_does_not_fit_beside_the_kernel_is_refused() {
        let long = "x".repeat(41);
        let (memory, kernel) = load(&bz_image()).unwrap();
        assert!(matches!(
            finish(&memory, kernel, None, &long),
            Err(LoadError::LongCmdline { len: 41, most: 40 })
        ));
        let (memory, kernel) = load(&bz_image()).unwrap();
        assert!(matches!(finish(&memory, kernel, None, "a\0b"), Err(LoadError::ZeroInCmdline)));
        let initrd = file(b"");
        initrd.as_file().set_len(15 << 20).unwrap();
        let (memory, kernel) = load(&bz_image()).unwrap();
        finish(&memory, kernel, Some(initrd.path()), "").unwrap();
        initrd.as_file().set_len((15 << 20) + 1).unwrap();
        let (memory, kernel) = load(&bz_image()).unwrap();
        let refused = finish(&memory, kernel, Some(initrd.path()), "").unwrap_err();
        assert!(
            matches!(refused, LoadError::Initrd { start, end: RAM, .. } if start == 17 << 20),
            "{refused}"
        );
    }
}
