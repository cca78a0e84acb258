//! Links the freestanding image for its feature; the library needs nothing.
//!
//! The image needs feature `image` and `-Cpanic=abort` among the compiler flags; the build script
//! of the vmm crate asks for both.
use std::env;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // DEP_PARAVANE_GUEST_SOURCES of the vmm crate's build script.
    println!("cargo::metadata=sources={}", env::var("CARGO_MANIFEST_DIR").unwrap_or_default());
    let variable = |name| env::var(name).unwrap_or_default();
    let script = format!("src/image/arch/{}/link.ld", variable("CARGO_CFG_TARGET_ARCH"));
    let freestanding = env::var_os("CARGO_FEATURE_IMAGE").is_some()
        && variable("CARGO_CFG_PANIC") == "abort"
        && Path::new(&script).exists();
    println!("cargo::rustc-check-cfg=cfg(freestanding)");
    if !freestanding {
        return;
    }
    println!("cargo::rustc-cfg=freestanding");
    println!("cargo::rerun-if-changed={script}");
    let script = format!("-Wl,-T,{}/{script}", variable("CARGO_MANIFEST_DIR"));
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
