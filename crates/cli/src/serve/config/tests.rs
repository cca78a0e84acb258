use super::*;
use crate::kinds::blk::args::Blk;
use crate::kinds::endpoint::Endpoint;
use crate::kinds::kind::Spec;
use crate::kinds::net::spec::{Net, Network};
use crate::serve::args::LogFormat;
use paravane_device::Rate;
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

const GOOD: &str = r#"
[daemon]
metrics = "127.0.0.1:9810"
user = "paravane"
allow = ["images", "/srv"]
log-format = "json"
log-rate = 5

[[blk]]
name = "vm0-disk"
image = "/img/vm0.img"
format = "raw"
socket = "/run/paravane/vm0-disk.sock"
queues = 4
workers = 2
serial = "0001"
bytes-per-second = "10M"
ops-per-second = 500
burst-ops = 7

[[rng]]
name = "vm0-rng"
connect = "vm0-rng.sock"

[[blk]]
name = "cd"
image = "cd.iso"
read-only = true
socket-activation = true
no-packed = true
poll-us = 0

[[net]]
name = "a"
socket = "/run/paravane/a.sock"
link = "cable"
queues = 2
mac = "52:54:00:12:34:56"

[[net]]
name = "b"
socket = "/run/paravane/b.sock"
link = "cable"
queues = 2
"#;

/// A device as one of its kind.
fn of<T: Spec>(spec: &Arc<dyn Spec>) -> &T {
    (&**spec as &dyn Any).downcast_ref().unwrap()
}

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(Path::new("/etc/p/devices.toml"), text).map_err(|error| error.to_string())
}

#[test]
fn a_file_says_what_the_command_line_says() {
    let config = parse(GOOD).unwrap();
    assert_eq!(config.daemon.metrics, Some("127.0.0.1:9810".parse().unwrap()));
    assert_eq!(config.daemon.allow, [PathBuf::from("/etc/p/images"), "/srv".into()]);
    assert_eq!((config.daemon.log_format, config.daemon.log_rate), (Some(LogFormat::Json), Some(5)));
    let names: Vec<_> = config.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["vm0-disk", "vm0-rng", "cd", "a", "b"], "in the order of the file");
    let [disk, rng, cd, a, b] = config.devices.as_slice() else { panic!("{names:?}") };
    let blk: &Blk = of(&disk.kind);
    assert_eq!((blk.queues, disk.workers, blk.serial.as_deref()), (4, Some(2), Some("0001")));
    let rate = |rate: Option<Rate>| rate.map(|rate| (rate.per_second.get(), rate.burst));
    assert_eq!(rate(blk.limit.rates().bytes), Some((10 << 20, 1 << 20)));
    assert_eq!(rate(blk.limit.rates().ops), Some((500, 7)));
    assert_eq!(disk.endpoint, Endpoint::Listen("/run/paravane/vm0-disk.sock".into()));
    assert!(disk.packed && !blk.read_only && disk.longest_poll == Duration::from_micros(50));
    assert_eq!(rng.endpoint, Endpoint::Connect("/etc/p/vm0-rng.sock".into()));
    assert_eq!((cd.images(), &cd.endpoint), (vec![Path::new("/etc/p/cd.iso")], &Endpoint::Activated));
    assert_eq!((cd.packed, cd.longest_poll), (false, Duration::ZERO));
    let (a, b): (&Net, &Net) = (of(&a.kind), of(&b.kind));
    assert_eq!((&a.network, a.mac), (&Network::Link("cable".into()), [0x52, 0x54, 0, 0x12, 0x34, 0x56]));
    assert!(a.mac != b.mac && b.mac.starts_with(&[0x52, 0x54, 0]));
    assert_eq!(parse("").unwrap(), Config::default());
    // For a machine that moves between two VMMs of this host.
    let half = |name: &str| {
        format!("[[blk]]\nname = \"{name}\"\nimage = \"/i\"\nsocket = \"/{name}\"\nno-lock = true\n")
    };
    assert_eq!(parse(&(half("from") + &half("to"))).unwrap().devices.len(), 2);
}

/// Every error names the line on which the operator has to look, and the key.
#[test]
fn errors_name_the_line() {
    let disk = "[[blk]]\nname = \"a\"\nimage = \"/i\"\nsocket = \"/s\"\n";
    let other = "[[blk]]\nname = \"b\"\nimage = \"/j\"\nsocket = \"/t\"\n";
    let net = "[[net]]\nname = \"n\"\nsocket = \"/n\"\n";
    let cases: &[(&[&str], usize, &str)] = &[
        // Not TOML.
        (&["\n[[blk]\nname = 1\n"], 2, ""),
        (&[disk, "queues = \n"], 5, ""),
        (&[disk, "name = \"b\"\n"], 5, "duplicate key"),
        // Unknown.
        (&["\n[[disk]]\nname = \"a\"\n"], 2, "unknown table \"disk\""),
        (&["queues = 1\n"], 1, "unknown table \"queues\""),
        (&["[daemon]\n\nverbose = 1\n"], 3, "unknown key \"verbose\""),
        (&[disk, "queue = 4\n"], 5, "unknown key \"queue\": this table has image, format"),
        (&[disk, "tap = \"tap0\"\n"], 5, "unknown key \"tap\""),
        (&[disk, "check = true\n"], 5, "unknown key \"check\""),
        (&[disk, "format = \"vmdk\"\n"], 5, "format: unknown value \"vmdk\": use one of raw, qcow2"),
        // Not of the right kind.
        (&["[blk]\nname = \"a\"\n"], 1, "[[blk]]"),
        (&["[[daemon]]\nuser = \"a\"\n"], 1, "not a table"),
        (&["blk = [1]\n"], 1, "not a table"),
        (&[disk, "queues = \"many\"\n"], 5, "queues: \"many\": invalid digit"),
        (&[disk, "queues = 70000\n"], 5, "queues: \"70000\": "),
        (&[disk, "queues = -1\n"], 5, "queues: \"-1\": "),
        (&[disk, "queues = 1.5\n"], 5, "queues: not a string or"),
        (&[disk, "queues = 0x10\n"], 5, "queues: not a string or"),
        (&[disk, "queues = [1]\n"], 5, "queues: not a string or"),
        (&[disk, "read-only = 1\n"], 5, "read-only: not true or false"),
        (&["[daemon]\nallow = \"/srv\"\n"], 2, "allow: not a list"),
        (&["[daemon]\nmetrics = \"9810\"\n"], 2, "metrics: \"9810\": invalid socket address"),
        // Beyond what can be.
        (&[disk, "backing = [\"raw:/b\"]\n"], 5, "backing: raw images have no backing file"),
        (&[disk, "format = \"qcow2\"\nbacking = [\"/b\"]\n"], 6, "backing: \"/b\": missing format"),
        (&[disk, "format = \"qcow2\"\nbacking = [\"raw:/j\"]\n", other], 9, "image: /j is used twice"),
        (&[disk, "format = \"qcow2\"\nbacking = [\"raw:/i\"]\n"], 6, "backing: /i is used twice"),
        (&[disk, "format = \"qcow2\"\nno-lock = true\n"], 6, "no-lock: qcow2 images are always locked"),
        (&[disk, "format = \"qcow2\"\ndirect = true\n"], 6, "direct: needs a raw image"),
        (
            &[disk, "engine = \"threads\"\nregistered-buffers = true\n"],
            6,
            "registered-buffers: needs the io_uring engine",
        ),
        (&[disk, "no-lock = true\n", &other.replace("\"/j\"", "\"/i\"")], 8, "image: /i is used twice"),
        (&[disk, "queues = 0\n"], 5, "queues: 0 is out of range: use 1 to 256"),
        (&[disk, "workers = 65\n"], 5, "workers: 65 is out of range: use 1 to 64"),
        (&[disk, "queue-size = 100\n"], 5, "queue-size: 100 is invalid: use a power of two"),
        (&[disk, "queue-size = 2\n"], 5, "queue-size: 2 is invalid: use a power of two from 4 to 32768"),
        (&[disk, "serial = \"012345678901234567890\"\n"], 5, "serial: "),
        (&[disk, "bytes-per-second = 0\n"], 5, "bytes-per-second: 0 would block"),
        (&[disk, "\nops-per-second = \"1k\"\n"], 6, "ops-per-second: \"1k\": "),
        (&[disk, "burst-ops = 9\n"], 1, "missing key ops-per-second"),
        (&[&disk.replace("\"a\"", "\"a b\"")], 2, "name: \"a b\": use"),
        (&[&disk.replace("\"a\"", "\"\"")], 2, "name: \"\": use"),
        (&[net, "echo = true\nmac = \"01:00:00:00:00:00\"\n"], 5, "mac: "),
        (&[net, "echo = true\nmac = \"1\"\n"], 5, "mac: \"1\": invalid MAC address"),
        (&[net, "echo = true\nmtu = 60\n"], 5, "mtu: 60 bytes is out of range"),
        (&[net, "source = \"1M\"\n"], 4, "source: 1048576 bytes is out of range: use 22"),
        (&[net, "source = \"1x\"\n"], 4, "source: \"1x\": unknown unit"),
        // Too little and too much.
        (&["\n[[blk]]\nimage = \"/i\"\nsocket = \"/s\"\n"], 2, "missing key name"),
        (&["[[blk]]\nname = \"a\"\nsocket = \"/s\"\n"], 1, "missing key image"),
        (
            &["[[blk]]\nname = \"a\"\nimage = \"/i\"\n"],
            1,
            "missing key socket or connect or socket-activation",
        ),
        (&[net], 1, "missing key tap or link or echo or sink or source"),
        (&[disk, "connect = \"/t\"\n"], 5, "connect: excludes socket"),
        (&[net, "tap = \"t\"\necho = true\n"], 5, "excludes "),
        // Two of what there can be one of.
        (&[disk, &other.replace("\"b\"", "\"a\"")], 6, "name: two devices are named \"a\""),
        (&[disk, &other.replace("\"/t\"", "\"/s\"")], 8, "socket: /s: already used by device \"a\""),
        (&[disk, &other.replace("\"/t\"", "\"/./s\"")], 8, "socket: "),
        (&[disk, &other.replace("\"/j\"", "\"/i\"")], 7, "image: /i is used twice"),
        (
            &[net, "tap = \"t\"\n", &net.replace("n\"", "m\""), "tap = \"t\"\n"],
            8,
            "tap: t: already used by device \"n\"",
        ),
        (&[net, "link = \"l\"\n"], 4, "link: \"l\" connects two cards, but 1 have it"),
        (
            &[net, "link = \"l\"\n", &net.replace("n\"", "m\""), "link = \"l\"\nqueues = 2\n"],
            8,
            "link: \"l\" connects cards with 1 and 2",
        ),
        (
            &[net, "link = \"l\"\nmtu = 9000\n", &net.replace("n\"", "m\""), "link = \"l\"\n"],
            9,
            "link: \"l\" connects cards with MTUs of 9000 and 1500",
        ),
    ];
    for (parts, line, what) in cases {
        let text = parts.concat();
        let error = parse(&text).map(|config| format!("{config:?}")).expect_err(&text);
        let place = format!("/etc/p/devices.toml:{line}: ");
        assert!(error.starts_with(&place), "{error}\nfor line {line} of\n{text}");
        assert!(error[place.len()..].contains(what), "{error}\nlacks {what:?}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn a_disk_in_ceph_is_polled_on_demand() {
    let poll = |image: &str, more: &str| {
        let text = format!("[[blk]]\nname = \"a\"\nimage = \"{image}\"\nsocket = \"/a\"\n{more}");
        parse(&text).unwrap().devices[0].longest_poll.as_micros()
    };
    assert_eq!((poll("rbd:pool/image", ""), poll("rbd:pool/image", "poll-us = 20")), (0, 20));
    assert_eq!((poll("nbd://server/export", ""), poll("/i", "")), (50, 50));
}

#[test]
fn readers_may_share_an_image() {
    let text = |read_only: &str| {
        let disk = |name: &str| {
            format!(
                "[[blk]]\nname = \"{name}\"\nimage = \"/i\"\nsocket = \"/{name}\"\nread-only = {read_only}\n"
            )
        };
        disk("a") + &disk("b")
    };
    parse(&text("true")).unwrap();
    parse(&text("false")).unwrap_err();
}

#[test]
fn a_file_that_is_none_is_refused() {
    let missing = Config::read(Path::new("/nonexistent/x.toml")).unwrap_err().to_string();
    assert!(missing.starts_with("/nonexistent/x.toml: No such file"), "{missing}");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("large.toml");
    std::fs::write(&path, vec![b'\n'; MAX_LEN as usize + 1]).unwrap();
    assert!(Config::read(&path).unwrap_err().to_string().contains("file too large"));
}

/// An incomplete file parses, or has an error on an existing line.
#[test]
fn no_part_of_a_file_makes_it_panic() {
    let answered = |text: &str| {
        if let Err(error) = Config::parse(Path::new("d.toml"), text) {
            let error = error.to_string();
            let line: usize = error.split(':').nth(1).unwrap().parse().unwrap_or_else(|_| panic!("{error}"));
            assert!((1..=1 + text.lines().count()).contains(&line), "{error}\n{text}");
        }
    };
    for (at, char) in GOOD.char_indices().step_by(3) {
        answered(&GOOD[..at]);
        answered(&GOOD[at..]);
        answered(&format!("{}{}", &GOOD[..at], &GOOD[at + char.len_utf8()..]));
        answered(&format!("{}\u{0}{}", &GOOD[..at], &GOOD[at..]));
    }
}

/// The file of the package is valid as it is, and so are its examples.
#[test]
fn the_packaged_file_is_valid() {
    // Not among the sources of the crate.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/devices.toml");
    let Ok(packaged) = std::fs::read_to_string(&path) else {
        return paravane_test_support::skip(
            "the_packaged_file_is_valid",
            format_args!("no {}", path.display()),
        );
    };
    assert!(parse(&packaged).unwrap().devices.is_empty());
    // The examples without the comments about them.
    let is_toml = |line: &&str| line.starts_with('[') || line.contains(" = ");
    let all: Vec<_> =
        packaged.lines().map(|line| line.strip_prefix("# ").unwrap_or(line)).filter(is_toml).collect();
    let config = parse(&all.join("\n")).unwrap();
    assert_eq!((config.devices.len(), config.daemon.user.as_deref()), (3, Some("libvirt-qemu")));
}

/// The example of the how-to page is valid.
#[test]
fn the_example_of_the_book_is_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/howto/many-devices.md");
    let Ok(page) = std::fs::read_to_string(&path) else {
        return paravane_test_support::skip(
            "the_example_of_the_book_is_valid",
            format_args!("no {}", path.display()),
        );
    };
    let block = page.lines().skip_while(|line| *line != "    [daemon]");
    let block: Vec<_> = block.take_while(|line| line.is_empty() || line.starts_with("    ")).collect();
    assert_eq!(parse(&block.join("\n")).unwrap().devices.len(), 3);
}
