//! Links the freestanding image for its feature; the library needs nothing.
//!
//! The image needs feature `image` and `-Cpanic=abort` among the compiler flags; the build script
//! of the vmm crate asks for both.
use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=link.ld");
    // DEP_PARAVANE_GUEST_SOURCES of the vmm crate's build script.
    println!("cargo::metadata=sources={}", env::var("CARGO_MANIFEST_DIR").unwrap_or_default());
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    let freestanding = env::var_os("CARGO_FEATURE_IMAGE").is_some()
        && is("CARGO_CFG_PANIC", "abort")
        && is("CARGO_CFG_TARGET_ARCH", "x86_64");
    println!("cargo::rustc-check-cfg=cfg(freestanding)");
    if !freestanding {
        return;
    }
    println!("cargo::rustc-cfg=freestanding");
    let script = format!("-Wl,-T,{}/link.ld", env::var("CARGO_MANIFEST_DIR").unwrap_or_default());
    for argument in [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,--build-id=none",
        "-Wl,--no-eh-frame-hdr",
        "-Wl,-z,norelro",
        &script,
    ] {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
}
