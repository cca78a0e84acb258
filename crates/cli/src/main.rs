//! The program `paravane`.
fn main() {}
