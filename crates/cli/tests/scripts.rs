//! README's commands, and the packages that `scripts/test` installs.
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

fn workspace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Standard output of a script that succeeds.
fn output(script: &str, arguments: &[&str]) -> String {
    let output = Command::new(workspace().join(script)).args(arguments).output().expect("the script starts");
    assert!(
        output.status.success(),
        "{script} {arguments:?}: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("text")
}

/// Packages that `scripts/test` installs for a step.
fn packages(step: &str) -> Vec<String> {
    output("scripts/test", &["--packages", step])
        .lines()
        .map(|line| line.split_once(':').expect("PROGRAM:PACKAGE").1.to_string())
        .collect()
}

#[test]
fn readme_opens_with_the_two_commands_of_scripts_fresh() {
    let readme = fs::read_to_string(workspace().join("README.md")).expect("README.md");
    let block = readme.lines().skip_while(|line| !line.starts_with("    "));
    let commands: Vec<_> = block
        .take_while(|line| line.starts_with("    "))
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .collect();
    assert_eq!(output("scripts/fresh", &["commands"]).lines().collect::<Vec<_>>(), commands);
    assert_eq!(commands.len(), 2);
    for command in commands {
        let program = workspace().join(command.split(' ').next().expect("a program"));
        let mode = fs::metadata(&program).expect("a script of the project").permissions().mode();
        assert!(mode & 0o111 == 0o111, "{command} is not executable");
    }
}

/// `scripts/cargo-tests` runs these once more; a doc test has no program to select.
#[test]
fn failed_tests_are_found_in_the_output_of_cargo() {
    let log = std::env::temp_dir().join(format!("cargo-tests-{}", std::process::id()));
    let output_of_cargo = "\
     Running unittests src/lib.rs (target/debug/deps/one-1)
test a::passes ... ok
test a::fails ... FAILED
     Running tests/serve/main.rs (target/debug/deps/serve-1)
test kill::fails ... FAILED
test kill::panics - should panic ... FAILED
   Doc-tests one
test src/lib.rs - (line 3) ... FAILED
";
    fs::write(&log, output_of_cargo).expect("a file");
    let found = output("scripts/cargo-tests", &["--failed", log.to_str().expect("a path")]);
    let expected =
        "--lib --bins --examples\ta::fails\n--test serve\tkill::fails\n--test serve\tkill::panics\n";
    assert_eq!(found, expected);
    fs::remove_file(log).expect("the file");
}

/// A minimal system lacks these, and Debian's cloud kernel is compressed by LZ4.
#[test]
fn every_program_that_unpacks_or_packs_a_kernel_is_installed() {
    for step in ["guest", "clients"] {
        let packages = packages(step);
        for package in
            ["lz4", "xz-utils", "zstd", "gzip", "kmod", "cpio", "busybox-static", "qemu-system-x86"]
        {
            assert!(packages.iter().any(|listed| listed == package), "{step} lacks {package}: {packages:?}");
        }
    }
}

#[test]
fn every_step_that_builds_lists_a_linker() {
    for step in ["clippy", "docs", "linux", "module", "test", "loom", "miri", "run", "guest", "package"] {
        let packages = packages(step);
        for package in ["gcc", "libc6-dev"] {
            assert!(packages.iter().any(|listed| listed == package), "{step} lacks {package}: {packages:?}");
        }
    }
    assert_eq!(output("scripts/run", &["--packages"]), "cc:gcc\n/usr/include/stdlib.h:libc6-dev\n");
}

#[test]
fn every_client_is_installed() {
    let packages = packages("clients");
    for package in ["user-mode-linux", "dpdk-dev", "iproute2"] {
        assert!(packages.iter().any(|listed| listed == package), "{package} is not in {packages:?}");
    }
}

#[test]
fn every_check_of_reports_and_metrics_is_installed() {
    let packages = packages("test");
    for package in ["chromium", "fonts-dejavu-core", "python3-jsonschema"] {
        assert!(packages.iter().any(|listed| listed == package), "{package} is not in {packages:?}");
    }
    // Downloaded, not installed: Debian's package starts a service.
    assert!(!packages.iter().any(|listed| listed == "prometheus"), "{packages:?}");
    assert!(output("scripts/vhost-clients", &["--packages", "uml-net@7"]).contains("patchelf:patchelf"));
}

/// A command that fails within the words of an `echo` does not end a script, so a check could pass and show nothing.
#[test]
fn checks_compute_what_they_report_before_they_report_it() {
    let mut checks = 0;
    let folder = |name| fs::read_dir(workspace().join(name)).expect("a folder");
    let entries = folder("scripts").chain(folder("scripts/linux-guest.d"));
    let files = entries.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_file());
    for path in files {
        let text = fs::read_to_string(&path).expect("text").replace("\\\n", " ");
        for line in text.lines().filter(|line| line.contains("echo \"ok ") || line.contains(": passed")) {
            checks += 1;
            let computed = line.split_once("echo \"").map_or("", |(_, words)| words).replace("$((", "");
            assert!(!computed.contains("$("), "{}: assign before the echo: {line}", path.display());
        }
    }
    assert!(checks > 30, "{checks} checks");
}

/// Runs a command with functions of `scripts/vhost-clients`. Returns whether it succeeds, and what it prints.
fn of_vhost_clients(functions: &str, command: &str) -> (bool, String) {
    let sources = ["vhost-clients", "network-clients", "killed-clients"];
    let names: Vec<_> =
        sources.iter().map(|name| format!("{}/scripts/{name}", workspace().display())).collect();
    let pick = format!("source <(sed -n '/^\\({functions}\\)()/,/^}}/p' {})", names.join(" "));
    let script = format!("set -euo pipefail; kills=0; {pick}; {command}; echo went on");
    let folder = tempfile::tempdir().expect("a folder");
    let output =
        Command::new("bash").args(["-c", &script]).env("TMPDIR", folder.path()).output().expect("bash");
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_check_of_clients_fails_without_a_number() {
    let run = |command: &str| {
        of_vhost_clients("said\\|counted\\|count\\|frames\\|some_frames\\|same_frames", command)
    };
    for command in [
        "counted frames ''",
        "counted frames 0",
        "counted frames 5 some",
        "bytes=$(echo nothing | count - transmitted_bytes)",
        "words=$(said /dev/null 'INORDER [01]')",
        "folder=$(mktemp -d); : >$folder/empty; words=$(some_frames $folder/empty $folder/empty)",
        // None of the frames arrived.
        "folder=$(mktemp -d); frames $folder/sent 1 9 60; head -c 24 $folder/sent >$folder/came; \
         words=$(some_frames $folder/sent $folder/came)",
        "folder=$(mktemp -d); frames $folder/sent 1 9 60; head -c 24 $folder/sent >$folder/came; \
         words=$(same_frames $folder/sent $folder/came)",
    ] {
        assert_eq!(run(command), (false, String::new()), "{command}");
    }
    for (command, words) in [
        ("counted frames 5 7", ""),
        ("printf '%s\\n' '{\"a_bytes\": 12},' '\"a_bytes\": 7' | count - a_bytes", "12\n"),
        ("said <(echo 'CLIENT INORDER 1.') 'INORDER [01]'", "INORDER 1\n"),
        (
            "folder=$(mktemp -d); frames $folder/sent 1 9 60; some_frames $folder/sent $folder/sent; echo",
            "9 of 9 frames\n",
        ),
    ] {
        assert_eq!(run(command), (true, format!("{words}went on\n")), "{command}");
    }
}
