//! Keys of a file of devices as data, for its manual page and the reference.
use super::args::DaemonArgs;
use crate::kinds::KINDS;
use crate::kinds::endpoint::NOT_IN_FILES;
use crate::options::{self, OptionText};
use clap::{Args, Command};

/// Paragraphs on the file as a whole.
pub(crate) fn introduction() -> Vec<String> {
    let kinds: Vec<_> =
        KINDS.iter().map(|kind| format!("[[{}]] is {}", kind.name, kind.texts.noun)).collect();
    let first = format!(
        "The file lists the devices that `paravane serve --config FILE` serves, in TOML. Each device is an element of an \
         array of tables: {}. The table [daemon] has options of the daemon; the command line overrides them.",
        kinds.join(", ")
    );
    std::iter::once(first).chain(MORE.iter().map(|&text| text.to_owned())).collect()
}

const MORE: &[&str] = &[
    "Keys are the options of the command line without dashes. Unknown keys are errors. Relative paths are relative to \
     the directory of the file. The file may have up to 1 MiB.",
    "`paravane reload` and SIGHUP have the file read again. Devices whose tables are unchanged keep running. New devices \
     start, missing devices stop after finishing their requests. Rate limits, slow, poll-us, on-full and latencies change \
     while a device is in use; for other keys it is opened again, within its session if its guest would find the same \
     device: see paravane-reload(1). If the file is invalid, nothing changes. Of [daemon], log-level and log-rate change; other keys \
     take effect at the next start. `paravane serve --config FILE --check` validates the file.",
    "Types: a size is a number of bytes, or a string with k, M, G or T (powers of 1024). Integers may be strings.",
];

/// A file with a device of each kind.
pub(crate) fn example() -> String {
    let tables = KINDS.iter().map(|kind| format!("\n{}", kind.texts.example));
    format!("[daemon]\nmetrics = \"127.0.0.1:9810\"\n{}", tables.collect::<String>())
}

/// One kind of table.
pub(crate) struct TableText {
    /// As in the file: `[[blk]]`.
    pub(crate) header: String,
    pub(crate) summary: &'static str,
    pub(crate) keys: Vec<OptionText>,
}

impl TableText {
    /// Text of an option in terms of keys: `--queues` becomes `queues`.
    pub(crate) fn words(&self, text: &str) -> String {
        // Remarks that make sense on the command line only.
        let text = [" (repeatable)", " (needs --config)"]
            .iter()
            .fold(text.to_owned(), |text, remark| text.replace(remark, ""));
        let text = text.replace("With --config: allow", "Allow");
        let is_key = |name: &str| self.keys.iter().any(|key| key.name == name);
        let mut parts = text.split("--");
        let mut out = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let name =
                part.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).next().unwrap_or_default();
            if !is_key(name) {
                out += "--";
            }
            out += part;
        }
        out
    }
}

/// All tables, in the order of the manual.
pub(crate) fn tables() -> Vec<TableText> {
    let daemon = table("[daemon]".to_owned(), "Options of the daemon.", &DaemonArgs::augment_args);
    let kinds = KINDS.iter().map(|kind| {
        table(format!("[[{}]]", kind.name), kind.texts.table, &|command| (kind.options)(command))
    });
    std::iter::once(daemon).chain(kinds).collect()
}

fn table(header: String, summary: &'static str, options: &dyn Fn(Command) -> Command) -> TableText {
    let mut keys = options::of(&options(Command::new("table")));
    keys.retain(|key| !NOT_IN_FILES.contains(&key.name.as_str()));
    TableText { header, summary, keys }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::config::Config;
    use std::path::Path;

    #[test]
    fn the_example_is_valid() {
        assert_eq!(Config::parse(Path::new("devices.toml"), &example()).unwrap().devices.len(), KINDS.len());
    }

    #[test]
    fn options_in_texts_become_keys() {
        let blk = &tables()[1];
        assert_eq!(blk.words("see --no-lock; with --config"), "see no-lock; with --config");
    }
}
