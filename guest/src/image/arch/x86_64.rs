//! x86-64: the image in ring 3 of long mode.
//!
//! ```text
//! stubs     the header, and all code that runs in ring 0: a few instructions each
//! machine   the program's Platform: registers, clock, sleeping
//! memory    the memory functions that compilers take for granted
//! ```
mod machine;
mod memory;
mod stubs;

pub(crate) use machine::Machine;
