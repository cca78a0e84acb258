//! Builds the built-in guest's image, which the library embeds.
//!
//! ```text
//! cargo build (paravane-guest, profile `guest`, freestanding) -> ELF file -> one flat image -> OUT_DIR/guest.img
//! ```
//! The build script of `paravane-guest` tells where its sources are: in the workspace, or in a
//! package that cargo has unpacked. A package is built from a copy below OUT_DIR, because
//! registries are read-only.
//!
//! The image is built for the ordinary Linux target, so no further target need be installed. The
//! outer build's flags (sanitizers, coverage, `--cfg loom`, clippy) must not reach it: it has no
//! runtime for them.
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

/// What the guest is compiled for, whatever the host program is compiled for.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Name of the guest's image binary.
const BINARY: &str = "paravane-guest-image";
/// Where the image is linked: `paravane_spec::builtin::IMAGE_BASE`.
///
/// image.rs compares it with the header.
const IMAGE_BASE: u64 = 0x10_0000;
/// Largest size of an image, in bytes.
///
/// A larger one is a mistake of the linker script.
const MAX_SIZE: u64 = 1 << 20;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let guest = PathBuf::from(variable("DEP_PARAVANE_GUEST_SOURCES"));
    let out = PathBuf::from(variable("OUT_DIR"));
    let image = match build(&guest, &out) {
        Ok(image) => image,
        Err(why) => fail(&format!("cannot build the built-in guest's image: {why}")),
    };
    if let Err(error) = fs::write(out.join("guest.img"), image) {
        fail(&format!("cannot write the built-in guest's image: {error}"));
    }
}

/// Returns the flat image; empty where the machine that it is for does not exist.
fn build(guest: &Path, out: &Path) -> Result<Vec<u8>, String> {
    let runs_here =
        variable("CARGO_CFG_TARGET_ARCH") == "x86_64" && variable("CARGO_CFG_TARGET_OS") == "linux";
    // Miri cannot run a virtual machine, and lends its own compiler to build scripts.
    if !runs_here || env::var_os("CARGO_CFG_MIRI").is_some() {
        return Ok(Vec::new());
    }
    let target_dir = out.join("guest-target");
    let mut cargo = Command::new(variable("CARGO"));
    for (name, _) in env::vars_os() {
        if is_of_the_outer_build(&name) {
            cargo.env_remove(name);
        }
    }
    // The flags have the last word over every other way to give flags. The image is linked at a
    // fixed address and never unwinds; its build script looks for the abort.
    cargo.env(
        "CARGO_ENCODED_RUSTFLAGS",
        "-Crelocation-model=static\x1f-Cpanic=abort\x1f-Cforce-unwind-tables=no",
    );
    cargo.args(["build", "--quiet", "--offline", "--config", "profile.toml", "--profile", "guest"]);
    let workspace = guest.join("..");
    let package = if workspace.join("crates/ring/Cargo.toml").exists() {
        watch_workspace(&workspace);
        cargo.arg("--locked");
        guest.to_owned()
    } else {
        let copy = out.join("guest");
        copy_package(guest, &copy).map_err(|error| format!("{}: {error}", copy.display()))?;
        for (name, folder) in unpacked_beside(guest) {
            cargo.arg("--config").arg(format!("patch.crates-io.{name}.path={folder:?}"));
        }
        copy
    };
    cargo
        // Configuration files are looked for from here upwards.
        .current_dir(&package)
        .args(["--bin", BINARY, "--features", "image", "--target", TARGET])
        .arg("--target-dir")
        .arg(&target_dir);
    let output = cargo.output().map_err(|error| format!("cannot start cargo: {error}"))?;
    if !output.status.success() {
        let messages = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}\n{cargo:?}\n{messages}", output.status));
    }
    let elf = target_dir.join(TARGET).join("guest").join(BINARY);
    let bytes = fs::read(&elf).map_err(|error| format!("{}: {error}", elf.display()))?;
    flatten(&bytes).ok_or_else(|| format!("{} is not a program linked by link.ld", elf.display()))
}

/// Has cargo build the image again when its sources in `workspace` change.
fn watch_workspace(workspace: &Path) {
    for part in ["Cargo.toml", "Cargo.lock", "guest/build.rs", "guest/profile.toml"] {
        println!("cargo::rerun-if-changed={}", workspace.join(part).display());
    }
    for member in ["guest", "crates/driver", "crates/ring", "crates/spec"] {
        for part in ["Cargo.toml", "src"] {
            println!("cargo::rerun-if-changed={}", workspace.join(member).join(part).display());
        }
    }
}

/// Copies the unpacked package `from` to `to`, as a workspace without tests.
///
/// Without a lock file cargo resolves the dependencies among those that it has downloaded for the
/// outer build.
fn copy_package(from: &Path, to: &Path) -> io::Result<()> {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    fs::create_dir_all(to)?;
    for file in ["build.rs", "profile.toml"] {
        fs::copy(from.join(file), to.join(file))?;
    }
    copy_folder(&from.join("src"), &to.join("src"))?;
    let mut manifest = String::new();
    let mut keep = true;
    for line in fs::read_to_string(from.join("Cargo.toml"))?.lines() {
        if line.starts_with('[') {
            keep = !line.starts_with("[dev-dependencies");
        }
        if keep {
            manifest += line;
            manifest += "\n";
        }
    }
    fs::write(to.join("Cargo.toml"), manifest + "\n[workspace]\n")
}

fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Packages of the workspace that the image needs, unpacked beside `guest`.
///
/// `cargo package` builds with packages that are in no registry yet.
fn unpacked_beside(guest: &Path) -> Vec<(&'static str, PathBuf)> {
    let version = variable("CARGO_PKG_VERSION");
    let place = |name: &'static str| {
        // A registry's folders have the version in their names, a vendored one's need not.
        let folders = [format!("{name}-{version}"), name.to_owned()];
        let folder = folders.iter().map(|folder| guest.with_file_name(folder)).find(|folder| folder.exists());
        folder.map(|folder| (name, folder))
    };
    ["paravane-spec", "paravane-ring", "paravane-driver"].into_iter().filter_map(place).collect()
}

/// Whether a variable belongs to the outer build and must not reach the inner one.
fn is_of_the_outer_build(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let flags = [
        "RUSTFLAGS",
        "RUSTDOCFLAGS",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTC_BOOTSTRAP",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_TARGET_DIR",
        "CARGO_BUILD_TARGET_DIR",
        "TARGET",
        "HOST",
        "OUT_DIR",
        "PROFILE",
        "OPT_LEVEL",
        "DEBUG",
    ];
    let families = [
        "CARGO_BUILD_RUST",
        "CARGO_CFG_",
        "CARGO_FEATURE_",
        "CARGO_LLVM_COV",
        "CARGO_PKG_",
        "CARGO_PROFILE_",
        "CARGO_TARGET_X86_64",
        "CARGO_UNSTABLE_",
        "CLIPPY_",
        "DEP_",
        "MIRI",
    ];
    flags.contains(&&*name) || families.iter().any(|family| name.starts_with(family))
}

/// The bytes of an ELF program's segments from [`IMAGE_BASE`] on.
///
/// As they lie in memory. What the file does not hold (bss) is left off at the end: RAM is zero at
/// boot.
fn flatten(elf: &[u8]) -> Option<Vec<u8>> {
    const LOAD: u64 = 1;
    let field = |offset: u64, len: usize| -> Option<u64> {
        let start = usize::try_from(offset).ok()?;
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(elf.get(start..start.checked_add(len)?)?);
        Some(u64::from_le_bytes(bytes))
    };
    // 64 bits, little endian.
    if elf.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (headers, size, count) = (field(0x20, 8)?, field(0x36, 2)?, field(0x38, 2)?);
    let mut image = Vec::new();
    for number in 0..count {
        let header = headers.checked_add(number * size)?;
        let [kind, offset] = [field(header, 4)?, field(header + 8, 8)?];
        let [addr, len] = [field(header + 16, 8)?, field(header + 32, 8)?];
        if kind != LOAD || len == 0 {
            continue;
        }
        let from = usize::try_from(offset).ok()?;
        let content = elf.get(from..from.checked_add(usize::try_from(len).ok()?)?)?;
        let at = addr.checked_sub(IMAGE_BASE)?;
        let end = at.checked_add(len).filter(|&end| end <= MAX_SIZE)?;
        image.resize(image.len().max(end as usize), 0);
        image[at as usize..end as usize].copy_from_slice(content);
    }
    (!image.is_empty()).then_some(image)
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| fail(&format!("cargo did not set {name}")))
}

/// Ends the build with a message.
fn fail(why: &str) -> ! {
    for line in why.lines() {
        println!("cargo::error={line}");
    }
    std::process::exit(1)
}
