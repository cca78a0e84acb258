//! The VM's interrupt controller, processor and clock.
use super::cpuid::{self, Place};
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQCHIP_IOAPIC, KVM_MAX_CPUID_ENTRIES, kvm_irq_routing_entry,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};

/// Pins of the I/O APIC.
const IOAPIC_PINS: u32 = 24;
/// Three pages that Intel hosts may need for emulation.
///
/// They lie below the 4 GiB line, away from everything else.
const TSS_PAGES: usize = 0xfffb_d000;
/// One more page for Intel hosts.
const IDENTITY_MAP: u64 = 0xfffb_c000;

/// Explains why KVM refuses to do `what`.
fn failed(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> String {
    move |error| format!("KVM cannot {what}: {error}")
}

/// Makes the interrupt controller of a VM without vCPUs.
///
/// # Errors
/// KVM refuses; in words, for the report.
pub(crate) fn set_up(vm: &VmFd) -> Result<(), String> {
    vm.set_identity_map_address(IDENTITY_MAP).map_err(failed("place its identity map"))?;
    vm.set_tss_address(TSS_PAGES).map_err(failed("place its TSS"))?;
    vm.create_irq_chip().map_err(failed("make an interrupt controller"))
}

/// Makes a vCPU, with all features that KVM supports.
///
/// # Errors
/// As [`set_up`].
pub(crate) fn new_vcpu(kvm: &Kvm, vm: &VmFd, place: Place) -> Result<VcpuFd, String> {
    let vcpu = vm.create_vcpu(place.number.into()).map_err(failed("make a vCPU"))?;
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(failed("list CPU features"))?;
    let cpuid = cpuid::of_vcpu(&supported, place, vm.check_extension(Cap::TscDeadlineTimer))
        .ok_or("KVM lists more CPU features than it takes")?;
    vcpu.set_cpuid2(&cpuid).map_err(failed("set CPU features"))?;
    Ok(vcpu)
}

/// Routes each GSI to the I/O APIC's pin of the same number, and to nothing else.
///
/// KVM's default routing also serves the old interrupt controllers, which would deliver other
/// vectors.
pub(crate) fn wired_routes() -> Vec<kvm_irq_routing_entry> {
    let to_pin = |pin| {
        let mut entry =
            kvm_irq_routing_entry { gsi: pin, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
        entry.u.irqchip.irqchip = KVM_IRQCHIP_IOAPIC;
        entry.u.irqchip.pin = pin;
        entry
    };
    (0..IOAPIC_PINS).map(to_pin).collect()
}

/// Frequency of the guest's time-stamp counter in kHz.
pub(crate) fn clock_khz(vcpu: &VcpuFd) -> u64 {
    match vcpu.get_tsc_khz() {
        Ok(khz) if khz > 0 => u64::from(khz),
        _ => measured_tsc_khz(),
    }
}

/// Measures the host's time-stamp counter in kHz, where KVM does not know it.
fn measured_tsc_khz() -> u64 {
    let tsc = || {
        // SAFETY: every x86-64 processor has this instruction, and user code may execute it on
        // Linux.
        unsafe { core::arch::x86_64::_rdtsc() }
    };
    let (clock, ticks) = (std::time::Instant::now(), tsc());
    std::thread::sleep(std::time::Duration::from_millis(20));
    let ticks = tsc().wrapping_sub(ticks);
    let micros = u64::try_from(clock.elapsed().as_micros()).unwrap_or(u64::MAX).max(1);
    (ticks.saturating_mul(1000) / micros).max(1)
}
