//! Finds the commit that the program is built from, for `paravane_build_info`.
//!
//! ```text
//! PARAVANE_COMMIT --set--> it
//!        '--not set, release build--> git: this directory is tracked --> HEAD
//!                                      '--else--> .cargo_vcs_info.json of a published package --> sha1
//!                                                      '--else--> unknown
//! ```
//! Debug builds do not ask git: each commit would build the program and its tests again.
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=PARAVANE_COMMIT");
    // A variable of the environment reaches the compiler as it is.
    let named = env::var_os("PARAVANE_COMMIT").is_some();
    let release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let directory = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let (false, true, Some(directory)) = (named, release, directory) else { return };
    if let Some(commit) = from_git(&directory).or_else(|| from_package(&directory)) {
        println!("cargo::rustc-env=PARAVANE_COMMIT={commit}");
    }
}

/// Commit of the repository that tracks this directory.
fn from_git(directory: &Path) -> Option<String> {
    // An unpacked package may lie in the directory of another repository.
    git(directory, &["ls-files", "--error-unmatch", "build.rs"])?;
    // HEAD changes when another branch is checked out; its log and the branch with each commit.
    let branch = git(directory, &["rev-parse", "--symbolic-full-name", "HEAD"])?;
    for name in ["HEAD", "logs/HEAD", &branch] {
        let path = directory.join(git(directory, &["rev-parse", "--git-path", name])?);
        // A missing file would run this script at each build.
        if path.exists() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    git(directory, &["rev-parse", "HEAD"]).filter(|commit| is_commit(commit))
}

/// Output of a git command; `None`: it failed, or there is no git.
fn git(directory: &Path, arguments: &[&str]) -> Option<String> {
    let mut git = Command::new("git");
    // Set in hooks, perhaps of another repository.
    git.env_remove("GIT_DIR").env_remove("GIT_WORK_TREE").env_remove("GIT_INDEX_FILE");
    let output = git.arg("-C").arg(directory).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

/// Commit that `cargo package` noted.
fn from_package(directory: &Path) -> Option<String> {
    let note = std::fs::read_to_string(directory.join(".cargo_vcs_info.json")).ok()?;
    let commit = note.split("\"sha1\"").nth(1)?.split('"').nth(1)?;
    is_commit(commit).then(|| commit.to_owned())
}

/// Whether this is the number of a commit: nothing else may become a label.
fn is_commit(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
