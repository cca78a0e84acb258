//! The program `paravane`, which is of another package.
use paravane_test_support::skip;
use std::path::Path;

/// Whether it lies beside `paravane-bench`, which looks there. If not, `test` counts as skipped.
pub(crate) fn is_built(test: &str) -> bool {
    let program = Path::new(env!("CARGO_BIN_EXE_paravane-bench")).with_file_name("paravane");
    if !program.is_file() {
        skip(test, format_args!("no {}: cargo build -p paravane-cli", program.display()));
    }
    program.is_file()
}
