//! `paravane reload`: has a daemon read its file again, and prints what has become of each device.
//!
//! See [`crate::serve::reload`] for the conversation.
use crate::failure::Failure;
use crate::serve::args::ReloadArgs;
use crate::serve::control;
use crate::serve::reader;
use crate::serve::reload::messages::{DAEMON, DeviceOutcome, Message, Outcome, ReloadRequest, Wish};
use crate::serve::trace::lines::Ask;
use crate::serve::wire::{Parcel, Wire};
use anyhow::{Context, bail};
use paravane_command_line::output;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Longest wait for a message. The daemon sends one every second.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest time to plan a reload: the daemon reads its file.
const PLAN_S: u64 = 30;

pub(crate) fn main(args: &ReloadArgs) -> Result<ExitCode, Failure> {
    let daemon = control::only_daemon(args.control.as_deref(), ": name its socket with --control PATH")
        .map_err(Failure::request)?;
    let restart = args.restart.iter().cloned().collect();
    let wish = Wish { restart, plan: None, patience_s: args.timeout };
    let outcomes = ask(&daemon, wish).map_err(Failure::request)?;
    match args.json {
        true => {
            let text = serde_json::to_string(&outcomes).context("cannot print the outcomes")?;
            output::print(&(text + "\n"))?;
        }
        false => output::print(&text(&outcomes, false))?,
    }
    Ok(status(&outcomes))
}

/// Prints what a reload of `file` would do to the daemon behind `control`.
pub(crate) fn against(control: &Path, file: &Path) -> Result<ExitCode, Failure> {
    let file = reader::real(file);
    let file = file.to_str().context("the path of the file is not UTF-8").map_err(Failure::request)?;
    let wish = Wish { plan: Some(file.to_owned()), patience_s: PLAN_S, ..Wish::default() };
    let outcomes = ask(control, wish).map_err(Failure::request)?;
    output::print(&text(&outcomes, true))?;
    Ok(status(&outcomes))
}

/// The exit status for these outcomes.
fn status(outcomes: &[DeviceOutcome]) -> ExitCode {
    let has = |wanted| outcomes.iter().any(|device| device.outcome == wanted);
    match () {
        () if has(Outcome::Failed) || has(Outcome::Waiting) => ExitCode::from(1),
        () if has(Outcome::Refused) => ExitCode::from(3),
        () => ExitCode::SUCCESS,
    }
}

/// Asks the daemon, and waits for it.
fn ask(daemon: &Path, wish: Wish) -> Result<Vec<DeviceOutcome>, anyhow::Error> {
    let ask = || {
        let stream = control::request(daemon, &Ask::Reload(ReloadRequest {}))?;
        let wire = Wire::new(stream, PATIENCE)?.printable();
        let mut wish = Some(wish);
        loop {
            match wire.receive()?.map(|Parcel { message, .. }| message) {
                Some(Message::Working(what)) => eprintln!("paravane: waiting for {what}"),
                Some(Message::Done(outcomes)) => return Ok(outcomes),
                Some(Message::Failed(why)) => bail!("{why}"),
                Some(Message::Ready) if wish.is_some() => {
                    wish.take().map_or(Ok(()), |wish| wire.say(&Message::Begin(wish)))?;
                }
                Some(Message::Ready | Message::Begin(_)) => bail!("the daemon sends messages out of order"),
                None => bail!("the daemon has closed the connection"),
            }
        }
    };
    ask().with_context(|| daemon.display().to_string())
}

/// A line for each device. `is_plan`: of what would be done.
fn text(outcomes: &[DeviceOutcome], is_plan: bool) -> String {
    let mut out = String::new();
    for DeviceOutcome { name, outcome, keys, why } in outcomes {
        let [done, planned] = match outcome {
            Outcome::Unchanged => ["unchanged"; 2],
            Outcome::Changed => ["changed in place", "changes in place"],
            Outcome::Exchanged => [
                "restarted, its session goes on",
                "restarts; its session goes on if its guest finds the same device",
            ],
            Outcome::Restarted => ["restarted", "restarts"],
            Outcome::Added => ["added", "is added"],
            Outcome::Removed => ["removed", "is removed"],
            Outcome::Refused => ["refused", "is refused"],
            Outcome::Failed => ["failed"; 2],
            Outcome::Waiting => ["not done yet"; 2],
        };
        let what = if is_plan { planned } else { done };
        // Writing to a String cannot fail.
        let _ = write!(out, "{name}: {what}");
        if !keys.is_empty() {
            let _ = write!(out, ": {}", keys.join(", "));
        }
        match (outcome, why) {
            (Outcome::Waiting, Some(why)) => drop(write!(out, ": waits for {why}")),
            (_, Some(why)) if name == DAEMON => drop(write!(out, "; {why}")),
            (_, Some(why)) => drop(write!(out, ": {why}")),
            (_, None) => {}
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_has_a_line_and_the_worst_decides_the_status() {
        let device = |name: &str, outcome, keys: &[&str], why: Option<&str>| DeviceOutcome {
            name: name.into(),
            outcome,
            keys: keys.iter().map(|key| (*key).to_owned()).collect(),
            why: why.map(str::to_owned),
        };
        let mut all = vec![
            device("a", Outcome::Unchanged, &[], None),
            device("b", Outcome::Changed, &["slow", "on-full"], None),
        ];
        assert_eq!(format!("{:?}", status(&all)), format!("{:?}", ExitCode::SUCCESS));
        all.push(device("c", Outcome::Refused, &["image"], Some("its guest would find another device")));
        assert_eq!(format!("{:?}", status(&all)), format!("{:?}", ExitCode::from(3)));
        all.push(device("d", Outcome::Waiting, &[], Some("the host to open its files")));
        assert_eq!(format!("{:?}", status(&all)), format!("{:?}", ExitCode::from(1)));
        all.push(device(DAEMON, Outcome::Refused, &["cache"], Some("applies later")));
        let expected = "a: unchanged\nb: changed in place: slow, on-full\n\
                        c: refused: image: its guest would find another device\n\
                        d: not done yet: waits for the host to open its files\n\
                        [daemon]: refused: cache; applies later\n";
        assert_eq!(text(&all, false), expected);
        assert!(text(&all, true).contains("b: changes in place: slow, on-full\n"));
    }
}
