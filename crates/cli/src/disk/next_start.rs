//! How to start a disk after a snapshot: for a shell, and for a file of devices.
use crate::serve::snapshot::messages::{Base, StartOption};
use paravane_device::blk::Format;
use std::fmt::Write;

/// Characters that mean nothing to a shell.
const PLAIN: &str = "-_./:=@%+,";

/// The words of the command that serves `overlay`, for the guest that runs.
pub(super) fn command(base: &Base, overlay: &str) -> Vec<String> {
    let mut words: Vec<String> = ["paravane", "serve", "blk"].map(Into::into).into();
    // A daemon of an earlier version tells none.
    let name = Some(StartOption::new("name", &base.start.name)).filter(|_| !base.start.name.is_empty());
    for option in name.iter().chain(Some(&base.start.endpoint).filter(|option| !option.name.is_empty())) {
        words.extend(option_words(option));
    }
    words.extend(options(base, overlay, base.serial.as_deref()));
    words
}

/// The words of all options of a disk but its name and endpoint. `serial`: that of the guest.
pub(super) fn options(base: &Base, overlay: &str, serial: Option<&str>) -> Vec<String> {
    let mut words = ["--image", overlay, "--format", "qcow2"].map(Into::into).to_vec();
    words.extend(layers(base).into_iter().flat_map(|layer| ["--backing".to_owned(), layer]));
    let serial = serial.map(|serial| StartOption::new("serial", serial));
    words.extend(serial.iter().chain(&base.start.options).flat_map(option_words));
    words
}

/// Keys of a file of devices that change, one a line.
pub(super) fn keys(base: &Base, overlay: &str, serial: Option<&str>) -> String {
    let list: Vec<String> = layers(base).iter().map(|layer| toml_text(layer)).collect();
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(out, "  image = {}\n  format = \"{}\"", toml_text(overlay), Format::Qcow2.name());
    let _ = writeln!(out, "  backing = [{}]", list.join(", "));
    if let Some(serial) = serial {
        let _ = writeln!(out, "  serial = {}", toml_text(serial));
    }
    out
}

/// The layers below the overlay, top first, as FORMAT:LOCATION.
fn layers(base: &Base) -> Vec<String> {
    std::iter::once(&base.start.image).chain(&base.start.backing).map(ToString::to_string).collect()
}

fn option_words(option: &StartOption) -> Vec<String> {
    let name = format!("--{}", option.name);
    match &option.value {
        None => vec![name],
        // It would be taken for an option.
        Some(value) if value.starts_with('-') => vec![format!("{name}={value}")],
        Some(value) => vec![name, value.clone()],
    }
}

/// Words as a shell reads them.
pub(super) fn for_shell(words: &[String]) -> String {
    words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || PLAIN.contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// A basic string of TOML: one of JSON, but for a character that it has to escape.
fn toml_text(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', r"\u007F")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::snapshot::messages::{Layer, NextStart};
    use std::process::Command;

    #[test]
    fn a_shell_and_a_file_read_what_was_written() {
        let hostile = [
            "",
            "plain",
            "a b",
            "it's",
            "$HOME `id` \"x\"",
            "a\\b",
            "~",
            "nbd://h/x?a=1&b=2",
            "#",
            "é\u{7f}\n",
        ];
        let words: Vec<String> = hostile.map(Into::into).into();
        let script = format!("printf '%s\\0' {}", for_shell(&words));
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), words.join("\0") + "\0");
        for text in hostile {
            let document: toml::Table = format!("x = {}", toml_text(text)).parse().unwrap();
            assert_eq!(document["x"].as_str(), Some(text));
        }
    }

    #[test]
    fn what_an_earlier_daemon_does_not_tell_is_left_out() {
        let image = Layer { format: Format::Raw, path: "/a.img".into(), lacks_secret: false };
        let start = NextStart { image, ..NextStart::default() };
        let base = Base { pid: 1, size: 512, serial: None, id: None, start };
        let words = for_shell(&command(&base, "/b.qcow2"));
        assert_eq!(words, "paravane serve blk --image /b.qcow2 --format qcow2 --backing raw:/a.img");
        assert!(!keys(&base, "/b.qcow2", None).contains("serial"));
        let option = StartOption::new("serial", "-x y");
        assert_eq!(for_shell(&option_words(&option)), "'--serial=-x y'");
    }
}
