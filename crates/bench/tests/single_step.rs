//! Counts instructions by single steps, in a program with `paravane`'s hook.
//!
//! It has its own `main` because the program starts itself again.
use paravane_bench::{BenchError, child_main, single_step};
use std::io::ErrorKind;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = child_main() {
        return code;
    }
    // What test runners ask of a test with its own main.
    if std::env::args().any(|arg| arg == "--list") {
        println!("single_step: test");
        return ExitCode::SUCCESS;
    }
    if let Err(BenchError::Os { source, .. }) = single_step("split/device/1desc/batch32", "paravane")
        && matches!(source.kind(), ErrorKind::PermissionDenied | ErrorKind::Unsupported)
    {
        paravane_test_support::skip("single_step", format!("ptrace is refused: {source}"));
        return ExitCode::SUCCESS;
    }
    counts_are_exact_and_repeat();
    counts_cover_every_subject();
    what_cannot_be_counted_is_an_error();
    ExitCode::SUCCESS
}

fn counts_are_exact_and_repeat() {
    for case in ["split/device/1desc/batch32", "split/driver/4desc/batch1"] {
        let counts = [(); 3].map(|()| single_step(case, "paravane").expect(case));
        assert!(counts[0] > 1.0, "{case}: {counts:?}");
        assert_eq!(counts, [counts[0]; 3], "{case}");
    }
}

fn counts_cover_every_subject() {
    let mut subjects =
        vec![("split/device/4desc/indirect/batch1", "paravane"), ("split/driver/1desc/batch32", "paravane")];
    if cfg!(feature = "peers") {
        subjects.push(("split/device/4desc/indirect/batch1", "virtio-queue"));
        subjects.push(("split/driver/1desc/batch32", "virtio-drivers"));
    }
    for (case, subject) in subjects {
        let script = single_step(case, "script").expect(case);
        let counted = single_step(case, subject).expect(case);
        assert!(counted > script, "{case} {subject}: {counted} with a script of {script}");
    }
}

fn what_cannot_be_counted_is_an_error() {
    assert!(matches!(single_step("packed/device", "paravane"), Err(BenchError::NoCase(_))));
    let error = single_step("split/driver/1desc/batch1", "virtio-queue").expect_err("it has no driver side");
    assert!(error.to_string().contains("did not stop at its mark"), "{error}");
}
