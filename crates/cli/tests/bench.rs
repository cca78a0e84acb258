//! `paravane bench`: starts the program beside it.
#![cfg(feature = "bench")]
use paravane_test_support::copy_program;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// `paravane` in a folder without `paravane-bench`.
fn alone() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = folder.path().join("paravane");
    let built = env!("CARGO_BIN_EXE_paravane");
    if fs::hard_link(built, &program).is_err() {
        copy_program(built, &program);
    }
    (folder, program)
}

/// A program that says who it is, prints its arguments, and ends with 3.
fn other_program(folder: &Path, who: &str) {
    let text = format!("#!/bin/sh\nprintf '%s\\n' {who} \"$@\"\nexit 3\n");
    let written = folder.join("script");
    fs::write(&written, text).unwrap();
    fs::set_permissions(&written, fs::Permissions::from_mode(0o755)).unwrap();
    // Another process may have inherited the descriptor that the script was written by.
    copy_program(&written, folder.join("paravane-bench"));
}

fn start(program: &Path, path: &Path, arguments: &[&str]) -> Output {
    let path = format!("{}:{}", path.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(program);
    command.args(arguments).env("PATH", path).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn the_program_beside_it_gets_all_arguments() {
    let (folder, program) = alone();
    other_program(folder.path(), "beside");
    let elsewhere = tempfile::tempdir().unwrap();
    other_program(elsewhere.path(), "path");
    for (arguments, passed) in [
        (&["bench", "--help"][..], "beside\n--help\n"),
        (&["-vv", "bench", "blk", "--filter", "a b"], "beside\n-vv\nblk\n--filter\na b\n"),
        (&["bench"], "beside\n"),
    ] {
        let output = start(&program, elsewhere.path(), arguments);
        assert_eq!(String::from_utf8_lossy(&output.stdout), passed);
        assert_eq!(output.status.code(), Some(3));
    }
}

#[test]
fn one_in_path_is_found() {
    let (folder, program) = alone();
    let elsewhere = tempfile::tempdir().unwrap();
    other_program(elsewhere.path(), "path");
    let output = start(&program, elsewhere.path(), &["bench", "list"]);
    assert_eq!(
        (String::from_utf8_lossy(&output.stdout).as_ref(), output.status.code()),
        ("path\nlist\n", Some(3))
    );
    drop(folder);
}

#[test]
fn a_missing_program_is_named_with_its_package() {
    let (folder, program) = alone();
    let output = Command::new(&program).args(["bench", "list"]).env("PATH", folder.path()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("install the package paravane-bench"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}
