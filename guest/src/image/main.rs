//! The freestanding image.
fn main() {}
