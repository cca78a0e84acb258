//! Runs the examples.
#[path = "../examples/kvm_mmio.rs"]
mod kvm_mmio;

#[test]
fn kvm_mmio() {
    match std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => kvm_mmio::main().unwrap(),
        Err(error) => paravane_test_support::skip("examples::kvm_mmio", format_args!("/dev/kvm: {error}")),
    }
}
