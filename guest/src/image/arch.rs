//! What one processor architecture needs of the image: a folder each, with its linker script.
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::Machine;
