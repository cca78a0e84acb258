//! Runs the examples.
#[path = "../examples/kvm_mmio.rs"]
mod kvm_mmio;

#[test]
fn kvm_mmio() {
    match std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => kvm_mmio::main().unwrap(),
        Err(error) => {
            let line = format!("SKIPPED examples::kvm_mmio: /dev/kvm: {error}\n");
            eprint!("{line}");
            if let Some(log) = std::env::var_os("PARAVANE_SKIP_LOG") {
                use std::io::Write;
                let file = std::fs::OpenOptions::new().create(true).append(true).open(log);
                file.and_then(|mut file| file.write_all(line.as_bytes())).unwrap();
            }
        }
    }
}
