//! Virtio features and vhost-user messages.
//!
//! The offered bits are asked of real devices, over their sockets.
use super::markdown::{self, Chapter};
use super::names::{self, Bit, Message};
use crate::args::{Cli, Command};
use crate::serve::open::{self, Earlier, LinkEnds, OpenContext};
use crate::serve::spec::DeviceSpec;
use anyhow::{Context, bail, ensure};
use clap::Parser;
use paravane_spec::vhost_user::{Header, flags, request};
use paravane_vhost::{Endpoint, Export};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Features that a device offers.
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
    let blk = offered(folder.path(), &["blk", "--image", image, "--queues", "2"])?;
    let read_only = offered(folder.path(), &["blk", "--image", image, "--read-only"])?;
    let net = offered(folder.path(), &["net", "--link", "a", "--queues", "2", "--mtu", "1500"])?;
    let rng = offered(folder.path(), &["rng"])?;
    let blk = Offered { features: blk.features | read_only.features, ..blk };

    let mut chapter = Chapter::new("Protocol features");
    chapter.paragraph(
        "Virtio feature bits, vhost-user protocol features and vhost-user messages of `paravane serve`. The VMM and the \
         driver decide which of the offered features they accept.",
    );
    chapter.heading("Virtio features of all devices");
    let known = bits(names::RING);
    let rows = names::RING
        .iter()
        .filter(|bit| (blk.features | blk.later | net.features | rng.features) & bit.1 != 0);
    let rows: Vec<_> = rows
        .map(|bit| {
            let devices = [("blk", &blk), ("net", &net), ("rng", &rng)].map(|(name, device)| match bit.1 {
                mask if device.features & mask != 0 => name.to_owned(),
                mask if device.later & mask != 0 => format!("{name} (1)"),
                _ => String::new(),
            });
            let devices: Vec<_> = devices.into_iter().filter(|name| !name.is_empty()).collect();
            row(bit, &devices.join(", "))
        })
        .collect();
    chapter.table(&["Bit", "Feature", "Offered by", "Meaning"], &rows);
    chapter.paragraph("(1) After the VMM has accepted `BACKEND_REQ` and `REPLY_ACK`.");
    for (heading, list, device) in [("disks", names::BLK, &blk), ("network cards", names::NET, &net)] {
        chapter.heading(&format!("Virtio features of {heading}"));
        let unknown = device.features & !(known | bits(list));
        ensure!(unknown == 0, "{heading}: offered features without a name: {unknown:#x}");
        let is_net = heading == "network cards";
        let offered = |mask: u64| match mask {
            mask if device.features & mask != 0 => "yes",
            mask if is_net && names::TAP & mask != 0 => "on TAP devices",
            mask if is_net && names::TAP_BY_KERNEL & mask != 0 => {
                "on TAP devices, if the host's kernel has USO"
            }
            _ => "no",
        };
        let rows: Vec<_> = list.iter().map(|bit| row(bit, offered(bit.1))).collect();
        chapter.table(&["Bit", "Feature", "Offered", "Meaning"], &rows);
    }
    chapter.paragraph("`--no-offloads` disables checksum and segmentation offloads.");
    chapter.heading("vhost-user protocol features");
    let unknown = (blk.protocol | net.protocol | rng.protocol) & !bits(names::PROTOCOL);
    ensure!(unknown == 0, "offered protocol features without a name: {unknown:#x}");
    let offered_by = |mask: u64| match (blk.protocol & mask != 0, net.protocol & mask != 0) {
        (true, true) => "all",
        (true, false) => "blk",
        (false, true) => "net",
        (false, false) => "no",
    };
    let rows: Vec<_> = names::PROTOCOL.iter().map(|bit| row(bit, offered_by(bit.1))).collect();
    chapter.table(&["Bit", "Feature", "Offered by", "Meaning"], &rows);
    chapter.heading("Messages of the VMM");
    chapter.table(&["Number", "Message", "Meaning"], &messages(names::MESSAGES));
    chapter.paragraph("Other messages end the connection with a protocol error.");
    chapter.heading("Messages of the daemon");
    chapter.table(&["Number", "Message", "Meaning"], &messages(names::BACK_END_MESSAGES));
    Ok(chapter.finish())
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
