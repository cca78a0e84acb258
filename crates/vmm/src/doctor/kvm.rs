//! Checks of KVM.
use super::cost::{self, Costs};
use super::finding::Finding;
use super::limit::{self, ENOUGH, Limit};
use crate::machine::kvm::{self as machine, NoKvm};
use kvm_bindings::{
    KVM_CAP_IOEVENTFD, KVM_CAP_IOEVENTFD_ANY_LENGTH, KVM_CAP_IRQ_ROUTING, KVM_CAP_IRQFD,
    KVM_CAP_IRQFD_RESAMPLE, KVM_CAP_SIGNAL_MSI,
};
use kvm_ioctls::Kvm;
use std::ffi::c_ulong;

/// Cost ratio of ring 0 to ring 3 from which ring 0 counts as emulated.
const EMULATED: f64 = 20.0;
/// Kernels since 2016 have these capabilities.
const NEWER_KERNEL: &str = "use a newer host kernel";

pub(super) fn examine() -> Vec<Finding> {
    let kvm = match machine::open() {
        Ok(kvm) => kvm,
        Err(why) => return vec![absent(&why)],
    };
    let mut findings = vec![Finding::ok("kvm", format!("/dev/kvm, version {}", kvm.get_api_version()))];
    findings.extend(capabilities(&kvm));
    findings.push(ioeventfds(limit::probe(&kvm)));
    match cost::measure() {
        Ok(costs) => findings.extend(judge(&costs)),
        Err(why) => findings.push(Finding::missing(
            "exit cost",
            format!("the test guest does not run: {why}"),
            "look at the kernel log (dmesg); until then, use --accel thread",
        )),
    }
    findings
}

fn absent(why: &NoKvm) -> Finding {
    Finding::missing("kvm", &why.reason, format!("{}; until then, runs use a thread", why.remedy))
}

/// The value of a capability; 0 if KVM lacks it.
fn value(kvm: &Kvm, capability: u32) -> i32 {
    kvm.check_extension_raw(c_ulong::from(capability))
}

fn capabilities(kvm: &Kvm) -> [Finding; 4] {
    let has = |capability| value(kvm, capability) > 0;
    let ioeventfd = match (has(KVM_CAP_IOEVENTFD), has(KVM_CAP_IOEVENTFD_ANY_LENGTH)) {
        (true, true) => Finding::ok("ioeventfd", "available, any access size"),
        (true, false) => Finding::ok("ioeventfd", "available, 1 to 8 bytes"),
        _ => Finding::warn("ioeventfd", "not available: every kick exits to this process", NEWER_KERNEL),
    };
    let irqfd = match (has(KVM_CAP_IRQFD), has(KVM_CAP_IRQFD_RESAMPLE)) {
        (true, true) => Finding::ok("irqfd", "available, with resampling"),
        (true, false) => Finding::ok("irqfd", "available"),
        _ => Finding::missing("irqfd", "not available", NEWER_KERNEL),
    };
    let msi = if has(KVM_CAP_SIGNAL_MSI) {
        Finding::ok("msi", "KVM_SIGNAL_MSI")
    } else {
        Finding::warn("msi", "no KVM_SIGNAL_MSI: each message needs a route", NEWER_KERNEL)
    };
    let routing = match value(kvm, KVM_CAP_IRQ_ROUTING) {
        routes @ 1.. => Finding::ok("irq routing", format!("available, {routes} routes")),
        _ => Finding::missing("irq routing", "not available", NEWER_KERNEL),
    };
    [ioeventfd, irqfd, msi, routing]
}

/// Checks the number of ioeventfds, for runs with many queues.
fn ioeventfds(limit: Result<Limit, String>) -> Finding {
    let name = "ioeventfd limit";
    let remedy = "none needed: kicks of further queues exit to this process";
    match limit {
        Ok(Limit { registered, refused: Some(why), .. }) => {
            Finding::warn(name, format!("{registered} per VM: {why}"), remedy)
        }
        Ok(Limit { registered, refused: None, each }) => {
            let more = if registered < ENOUGH { " or more (time limit)" } else { " or more" };
            Finding::ok(name, format!("{registered}{more} per VM, {:.0} µs each", each.as_secs_f64() * 1e6))
        }
        Err(why) => Finding::warn(name, format!("unknown: {why}"), remedy),
    }
}

fn judge(costs: &Costs) -> Vec<Finding> {
    let mut findings = vec![Finding::ok(
        "exit cost",
        format!("{:.1} µs for an MMIO write that exits to this process, from ring 3", costs.exit_ns / 1e3),
    )];
    match costs.kick_ns {
        Ok(kick) => findings.push(Finding::ok(
            "kick cost",
            format!(
                "{:.1} µs for an MMIO write to an ioeventfd, {}",
                kick / 1e3,
                beside(costs.exit_ns / kick.max(1.0))
            ),
        )),
        Err(ref why) => findings.push(Finding::warn(
            "kick cost",
            format!("not measured: {why}"),
            "none needed: kicks exit to this process",
        )),
    }
    let (ring0, ring3) = (costs.ring0_ns, costs.ring3_ns);
    findings.push(if ring0 > ring3 * EMULATED {
        Finding::warn(
            "ring 0",
            format!("emulated: {ring0:.0} ns per instruction, {ring3:.2} ns in ring 3"),
            "none needed for the built-in guest, which runs in ring 3; for Linux guests, use a host with hardware \
             virtualization",
        )
    } else {
        Finding::ok("ring 0", format!("native: {ring0:.2} ns per instruction, {ring3:.2} ns in ring 3"))
    });
    findings
}

/// Compares a kick with an exit that costs `ratio` times as much.
fn beside(ratio: f64) -> String {
    match ratio {
        1.05.. => format!("{ratio:.1} times cheaper"),
        0.95.. => "not cheaper".to_owned(),
        _ => format!("{:.1} times more expensive", 1.0 / ratio.max(1e-3)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Level;
    use std::time::Duration;

    #[test]
    fn ring_0_is_judged_by_the_ratio() {
        let costs = |ring0_ns| Costs { exit_ns: 2000.0, kick_ns: Ok(500.0), ring0_ns, ring3_ns: 0.4 };
        assert_eq!(judge(&costs(0.5))[2].level, Level::Ok);
        let emulated = judge(&costs(1400.0));
        assert_eq!(emulated[2].level, Level::Warn);
        assert!(emulated[2].found.starts_with("emulated"));
        assert!(emulated[1].found.contains("4.0 times cheaper"));
    }

    #[test]
    fn a_kick_that_is_dearer_is_not_called_cheaper() {
        assert_eq!(beside(4.0), "4.0 times cheaper");
        assert_eq!(beside(1.01), "not cheaper");
        assert_eq!(beside(0.5), "2.0 times more expensive");
    }

    #[test]
    fn few_ioeventfds_are_a_warning_and_many_are_none() {
        let limit = |registered, refused| Limit { registered, refused, each: Duration::from_micros(7) };
        let few = ioeventfds(Ok(limit(6, Some("no space".into()))));
        assert_eq!((few.level, few.found.as_str()), (Level::Warn, "6 per VM: no space"));
        let many = ioeventfds(Ok(limit(ENOUGH, None)));
        assert_eq!((many.level, many.found.as_str()), (Level::Ok, "1024 or more per VM, 7 µs each"));
        assert!(ioeventfds(Ok(limit(300, None))).found.starts_with("300 or more (time limit)"));
        assert_eq!(ioeventfds(Err("no".into())).level, Level::Warn);
    }

    #[test]
    fn an_absence_has_its_remedy() {
        let why = NoKvm { reason: "there is no /dev/kvm".into(), remedy: "load it" };
        let finding = absent(&why);
        assert_eq!((finding.level, finding.found.as_str()), (Level::Missing, "there is no /dev/kvm"));
        assert_eq!(finding.remedy, "load it; until then, runs use a thread");
    }
}
