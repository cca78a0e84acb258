//! Virtio features and vhost-user messages.
//!
//! The offered bits are asked of real devices, over their sockets.
use super::markdown::{self, Chapter};
use super::names::{self, Bit, Message};
use crate::args::{Cli, Command};
use crate::kinds::kind::Features;
use crate::kinds::opening::{Earlier, LinkEnds, OpenContext};
use crate::kinds::{KINDS, Kind};
use crate::serve::open;
use crate::serve::spec::DeviceSpec;
use anyhow::{Context, bail, ensure};
use clap::Parser;
use paravane_export::{Endpoint, Export};
use paravane_spec::vhost_user::{Header, flags, request};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Features that a device offers.
#[derive(Default)]
struct Offered {
    features: u64,
    /// Offered only after the VMM has accepted protocol features.
    later: u64,
    protocol: u64,
}

/// Makes the chapter.
///
/// # Errors
/// A device cannot be served here, or it offers a bit without a name.
pub(super) fn chapter() -> Result<String, anyhow::Error> {
    let folder = tempfile::tempdir()?;
    let image = folder.path().join("disk.img");
    std::fs::File::create(&image)?.set_len(1 << 20)?;
    let image = image.to_str().context("the path of the temporary folder is not UTF-8")?;
    let offers = |kind: &&'static Kind| Ok((*kind, offered_by(folder.path(), kind, image)?));
    let kinds = KINDS.iter().map(offers).collect::<Result<Vec<_>, anyhow::Error>>()?;

    let mut chapter = Chapter::new("Protocol features");
    chapter.paragraph(
        "Virtio feature bits, vhost-user protocol features and vhost-user messages of `paravane serve`. The VMM and the \
         driver decide which of the offered features they accept.",
    );
    chapter.heading("Virtio features of all devices");
    let rows = names::RING.iter().filter_map(|bit| {
        let by = |(kind, offered): &(&Kind, Offered)| match bit.1 {
            mask if offered.features & mask != 0 => Some(kind.name.to_owned()),
            mask if offered.later & mask != 0 => Some(format!("{} (1)", kind.name)),
            _ => None,
        };
        let by: Vec<_> = kinds.iter().filter_map(by).collect();
        (!by.is_empty()).then(|| row(bit, &by.join(", ")))
    });
    let rows: Vec<_> = rows.collect();
    chapter.table(&["Bit", "Feature", "Offered by", "Meaning"], &rows);
    chapter.paragraph("(1) After the VMM has accepted `BACKEND_REQ` and `REPLY_ACK`.");
    for (kind, offered) in &kinds {
        of_kind(&mut chapter, &kind.features, offered.features)?;
    }
    chapter.heading("vhost-user protocol features");
    let all = kinds.iter().fold(0, |all, (_, offered)| all | offered.protocol);
    let unknown = all & !bits(names::PROTOCOL);
    ensure!(unknown == 0, "offered protocol features without a name: {unknown:#x}");
    let offered_by = |mask: u64| {
        let by = kinds.iter().filter(|(_, offered)| offered.protocol & mask != 0);
        let by: Vec<_> = by.map(|(kind, _)| kind.name).collect();
        match by.len() {
            0 => "no".to_owned(),
            count if count == kinds.len() => "all".to_owned(),
            _ => by.join(", "),
        }
    };
    let rows: Vec<_> = names::PROTOCOL.iter().map(|bit| row(bit, &offered_by(bit.1))).collect();
    chapter.table(&["Bit", "Feature", "Offered by", "Meaning"], &rows);
    chapter.heading("Messages of the VMM");
    chapter.table(&["Number", "Message", "Meaning"], &messages(names::MESSAGES));
    chapter.paragraph("Other messages end the connection with a protocol error.");
    chapter.heading("Messages of the daemon");
    chapter.table(&["Number", "Message", "Meaning"], &messages(names::BACK_END_MESSAGES));
    Ok(chapter.finish())
}

/// The table of a kind's own features.
fn of_kind(chapter: &mut Chapter, of: &Features, offered: u64) -> Result<(), anyhow::Error> {
    let Features { heading, bits: own, sometimes, remark, .. } = of;
    let unknown = offered & !(bits(names::RING) | bits(own));
    ensure!(unknown == 0, "{heading}: offered features without a name: {unknown:#x}");
    if own.is_empty() {
        return Ok(());
    }
    chapter.heading(&format!("Virtio features of {heading}"));
    let offers = |mask: u64| match sometimes.iter().find(|(some, _)| some & mask != 0) {
        _ if offered & mask != 0 => "yes",
        Some((_, when)) => when,
        None => "no",
    };
    let rows: Vec<_> = own.iter().map(|bit| row(bit, offers(bit.1))).collect();
    chapter.table(&["Bit", "Feature", "Offered", "Meaning"], &rows);
    if !remark.is_empty() {
        chapter.paragraph(remark);
    }
    Ok(())
}

fn bits(list: &[Bit]) -> u64 {
    list.iter().fold(0, |all, bit| all | bit.1)
}

fn row(&(name, mask, meaning): &Bit, offered: &str) -> Vec<String> {
    vec![mask.trailing_zeros().to_string(), format!("`{name}`"), offered.to_owned(), markdown::text(meaning)]
}

fn messages(list: &[Message]) -> Vec<Vec<String>> {
    let row = |&(name, number, meaning): &Message| {
        vec![number.to_string(), format!("`{name}`"), meaning.to_owned()]
    };
    list.iter().map(row).collect()
}

/// What the sample devices of a kind offer together.
fn offered_by(folder: &Path, kind: &Kind, image: &str) -> Result<Offered, anyhow::Error> {
    let mut all = Offered::default();
    for sample in kind.features.samples {
        let options = sample.iter().map(|word| if *word == "IMAGE" { image } else { word });
        let one = offered(folder, &std::iter::once(kind.name).chain(options).collect::<Vec<_>>())?;
        all.features |= one.features;
        all.later |= one.later;
        all.protocol |= one.protocol;
    }
    all.later &= !all.features;
    Ok(all)
}

/// Serves a device and asks for its features.
fn offered(folder: &Path, device: &[&str]) -> Result<Offered, anyhow::Error> {
    let socket = folder.join("socket");
    let path = socket.to_str().context("the path of the temporary folder is not UTF-8")?;
    let line = [&["paravane", "serve"], device, &["--socket", path]].concat();
    let Command::Serve(args) = Cli::try_parse_from(line)?.command else { bail!("not a device: {device:?}") };
    let command = args.device.context("no device")?;
    let spec = DeviceSpec::new(&command).map_err(|(option, why)| anyhow::anyhow!("--{option}: {why}"))?;
    let opened =
        open::open(&spec, &mut LinkEnds::default(), &OpenContext::default(), Earlier::default())?.opened()?;
    let config = open::export_config(&spec, Endpoint::Listen(socket.clone()));
    let export = Export::start(config, opened.device)?;
    let mut stream = UnixStream::connect(&socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let features = ask(&mut stream, request::GET_FEATURES)?;
    let protocol = ask(&mut stream, request::GET_PROTOCOL_FEATURES)?;
    send(&mut stream, request::SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes())?;
    let later = ask(&mut stream, request::GET_FEATURES)? & !features;
    drop(stream);
    export.stop();
    Ok(Offered { features, later, protocol })
}

fn send(stream: &mut UnixStream, request: u32, payload: &[u8]) -> Result<(), anyhow::Error> {
    let header = Header { request, flags: flags::VERSION, size: u32::try_from(payload.len())? };
    stream.write_all(&[header.as_bytes(), payload].concat())?;
    Ok(())
}

/// Sends a message without payload; returns the number of its reply.
fn ask(stream: &mut UnixStream, request: u32) -> Result<u64, anyhow::Error> {
    send(stream, request, &[])?;
    stream.read_exact(&mut [0; size_of::<Header>()])?;
    let mut number = [0; 8];
    stream.read_exact(&mut number)?;
    Ok(u64::from_ne_bytes(number))
}
