//! States that a crash can leave, with a budget for a test. `power-loss` explores for longer.
use paravane_fuzz::power_loss::{Options, Report, SURVIVE, explore, names};
use paravane_test_support::skip;

/// States of each kind.
const STATES: usize = 10;

fn run(filter: &str, options: Options) -> Report {
    let options = Options { filter: filter.into(), runs: Some(1), states_of_run: STATES, ..options };
    explore(&options, &mut |_| {}).expect("the host has what it takes")
}

fn has_qemu_img() -> bool {
    std::process::Command::new("qemu-img").arg("--version").output().is_ok()
}

#[test]
fn disks_survive_a_crash() {
    let survives = |name: &String| SURVIVE.iter().any(|start| name.starts_with(start));
    for name in names().iter().filter(|name| survives(name)) {
        if name.contains("qcow2") && !has_qemu_img() {
            skip("disks_survive_a_crash", format!("{name} needs qemu-img"));
            continue;
        }
        let report = run(name, Options::default());
        assert!(report.findings.is_empty(), "{}", report.findings[0]);
        assert!(report.states() > 0);
    }
}

#[test]
fn a_store_that_forgets_flushes_is_noticed() {
    let options = Options { forgets_flushes: true, ..Options::default() };
    let report = run("raw", options);
    let finding = report.findings.first().expect("data that was flushed is lost");
    assert!(finding.what.starts_with("kept data is wrong"), "{finding}");
}
