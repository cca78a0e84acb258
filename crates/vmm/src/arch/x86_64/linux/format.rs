//! Names files that are no kernel for this machine, for messages.

/// Begin of a file, and what it says of the file.
const BEGINS: [(&[u8], &str); 12] = [
    (b"\x1f\x8b", "compressed by gzip (unpack it)"),
    (b"\xfd7zXZ\0", "compressed by xz (unpack it)"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd (unpack it)"),
    (b"BZh", "compressed by bzip2 (unpack it)"),
    (b"\x04\x22\x4d\x18", "compressed by lz4 (unpack it)"),
    (b"\x02\x21\x4c\x18", "compressed by lz4 (unpack it)"),
    (b"\x89LZO\0", "compressed by lzop (unpack it)"),
    (b"\x27\x05\x19\x56", "an image for U-Boot"),
    (b"!<arch>\n", "an archive or a Debian package (unpack it)"),
    (b"\xed\xab\xee\xdb", "an RPM package (unpack it)"),
    (b"070701", "an initial RAM disk (cpio)"),
    (b"QFI\xfb", "a disk image (qcow2)"),
];
/// Offset of the magic numbers of kernels for arm64 and RISC-V, and these numbers.
const IMAGE_MAGIC: usize = 0x38;
const ARM64: &[u8] = b"ARM\x64";
const RISCV: &[u8] = b"RSC\x05";
/// Numbers of ELF (`e_machine`).
const X86_64: u16 = 62;
const MACHINES: [(u16, &str); 8] = [
    (3, "32-bit x86"),
    (8, "MIPS"),
    (21, "POWER"),
    (22, "s390"),
    (40, "32-bit Arm"),
    (183, "arm64"),
    (243, "RISC-V"),
    (258, "LoongArch"),
];
/// `e_type` of a program without relocations, as a vmlinux is.
const EXECUTABLE: u16 = 2;

/// What a file is that begins with these bytes and has no header of a bzImage.
pub(super) fn found(start: &[u8]) -> &'static str {
    let has = |at: usize, magic: &[u8]| start.get(at..).is_some_and(|rest| rest.starts_with(magic));
    if let Some((_, what)) = BEGINS.iter().find(|(magic, _)| has(0, magic)) {
        return what;
    }
    match () {
        () if has(0, b"MZ") && has(4, b"zimg") => "a compressed EFI kernel of another architecture",
        () if has(IMAGE_MAGIC, ARM64) => "a kernel for arm64",
        () if has(IMAGE_MAGIC, RISCV) => "a kernel for RISC-V",
        () if has(0, b"MZ") => "an EFI program (of a unified kernel image, take the section .linux)",
        () if start.iter().all(|&byte| byte == 0) => "empty or begins with zeroes",
        () => "of an unknown format",
    }
}

/// Why an ELF file that begins with these bytes is no vmlinux for this machine; `None`: it may be one.
pub(super) fn foreign_elf(start: &[u8]) -> Option<String> {
    let byte = |at: usize| start.get(at).copied().unwrap_or_default();
    let is_big = byte(5) == 2;
    let field = |at| {
        let bytes = [byte(at), byte(at + 1)];
        if is_big { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) }
    };
    let machine = field(18);
    if machine != X86_64 {
        let name = MACHINES.iter().find(|(number, _)| *number == machine).map(|(_, name)| *name);
        return Some(match name {
            Some(name) => format!("an ELF file for {name}"),
            None => format!("an ELF file for another machine ({machine})"),
        });
    }
    if byte(4) != 2 || is_big {
        return Some("an ELF file that is not of 64 bits".into());
    }
    (field(16) != EXECUTABLE).then(|| "a module, library or program, not a vmlinux".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut start = vec![0; 4096];
        for (at, bytes) in parts {
            start[*at..*at + bytes.len()].copy_from_slice(bytes);
        }
        start
    }

    #[test]
    fn what_is_no_kernel_has_a_name() {
        for (parts, what) in [
            (&[][..], "empty"),
            (&[(0, &b"\x1f\x8b\x08"[..])], "compressed by gzip (unpack it)"),
            (&[(0, b"\x28\xb5\x2f\xfd\x04")], "zstd"),
            (&[(0, b"MZ"), (IMAGE_MAGIC, ARM64)], "arm64"),
            (&[(IMAGE_MAGIC, ARM64)], "arm64"),
            (&[(IMAGE_MAGIC, RISCV)], "RISC-V"),
            (&[(0, b"MZ\0\0zimg")], "compressed EFI kernel"),
            (&[(0, b"MZ\x90")], ".linux"),
            (&[(0, b"root:x:0:0")], "unknown"),
        ] {
            assert!(found(&with(parts)).contains(what), "{what}: {}", found(&with(parts)));
        }
        assert_eq!(found(b"M"), "of an unknown format");
        assert_eq!(found(b""), "empty or begins with zeroes");
    }

    #[test]
    fn an_elf_file_is_named_by_its_machine() {
        let elf = |class, order, kind: u16, machine: u16| {
            let put = |value: u16| if order == 2 { value.to_be_bytes() } else { value.to_le_bytes() };
            let bytes =
                with(&[(0, b"\x7fELF"), (4, &[class, order, 1]), (16, &put(kind)), (18, &put(machine))]);
            foreign_elf(&bytes)
        };
        assert_eq!(elf(2, 1, EXECUTABLE, X86_64), None);
        assert_eq!(elf(2, 1, EXECUTABLE, 183).unwrap(), "an ELF file for arm64");
        assert_eq!(elf(2, 2, EXECUTABLE, 22).unwrap(), "an ELF file for s390");
        assert_eq!(elf(1, 1, EXECUTABLE, 3).unwrap(), "an ELF file for 32-bit x86");
        assert_eq!(elf(2, 1, EXECUTABLE, 999).unwrap(), "an ELF file for another machine (999)");
        assert!(elf(1, 1, EXECUTABLE, X86_64).unwrap().contains("not of 64 bits"));
        assert!(elf(2, 2, EXECUTABLE, X86_64).unwrap().contains("not of 64 bits"));
        for kind in [1, 3] {
            assert!(elf(2, 1, kind, X86_64).unwrap().contains("module, library or program"));
        }
        assert!(foreign_elf(b"\x7fELF").is_some());
    }
}
