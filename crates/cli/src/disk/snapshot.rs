//! `paravane disk snapshot`: creates an overlay, and has the daemon of a disk switch to it.
//!
//! See [`crate::serve::snapshot`] for the conversation.
use super::args::LiveArgs;
use super::next_start;
use crate::failure::Failure;
use crate::serve::control;
use crate::serve::snapshot::messages::{
    Base, Layer, Message, NextStart, OverlayRequest, SnapshotRequest, Taken,
};
use crate::serve::trace::lines::Ask;
use crate::serve::wire::{Parcel, Wire};
use anyhow::{Context, anyhow, bail};
use paravane_command_line::output;
use paravane_device::blk::{ImageId, Overlay, OverlayBase};
use paravane_store::Location;
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Longest wait for the daemon's first answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
/// Longest wait for the daemon, beyond the pause: it syncs the image before and after.
const PATIENCE: Duration = Duration::from_secs(300);

/// The result, for `--json`.
#[derive(Serialize)]
struct Report<'a> {
    device: &'a str,
    pid: u32,
    /// The frozen image.
    base: &'a Layer,
    /// What it is based on, top first.
    backing: &'a [Layer],
    /// Of the guest that runs, then those for other guests.
    overlays: &'a [String],
    /// Words of the command of the next start, without options of the daemon.
    command: Vec<String>,
    #[serde(flatten)]
    taken: &'a Taken,
}

/// Takes a snapshot, with overlays for the guest that runs, and then for others.
pub(super) fn take(device: &str, overlays: &[PathBuf], common: &LiveArgs) -> Result<ExitCode, Failure> {
    let daemon = find(common.control.as_deref(), device).map_err(Failure::request)?;
    let ask = Ask::Snapshot(SnapshotRequest { device: device.to_owned() });
    let named = || daemon.display().to_string();
    let stream = control::request(&daemon, &ask).with_context(named).map_err(Failure::request)?;
    let wire = Wire::new(stream, ANSWER_PATIENCE).context("control socket")?.printable();
    let base = match receive(&wire).with_context(named).map_err(Failure::request)? {
        Message::Base(base) => base,
        _ => return Err(anyhow!("{}: unexpected answer", named()).into()),
    };
    wire.wait_at_most(Some(PATIENCE));
    let (overlays, taken) = create(&wire, &base, overlays, common).map_err(Failure::request)?;
    if common.json {
        let Base { pid, start, .. } = &base;
        let command = overlays.first().map(|own| next_start::command(&base, own)).unwrap_or_default();
        let (base, backing) = (&start.image, &start.backing);
        let report = Report { device, pid: *pid, base, backing, overlays: &overlays, command, taken: &taken };
        let text = serde_json::to_string(&report).context("cannot print the result")?;
        output::print(&(text + "\n"))?;
    } else {
        output::print(&text(device, &base, &overlays, &taken))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The control socket of the daemon that has the device.
fn find(control: Option<&Path>, device: &str) -> Result<PathBuf, anyhow::Error> {
    if let Some(path) = control {
        return Ok(path.to_owned());
    }
    let directory = control::known_directory()?;
    let daemons = control::ask_all(&directory).with_context(|| directory.display().to_string())?;
    let mut found = daemons.into_iter().filter_map(|(path, report)| {
        report.ok()?.devices.iter().any(|served| served.name == device).then_some(path)
    });
    let Some(first) = found.next() else {
        bail!("no daemon in {} has a device {device:?}", directory.display());
    };
    if let Some(other) = found.next() {
        bail!(
            "two daemons have a device {device:?}: choose one with --control {} or {}",
            first.display(),
            other.display()
        );
    }
    Ok(first)
}

/// The next message of the daemon.
fn receive(wire: &Wire<Message>) -> Result<Message, anyhow::Error> {
    match wire.receive()? {
        Some(Parcel { message: Message::Failed(why), .. }) => bail!("{why}"),
        Some(Parcel { message, .. }) => Ok(message),
        None => bail!("the daemon has closed the connection"),
    }
}

/// Creates the overlays and has the daemon use the first one. Removes them if it does not.
fn create(
    wire: &Wire<Message>,
    base: &Base,
    overlays: &[PathBuf],
    common: &LiveArgs,
) -> Result<(Vec<String>, Taken), anyhow::Error> {
    let below = OverlayBase {
        path: header_name(&base.start.image).into(),
        format: base.start.image.format,
        size: base.size,
        id: base.id.map_or(ImageId { file: None, generation: 0 }, Into::into),
    };
    let mut created = Created::default();
    let mut paths = Vec::new();
    for path in overlays {
        let absolute = std::path::absolute(path).with_context(|| path.display().to_string())?;
        let text = absolute.to_str().with_context(|| format!("{}: is not UTF-8", path.display()))?;
        paths.push(text.to_owned());
    }
    let (own, rest) = paths.split_first().context("no overlay")?;
    let overlay = Overlay::create(Path::new(own), &below)?;
    created.0.push(own.into());
    for path in rest {
        Overlay::create_file(Path::new(path), &below)?;
        created.0.push(path.into());
    }
    let limit: Duration = common.pause_limit.into();
    let pause_limit_us = u64::try_from(limit.as_micros()).unwrap_or(u64::MAX);
    let request = OverlayRequest { path: own.clone(), pause_limit_us, base: base.id };
    wire.send(&Message::Overlay(request), &[], &overlay.files()).context("cannot send the overlay")?;
    // The daemon has its own descriptors. From here on only it says what becomes of the overlay.
    drop(overlay);
    let answer = wire.receive();
    match answer {
        Ok(Some(Parcel { message: Message::Taken(taken), .. })) => {
            created.0.clear();
            Ok((paths, taken))
        }
        Ok(Some(Parcel { message: Message::Failed(why), .. })) => bail!("{why}"),
        other => {
            // It may use the overlay.
            created.0.clear();
            let why =
                other.err().map_or("it has closed the connection".to_owned(), |error| error.to_string());
            bail!(
                "the daemon has not answered ({why}); `paravane status` shows whether it uses {own}; \
                 if not, remove that file"
            )
        }
    }
}

/// What an overlay records of an image: a path, or a URL without parameters, which may be secrets.
fn header_name(image: &Layer) -> String {
    let location: Result<Location, _> = image.path.parse();
    location.map_or_else(|_| image.path.clone(), |location| location.to_string())
}

/// Files to remove when this is dropped.
#[derive(Default)]
struct Created(Vec<PathBuf>);

impl Drop for Created {
    fn drop(&mut self) {
        for path in &self.0 {
            // Nothing is in it.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn text(device: &str, base: &Base, overlays: &[String], taken: &Taken) -> String {
    let mut out = String::new();
    let NextStart { image, backing, .. } = &base.start;
    let [own, others @ ..] = overlays else { return out };
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{device}: {} is frozen; writes go to {own}", image.path);
    let noun = if taken.queues == 1 { "queue" } else { "queues" };
    let _ = writeln!(out, "pause: {:.3} ms, {} {noun}", taken.pause_us / 1e3, taken.queues);
    if let Some(why) = &taken.unsynced {
        let _ = writeln!(out, "{}: not on the disk before the next flush: {why}", image.path);
    }
    if !taken.marked {
        let _ = writeln!(
            out,
            "{} is not marked, as its file system has no extended attributes: never serve it for writing again",
            image.path
        );
    }
    let _ = writeln!(out, "\nNext start of {device}, with the options of the daemon as they are:");
    let command = next_start::command(base, own);
    let at = command.iter().position(|word| word == "--image").unwrap_or(command.len());
    let (first, rest) = (next_start::for_shell(&command[..at]), next_start::for_shell(&command[at..]));
    let _ = writeln!(out, "{first} \\\n  {rest}\nor in its file:");
    out += &next_start::keys(base, own, base.serial.as_deref());
    for other in others {
        let _ = writeln!(out, "\nAnother guest, with a name and a socket for it:");
        let _ = writeln!(out, "  {}", next_start::for_shell(&next_start::options(base, other, None)));
        out += &next_start::keys(base, other, None);
    }
    for layer in std::iter::once(image).chain(backing).filter(|layer| layer.lacks_secret) {
        let _ = writeln!(out, "\n{}: its query or password is not shown; add it", layer.path);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::snapshot::messages::StartOption;
    use paravane_device::blk::Format;

    #[test]
    fn the_operator_is_told_what_to_change() {
        let layer = |format, path: &str| Layer { format, path: path.into(), lacks_secret: false };
        let start = NextStart {
            image: layer(Format::Qcow2, "/img/one.qcow2"),
            backing: vec![
                layer(Format::Raw, "nbd+unix:///?socket=/run/n.sock"),
                Layer { lacks_secret: true, ..layer(Format::Raw, "https://host/base.img") },
            ],
            name: "vm0".into(),
            endpoint: StartOption::new("socket", "/run/vm 0.sock"),
            options: vec![StartOption::new("queues", 4), StartOption::flag("no-packed")],
        };
        let base = Base { pid: 7, size: 1 << 20, serial: Some("vm0's".into()), id: None, start };
        let overlays = ["/img/two.qcow2".to_owned(), "/img/fork.qcow2".to_owned()];
        let taken =
            Taken { pause_us: 412.0, queues: 2, marked: false, engine: "threads".into(), unsynced: None };
        let text = text("vm0", &base, &overlays, &taken);
        for line in [
            "vm0: /img/one.qcow2 is frozen; writes go to /img/two.qcow2",
            "pause: 0.412 ms, 2 queues",
            "paravane serve blk --name vm0 --socket '/run/vm 0.sock' \\",
            "  --image /img/two.qcow2 --format qcow2 --backing qcow2:/img/one.qcow2 \
             --backing 'raw:nbd+unix:///?socket=/run/n.sock' --backing raw:https://host/base.img \
             --serial 'vm0'\\''s' --queues 4 --no-packed",
            "  serial = \"vm0's\"",
            "  --image /img/fork.qcow2 --format qcow2 --backing qcow2:/img/one.qcow2 \
             --backing 'raw:nbd+unix:///?socket=/run/n.sock' --backing raw:https://host/base.img \
             --queues 4 --no-packed",
            "  image = \"/img/fork.qcow2\"",
            "  backing = [\"qcow2:/img/one.qcow2\", \"raw:nbd+unix:///?socket=/run/n.sock\", \
             \"raw:https://host/base.img\"]",
            "https://host/base.img: its query or password is not shown; add it",
        ] {
            assert!(text.lines().any(|there| there == line), "{line:?} is not in\n{text}");
        }
        assert!(text.contains("is not marked"));
    }
}
