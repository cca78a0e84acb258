//! `paravane run`, end to end: the real program, real images, both accelerators.
use paravane_test_support::{copy_program, patience, skip, wait_until};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn paravane() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paravane"));
    command.stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> Output {
    paravane().arg("run").args(arguments).output().expect("the program starts")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!(
            "no JSON ({error}); status {:?}, stderr: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )
    })
}

fn kvm_usable() -> Result<(), String> {
    File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map(drop)
        .map_err(|error| format!("/dev/kvm: {error}"))
}

fn hex_sha256(path: &Path) -> String {
    let digest = Sha256::digest(std::fs::read(path).expect("the image is read"));
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An image of `size` bytes that are not zero and not regular.
fn image(dir: &Path, name: &str, size: usize) -> PathBuf {
    let path = dir.join(name);
    let mut state = size as u64 | 1;
    let bytes: Vec<u8> = (0..size)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .collect();
    std::fs::write(&path, bytes).expect("the image is written");
    path
}

/// Checks that a request is refused as invalid.
///
/// Status 2, one line on stderr that names the problem, and no output.
fn assert_refused(output: &Output, what: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains(what), "{what:?} is not in: {stderr}");
    assert_eq!(stderr.trim_end().lines().count(), 1, "more than one line: {stderr}");
    assert!(output.stdout.is_empty());
}

fn write_test(accel: &str) {
    let output = run(&["--accel", accel, "--seconds", "0.2", "--json"]);
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(report["verified"], true);
    assert_eq!(report["accel"], accel);
    let disk = &report["disks"][0];
    assert_eq!(disk["path"], "temporary");
    assert_eq!(disk["bytes"], 64 << 20);
    assert_eq!(disk["bytes_verified"], 64 << 20);
    assert!(disk["iops"].as_f64().unwrap() > 0.0);
    assert!(disk["p50_us"].as_f64().unwrap() <= disk["p999_us"].as_f64().unwrap());
    assert!(report["kicks"].as_u64().unwrap() > 0);
    assert!(report["boot_ms"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_default_run_verifies_in_a_thread() {
    write_test("thread");
}

#[test]
fn the_default_run_verifies_under_kvm() {
    match kvm_usable() {
        Ok(()) => write_test("kvm"),
        Err(why) => skip("the_default_run_verifies_under_kvm", &why),
    }
}

#[test]
fn frames_go_to_an_echo_and_come_back() {
    let arguments =
        ["--accel", "thread", "--net", "echo,frames=500,queues=2", "--net", "echo,size=1k", "--json"];
    let output = run(&arguments);
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(report["disks"], Value::Array(Vec::new()));
    let nets = report["nets"].as_array().unwrap();
    assert_eq!((&nets[0]["frames"], &nets[0]["size"]), (&500.into(), &64.into()));
    assert_eq!((&nets[1]["frames"], &nets[1]["size"]), (&10_000.into(), &1024.into()));
    assert_ne!(nets[0]["mac"], nets[1]["mac"]);
    assert_refused(&run(&["--net", "echo,size=21"]), "frames of 21 bytes");
    let link = ["--net", "link=a,frames=500,size=100", "--net", "link=a,frames=500,size=100"];
    let output = run(&[&["--accel", "thread", "--json"], &link[..]].concat());
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    for net in report["nets"].as_array().unwrap() {
        assert_eq!((&net["network"], &net["frames"]), (&"link".into(), &500.into()));
    }
    assert_refused(&run(&["--net", "echo,mac=03:00:00:00:00:01"]), "all zeroes or multicast");
}

fn by_messages(accel: &str) {
    by_messages_over(accel, "mmio-msi", &["--mmio-version", "3"]);
    for transport in ["mmio-msi", "pci"] {
        by_messages_over(accel, transport, &[]);
    }
}

fn by_messages_over(accel: &str, transport: &str, more: &[&str]) {
    let arguments = ["--accel", accel, "--seconds", "0.2", "--transport", transport, "--json"];
    let output = run(&[&arguments, more].concat());
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!((&report["verified"], &report["transport"]), (&true.into(), &transport.into()));
    assert!(report["messages"].as_u64().unwrap() > 0);
    let exits = &report["exits_by_kind"];
    for kind in ["notify", "interrupt_status", "interrupt_acknowledge"] {
        assert_eq!(exits[kind], 0, "{kind}");
    }
    assert_eq!(exits["other"], report["exits"]);
}

#[test]
fn messages_serve_in_a_thread() {
    by_messages("thread");
}

#[test]
fn messages_serve_under_kvm() {
    match kvm_usable() {
        Ok(()) => by_messages("kvm"),
        Err(why) => skip("messages_serve_under_kvm", &why),
    }
}

#[test]
fn mmio_has_version_3_and_pci_has_not() {
    let version = ["--mmio-version", "3"];
    let output = run(&[&["--accel", "thread", "--seconds", "0.2", "--json"], &version[..]].concat());
    let report = json(&output);
    assert_eq!((&report["verified"], &report["mmio_version"]), (&true.into(), &3.into()));
    let refused = run(&[&["--transport", "pci"], &version[..]].concat());
    assert_refused(&refused, "--mmio-version is for virtio-mmio: use --transport mmio or mmio-msi");
}

fn behind_domains_and_logged(accel: &str) {
    let what = if accel == "kvm" { "--dirty-log=verify" } else { "--dirty-log" };
    let output = run(&["--accel", accel, "--seconds", "0.3", "--iommu", what, "--json"]);
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(report["verified"], true);
    assert_eq!(report["iommu"], true);
    let dirty = &report["dirty_log"];
    assert!(dirty["pages_per_s"].as_f64().unwrap() > 0.0, "{dirty}");
    assert!(dirty["device_pages"].as_u64().unwrap() > 0, "{dirty}");
    if accel == "kvm" {
        assert_eq!(dirty["verified"], true);
        assert!(dirty["vcpu_pages"].as_u64().unwrap() > 0, "{dirty}");
    } else {
        assert!(dirty["verified"].is_null() && dirty["vcpu_pages"].is_null(), "{dirty}");
    }
}

#[test]
fn a_disk_behind_a_domain_verifies_and_its_pages_are_logged_in_a_thread() {
    behind_domains_and_logged("thread");
}

#[test]
fn a_disk_behind_a_domain_verifies_and_the_log_misses_nothing_under_kvm() {
    match kvm_usable() {
        Ok(()) => behind_domains_and_logged("kvm"),
        Err(why) => skip("a_disk_behind_a_domain_verifies_and_the_log_misses_nothing_under_kvm", &why),
    }
}

#[test]
fn dirty_pages_are_printed_for_people() {
    let output = run(&["--accel", "thread", "--seconds", "0.1", "--dirty-log", "--iommu", "--quiet"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.lines().any(|line| line.trim_start().starts_with("dirty log") && line.contains(" pages/s "))
    );
    assert!(text.contains("behind IOMMU domains"), "{text}");
}

#[test]
fn a_log_cannot_be_verified_where_the_guest_writes_past_it() {
    assert_refused(&run(&["--accel", "thread", "--dirty-log=verify"]), "--accel kvm has one");
}

fn ext4_image_hashes(accel: &str, test: &str) {
    let dir = tempfile::tempdir().unwrap();
    let files = dir.path().join("files");
    std::fs::create_dir(&files).unwrap();
    for (name, size) in [("a", 1), ("b", 70_000), ("c", 2_000_000)] {
        image(&files, name, size);
    }
    let path = dir.path().join("ext4.img");
    File::create(&path).unwrap().set_len(16 << 20).unwrap();
    let made = Command::new("mkfs.ext4")
        .env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default()))
        .args(["-q", "-F", "-d"])
        .args([&files, &path])
        .status();
    match made {
        Ok(status) => assert!(status.success(), "mkfs.ext4: {status}"),
        Err(error) => return skip(test, format!("mkfs.ext4: {error}")),
    }
    let before = hex_sha256(&path);
    let modified = path.metadata().unwrap().modified().unwrap();
    let output = run(&["--accel", accel, "--json", "--disk", path.to_str().unwrap()]);
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(report["disks"][0]["sha256"], before.as_str());
    assert_eq!(report["disks"][0]["bytes_verified"], 16 << 20);
    assert_eq!(hex_sha256(&path), before, "the image has changed");
    assert_eq!(path.metadata().unwrap().modified().unwrap(), modified, "the image was written to");
    let known = Command::new("sha256sum").arg(&path).output().expect("sha256sum is there");
    assert!(known.stdout.starts_with(before.as_bytes()));
}

#[test]
fn an_ext4_image_hashes_as_sha256sum_says_in_a_thread() {
    ext4_image_hashes("thread", "an_ext4_image_hashes_as_sha256sum_says_in_a_thread");
}

#[test]
fn an_ext4_image_hashes_as_sha256sum_says_under_kvm() {
    let test = "an_ext4_image_hashes_as_sha256sum_says_under_kvm";
    match kvm_usable() {
        Ok(()) => ext4_image_hashes("kvm", test),
        Err(why) => skip(test, &why),
    }
}

#[test]
fn two_disks_one_written_one_only_read() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (image(dir.path(), "a,1.img", 4 << 20), image(dir.path(), "b.img", 2 << 20));
    let before = hex_sha256(&b);
    let (a_arg, b_arg) = (format!("{},rw", a.display()), format!("{},ro", b.display()));
    let options =
        ["--accel", "thread", "--write-test", "--depth", "8", "--block", "8k", "--seconds", "0.1", "--json"];
    let output = run(&[&["--disk", &a_arg, "--disk", &b_arg], &options[..]].concat());
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(report["disks"][0]["job"], "write-test");
    assert_eq!(report["disks"][0]["sha256"], hex_sha256(&a).as_str());
    assert_eq!(report["disks"][1]["job"], "hash");
    assert_eq!(report["disks"][1]["sha256"], before.as_str());
    assert_eq!(hex_sha256(&b), before);
}

#[test]
fn the_text_report_says_what_was_found() {
    let dir = tempfile::tempdir().unwrap();
    let a = image(dir.path(), "a.img", 1 << 20);
    let output = run(&["--accel", "thread", "--disk", a.to_str().unwrap()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(text.starts_with("VERIFIED\n"), "{text}");
    for part in
        [&hex_sha256(&a), "asked for with --accel thread", "IOPS", "p99.9", "kicks", "interrupts", "host CPU"]
    {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}

#[test]
fn a_missing_image_is_refused() {
    assert_refused(&run(&["--disk", "/nonexistent/vm.img"]), "/nonexistent/vm.img");
}

#[test]
fn a_directory_is_refused() {
    assert_refused(&run(&["--disk", "/tmp"]), "directory");
}

#[test]
fn an_odd_size_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "odd.img", 1000);
    assert_refused(&run(&["--disk", path.to_str().unwrap()]), "512");
}

#[test]
fn an_empty_image_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "empty.img", 0);
    assert_refused(&run(&["--disk", path.to_str().unwrap()]), "empty");
}

#[test]
fn an_image_in_use_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "used.img", 1 << 20);
    let before = hex_sha256(&path);
    let holder = File::options().read(true).write(true).open(&path).unwrap();
    rustix::fs::fcntl_lock(&holder, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_refused(&run(&["--write-test", "--disk", path.to_str().unwrap()]), "in use by another process");
    assert_refused(&run(&["--disk", path.to_str().unwrap()]), "in use by another process");
    assert_eq!(hex_sha256(&path), before);
}

/// Another user, without rights to `path` and to /dev/kvm.
///
/// `None` (skipped) where we cannot become one.
fn run_as_nobody(test: &str, arguments: &[&str]) -> Option<Output> {
    if !rustix::process::geteuid().is_root() {
        skip(test, "needs root, to run the program as another user");
        return None;
    }
    let dir = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o755)).tempdir().unwrap();
    let copy = dir.path().join("paravane");
    copy_program(env!("CARGO_BIN_EXE_paravane"), &copy);
    let output =
        Command::new(&copy).stdin(Stdio::null()).arg("run").args(arguments).uid(65534).gid(65534).output();
    Some(output.expect("the program starts as another user"))
}

#[test]
fn an_image_without_permission_is_refused() {
    let dir = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o755)).tempdir().unwrap();
    let path = dir.path().join("secret.img");
    File::options().create_new(true).write(true).mode(0o600).open(&path).unwrap().set_len(1 << 20).unwrap();
    if let Some(output) =
        run_as_nobody("an_image_without_permission_is_refused", &["--disk", path.to_str().unwrap()])
    {
        assert_refused(&output, "Permission denied");
    }
}

#[test]
fn kvm_that_is_not_usable_is_refused() {
    let test = "kvm_that_is_not_usable_is_refused";
    let dir = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o755)).tempdir().unwrap();
    let path = image(dir.path(), "a.img", 1 << 20);
    if kvm_usable().is_err() {
        return assert_refused(&run(&["--accel", "kvm", "--disk", path.to_str().unwrap()]), "/dev/kvm");
    }
    if std::fs::metadata("/dev/kvm").unwrap().permissions().mode() & 0o006 != 0 {
        return skip(test, "/dev/kvm is open to everybody here");
    }
    if let Some(output) = run_as_nobody(test, &["--accel", "kvm", "--disk", path.to_str().unwrap()]) {
        assert_refused(&output, "no permission to open /dev/kvm; add your user to the group");
        let kernel = kernel(dir.path(), &[0xf4]);
        let output = run_as_nobody(test, &["--kernel", kernel.to_str().unwrap()]);
        assert_refused(&output.unwrap(), "a Linux guest needs KVM: no permission to open /dev/kvm");
    }
}

#[test]
fn a_host_without_kvm_is_told_what_a_kernel_needs() {
    let test = "a_host_without_kvm_is_told_what_a_kernel_needs";
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "sh", "-c"]).stdin(Stdio::null());
    let dir = tempfile::tempdir().unwrap();
    let kernel = kernel(dir.path(), &[0xf4]);
    unshare.arg(r#"mount -t tmpfs none /dev || exit 77; exec "$@""#).arg("sh");
    let output = unshare.args([env!("CARGO_BIN_EXE_paravane"), "run", "--kernel"]).arg(&kernel).output();
    match output {
        Ok(output) if output.status.code() != Some(77) && output.status.code() != Some(1) => {
            assert_refused(&output, "a Linux guest needs KVM: there is no /dev/kvm; enable virtualization");
        }
        other => skip(test, format!("cannot hide /dev from a program: {other:?}")),
    }
}

#[test]
fn memory_that_the_host_does_not_give_is_refused_with_a_remedy() {
    assert_refused(&run(&["--memory", "10T"]), "memory of 10485760 MiB: must be from 16 MiB to 3072 MiB");
    let mut limited = Command::new("sh");
    limited.args(["-c", r#"ulimit -v 1000000; exec "$@""#, "sh", env!("CARGO_BIN_EXE_paravane"), "run"]);
    let output = limited.args(["--memory", "3G"]).stdin(Stdio::null()).output().unwrap();
    assert_refused(&output, "or raise this process's limit of 1024000000 bytes (ulimit -v)");
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    match free.map(|free| free.trim().parse::<u32>()) {
        Ok(Ok(0..1536)) => {
            let output = run(&["--memory", "3G", "--hugepages"]);
            assert_refused(&output, "run sysctl vm.nr_hugepages=");
        }
        other => skip(
            "memory_that_the_host_does_not_give_is_refused_with_a_remedy (huge pages)",
            format!("free pages: {other:?}"),
        ),
    }
}

#[test]
fn too_many_cpus_are_refused_by_number() {
    assert_refused(&run(&["--cpus", "65"]), "65 CPUs: must be 1 to 64");
    assert_refused(&run(&["--cpus", "0"]), "0 CPUs: must be 1 to 64");
}

#[test]
fn cpus_that_share_those_of_the_host_are_warned_of() {
    let host = std::thread::available_parallelism().unwrap().get();
    let arguments = ["--accel", "thread", "--net", "echo,frames=50", "--quiet", "--cpus"];
    let run = |cpus: usize| run(&[&arguments[..], &[&cpus.to_string()]].concat());
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said(&run(host.min(64))).contains("which share"));
    if host >= 64 {
        return skip("cpus_that_share_those_of_the_host_are_warned_of", format!("{host} CPUs"));
    }
    let output = run(host + 1);
    let expected = format!("the guest has {} CPUs, which share {host} of the host; lower --cpus", host + 1);
    assert!(output.status.success() && said(&output).contains(&expected), "{}", said(&output));
}

#[test]
fn unknown_options_and_nonsense_are_refused() {
    for arguments in [
        &["--frobnicate"][..],
        &["--disk", "a.img,r0"],
        &["--block", "4x"],
        &["--seconds", "-1"],
        &["--block", "1000"],
        &["--depth", "0"],
        &["--depth", "100000000"],
        &["--memory", "4k"],
        &["--accel", "xen"],
    ] {
        assert_refused(&run(arguments), "");
    }
}

fn guest_failure(accel: &str, fault: &str) -> Value {
    let output =
        run(&["--accel", accel, "--inject", fault, "--hang-timeout", "0.5", "--seconds", "0.1", "--json"]);
    let report = json(&output);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert_eq!(report["verified"], false);
    assert_eq!(report["outcome"], "guest failed");
    assert!(!report["problems"][0].as_str().unwrap().is_empty());
    report
}

#[test]
fn a_failing_guest_is_reported_from_a_thread() {
    for fault in ["crash", "hang", "panic"] {
        guest_failure("thread", fault);
    }
}

#[test]
fn a_failing_guest_is_reported_with_its_registers_under_kvm() {
    if let Err(why) = kvm_usable() {
        return skip("a_failing_guest_is_reported_with_its_registers_under_kvm", &why);
    }
    for fault in ["crash", "hang"] {
        let report = guest_failure("kvm", fault);
        let registers = report["registers"].to_string();
        assert!(registers.contains("rip="), "{fault}: {registers}");
    }
    guest_failure("kvm", "panic");
}

fn stops_on_sigint(accel: &str) {
    // On a busy host the guest's first request takes a while.
    let mut time = Duration::from_secs(1);
    while interrupted(accel, time)["kicks"].as_u64().unwrap() == 0 {
        time *= 2;
        assert!(time < patience(), "the guest does not begin");
    }
}

/// The report of a run that gets SIGINT `time` after it catches that.
fn interrupted(accel: &str, time: Duration) -> Value {
    let mut child = paravane()
        .args(["run", "--accel", accel, "--seconds", "3600", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until("the handler of SIGINT", || catches_sigint(child.id()));
    std::thread::sleep(time);
    let pid = rustix::process::Pid::from_child(&child);
    // Wrappers may send two at once, which count as one.
    for _ in 0..2 {
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    }
    wait_until("the end of the run", || child.try_wait().unwrap().is_some());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let report = json(&output);
    assert_eq!(report["outcome"], "cancelled");
    report
}

/// Whether a process has a handler of SIGINT, by its bit in /proc.
fn catches_sigint(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    let bit = rustix::process::Signal::INT.as_raw() - 1;
    u64::from_str_radix(caught.trim(), 16).unwrap() >> bit & 1 == 1
}

#[test]
fn an_interrupt_ends_the_run_with_the_report_so_far() {
    stops_on_sigint("thread");
    match kvm_usable() {
        Ok(()) => stops_on_sigint("kvm"),
        Err(why) => skip("an_interrupt_ends_the_run_with_the_report_so_far (kvm)", &why),
    }
}

#[test]
fn doctor_answers() {
    let doctor = paravane().args(["doctor", "--json"]).output().unwrap();
    assert!(doctor.status.success());
    let findings: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let named = |name: &str| findings.as_array().unwrap().iter().any(|finding| finding["name"] == name);
    for name in ["kvm", "io_uring", "hugepages", "memlock", "tun"] {
        assert!(named(name), "{name} is not in {findings}");
    }
}

/// A bzImage with this code at its 64-bit entry.
///
/// The rest of its header says that it wants 1 MiB at 1 MiB.
fn kernel(dir: &Path, code: &[u8]) -> PathBuf {
    let mut image = vec![0; 1024 + 0x200];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]);
    put(0x200, &[0xeb, 0x66]);
    put(0x202, b"HdrS\x0f\x02");
    put(0x211, &[1]);
    put(0x214, &0x10_0000_u32.to_le_bytes());
    put(0x22c, &u32::MAX.to_le_bytes());
    put(0x236, &[1]);
    put(0x238, &255_u32.to_le_bytes());
    put(0x25a, &[0x10]);
    put(0x262, &[0x10]);
    image.extend_from_slice(code);
    let path = dir.join("bzImage");
    std::fs::write(&path, image).unwrap();
    path
}

#[test]
fn a_kernel_speaks_and_ends_as_it_likes_under_kvm() {
    if let Err(why) = kvm_usable() {
        return skip("a_kernel_speaks_and_ends_as_it_likes_under_kvm", &why);
    }
    // mov dx, PORT; mov al, VALUE; out dx, al
    let out = |port: u16, value: u8| [&[0x66, 0xba], &port.to_le_bytes()[..], &[0xb0, value, 0xee]].concat();
    let hello = [out(0x3f8, b'h'), out(0x3f8, b'i')].concat();
    let ends = [
        (out(0x600, 0x34), 0, "powered off"),
        (out(0x602, 1), 0, "rebooted"),
        // An undefined instruction without a handler.
        (vec![0x0f, 0x0b], 1, "triple fault"),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (end, status, what) in ends {
        let path = kernel(dir.path(), &[hello.as_slice(), &end, &[0xf4, 0xeb, 0xfd]].concat());
        for transport in ["mmio", "mmio-msi", "pci"] {
            let output = run(&["--kernel", path.to_str().unwrap(), "--transport", transport]);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(status), "{what}, {transport}: {said}");
            assert_eq!(output.stdout, b"hi", "{what}, {transport}: {said}");
            assert!(said.contains(what), "{what}, {transport}: {said}");
        }
    }
}

#[test]
fn a_kernel_has_tap_devices_and_links_under_kvm() {
    let test = "a_kernel_has_tap_devices_and_links_under_kvm";
    if let Err(why) = kvm_usable() {
        return skip(test, &why);
    }
    // A network of its own, where the interface goes with the process.
    let unshare = || {
        let mut command = Command::new("unshare");
        command.arg("--net").stdin(Stdio::null());
        command
    };
    match unshare().args(["test", "-w", "/dev/net/tun"]).status() {
        Ok(status) if status.success() => {}
        other => return skip(test, format!("no network of its own with /dev/net/tun: {other:?}")),
    }
    let dir = tempfile::tempdir().unwrap();
    // Powers off.
    let path = kernel(dir.path(), &[0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xf4]);
    let nets = ["--net", "tap=pv0,queues=2,offloads=off", "--net", "link=a", "--net", "link=a"];
    for transport in ["mmio", "mmio-msi", "pci"] {
        let output = unshare()
            .args([env!("CARGO_BIN_EXE_paravane"), "run", "--transport", transport, "--kernel"])
            .arg(&path)
            .args(nets)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{transport}: {said}");
    }
}

#[test]
fn a_kernel_that_cannot_run_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = kernel(dir.path(), &[0xf4]);
    let path = path.to_str().unwrap();
    let junk = image(dir.path(), "junk", 8192);
    let junk = junk.to_str().unwrap();
    for (magic, what) in [
        (&b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\xb7\0"[..], "an ELF file for arm64"),
        (b"\x1f\x8b\x08", "compressed by gzip (unpack it)"),
    ] {
        let path = dir.path().join("other");
        std::fs::write(&path, magic).unwrap();
        assert_refused(&run(&["--kernel", path.to_str().unwrap()]), what);
    }
    assert_refused(&run(&["--kernel", "/nowhere/vmlinuz"]), "/nowhere/vmlinuz");
    assert_refused(&run(&["--kernel", junk]), "give a bzImage, or");
    assert_refused(&run(&["--kernel", path, "--accel", "thread"]), "needs KVM");
    for option in ["--write-test", "--iommu", "--json"] {
        assert_refused(&run(&["--kernel", path, option]), option);
    }
    for (network, why) in [
        ("echo", "does not use an echo"),
        ("tap=a/b", "invalid interface name"),
        ("tap-fd=0", "not a TAP device"),
        ("tap-fd=999", "descriptor 999"),
        ("link=a", "joins two cards"),
        ("bridge=a", "tap=NAME"),
    ] {
        assert_refused(&run(&["--kernel", path, "--net", network]), why);
    }
    assert_refused(&run(&["--net", "tap=tap0"]), "for a kernel");
    assert_refused(&run(&["--net", "link=a", "--net", "link=a,size=100"]), "different frames");
    let test = "a_kernel_that_cannot_run_is_refused (a TAP device without the right)";
    if let Some(output) = run_as_nobody(test, &["--kernel", path, "--net", "tap=pv-nobody"]) {
        // Where anybody may open /dev/net/tun, it is the interface that cannot be made.
        let mode = std::fs::metadata("/dev/net/tun").map_or(0, |tun| tun.permissions().mode());
        assert_refused(&output, if mode & 0o006 == 0o006 { "CAP_NET_ADMIN" } else { "tun" });
    }
    assert_refused(&run(&["--initrd", junk]), "--kernel");
    if let Err(why) = kvm_usable() {
        return skip("a_kernel_that_cannot_run_is_refused (initrd, command line)", &why);
    }
    assert_refused(&run(&["--kernel", path, "--initrd", "/nowhere/initrd"]), "/nowhere/initrd");
    assert_refused(&run(&["--kernel", path, "--cmdline", &"x".repeat(256)]), "255");
}
