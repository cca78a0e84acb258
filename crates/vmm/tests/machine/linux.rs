//! Machines for Linux guests, with kernels of a few instructions.
//!
//! How they end, and what outlives a reset.
use crate::bench_top;
use paravane_device::rng::Rng;
use paravane_vmm::{
    LinuxConfig, LinuxEnd, LinuxReport, NamedDevice, OnReboot, Power, Progress, RunConfig, run_linux,
};
use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tempfile::NamedTempFile;

/// Where the kernel lies, and what it uses of RAM behind itself.
const START: u64 = 0x10_0000;
const RAM: u64 = 0x20_0000;

/// `out dx, al`, with these.
fn out(port: u16, value: u8) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0x66, 0xba, low, high, 0xb0, value, 0xee]
}

/// Prints the number of starts that RAM remembers, and goes on with `last`.
///
/// As a digit on the serial port.
fn kernel(last: &[u8]) -> Vec<u8> {
    let mut code = vec![0x48, 0xc7, 0xc3];
    code.extend((RAM as u32).to_le_bytes());
    // mov al, [rbx]; add al, '0'; mov dx, 0x3f8; out dx, al; inc byte [rbx]
    code.extend([0x8a, 0x03, 0x04, b'0', 0x66, 0xba, 0xf8, 0x03, 0xee, 0xfe, 0x03]);
    code.extend(last);
    // hlt; jmp back to it
    code.extend([0xf4, 0xeb, 0xfd]);
    elf(&code)
}

/// An x86-64 vmlinux with one segment.
fn elf(code: &[u8]) -> Vec<u8> {
    const HEADERS: usize = 64 + 56;
    let mut image = vec![0; HEADERS];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01");
    // Executable, x86-64, entry; one program header of 56 bytes at 64.
    put(16, &[2, 0, 62, 0]);
    put(24, &START.to_le_bytes());
    put(32, &64_u64.to_le_bytes());
    put(54, &[56, 0, 1, 0]);
    // To be loaded: from, to, sizes.
    put(64, &[1]);
    put(72, &(HEADERS as u64).to_le_bytes());
    put(80, &START.to_le_bytes());
    put(88, &START.to_le_bytes());
    put(96, &(code.len() as u64).to_le_bytes());
    put(104, &(code.len() as u64).to_le_bytes());
    image.extend(code);
    image
}

/// Keeps what the guest says, and cancels the run when that is enough.
#[derive(Clone)]
struct Screen {
    said: Arc<Mutex<Vec<u8>>>,
    enough: usize,
    progress: Arc<Progress>,
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut said = self.said.lock().unwrap();
        said.extend(bytes);
        if said.len() >= self.enough {
            self.progress.cancel.store(true, Ordering::Relaxed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs a kernel that ends with `last`, up to its end or `enough` digits.
fn go(last: &[u8], on_reboot: OnReboot, enough: usize) -> (LinuxReport, Vec<u8>) {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&kernel(last)).unwrap();
    let config = LinuxConfig {
        kernel: file.path().to_owned(),
        initrd: None,
        cmdline: String::new(),
        on_reboot,
        machine: RunConfig { memory: 16 << 20, ..RunConfig::default() },
    };
    let screen = Screen { said: Arc::default(), enough, progress: Arc::default() };
    let report = run_linux(
        &config,
        vec![NamedDevice::new("rng", Box::new(Rng::new()))],
        Box::new(screen.clone()),
        &screen.progress,
        Instant::now(),
    )
    .unwrap();
    let said = screen.said.lock().unwrap().clone();
    (report, said)
}

const POWER_OFF: (u16, u8) = (0x600, 5 << 2 | 1 << 5);
/// ACPI's register, and the keyboard controller's.
const RESETS: [(u16, u8); 2] = [(0x602, 1), (0x64, 0xfe)];
/// An undefined instruction, with no handlers at all.
const TRIPLE_FAULT: [u8; 2] = [0x0f, 0x0b];

#[test]
fn a_guest_that_powers_off_ends_the_run() {
    if !bench_top::kvm("linux::a_guest_that_powers_off_ends_the_run") {
        return;
    }
    for on_reboot in [OnReboot::Exit, OnReboot::Restart] {
        let (report, said) = go(&out(POWER_OFF.0, POWER_OFF.1), on_reboot, usize::MAX);
        assert_eq!((report.end, report.restarts), (LinuxEnd::Power(Power::Off), 0));
        assert_eq!(said, b"0");
    }
}

#[test]
fn a_reset_ends_the_run_unless_it_is_to_go_on() {
    if !bench_top::kvm("linux::a_reset_ends_the_run_unless_it_is_to_go_on") {
        return;
    }
    for (port, value) in RESETS {
        let (report, said) = go(&out(port, value), OnReboot::Exit, usize::MAX);
        assert_eq!((report.end, report.restarts), (LinuxEnd::Power(Power::Reset), 0), "{port:#x}");
        assert_eq!(said, b"0");
    }
    let (report, said) = go(&TRIPLE_FAULT, OnReboot::Exit, usize::MAX);
    let LinuxEnd::Failed(failure) = report.end else { panic!("{:?}", report.end) };
    assert_eq!(failure.reason, "triple fault");
    assert!(!failure.registers.is_empty());
    assert_eq!(said, b"0");
}

#[test]
fn a_restarted_guest_finds_new_memory() {
    if !bench_top::kvm("linux::a_restarted_guest_finds_new_memory") {
        return;
    }
    for last in [out(RESETS[0].0, RESETS[0].1), out(RESETS[1].0, RESETS[1].1), TRIPLE_FAULT.to_vec()] {
        // It never ends by itself, and is stopped at its fourth life's word.
        let (report, said) = go(&last, OnReboot::Restart, 4);
        assert_eq!(said, b"0000", "{last:x?}");
        assert_eq!(report.restarts, 3);
        // If KVM counts: each life printed.
        assert!(report.kvm_exits.is_none_or(|exits| exits >= 4), "{:?}", report.kvm_exits);
        assert_eq!(report.boot_s, None, "it has no driver");
    }
}
