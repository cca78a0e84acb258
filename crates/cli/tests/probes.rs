//! The probes of the program's file: as documented, and still there without symbols.
use paravane_test_support::skip;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A probe in the file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Note {
    provider: String,
    name: String,
    /// Addresses: the nop, the base, the semaphore.
    addresses: [u64; 3],
    arguments: usize,
}

/// Notes of a program; `None`: `test` is skipped.
fn notes(program: &Path, test: &str) -> Option<Vec<Note>> {
    let Ok(output) = Command::new("readelf").env("LC_ALL", "C").arg("-n").arg(program).output() else {
        skip(test, "readelf is missing (binutils)");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut notes = Vec::<Note>::new();
    for line in String::from_utf8(output.stdout).unwrap().lines().map(str::trim) {
        if let Some(provider) = line.strip_prefix("Provider: ") {
            notes.push(Note { provider: provider.to_owned(), ..Note::default() });
            continue;
        }
        let Some(note) = notes.last_mut() else { continue };
        if let Some(name) = line.strip_prefix("Name: ") {
            name.clone_into(&mut note.name);
        } else if line.starts_with("Location: ") {
            let numbers = line.split("0x").skip(1).map(|rest| rest.split(',').next().unwrap());
            let numbers: Vec<_> = numbers.map(|number| u64::from_str_radix(number, 16).unwrap()).collect();
            note.addresses = numbers.try_into().unwrap();
        } else if let Some(arguments) = line.strip_prefix("Arguments: ") {
            assert!(arguments.split(' ').all(|argument| argument.starts_with("8@")), "{line}");
            note.arguments = arguments.split(' ').count();
        }
    }
    Some(notes)
}

/// Probes of the book, with their number of arguments.
fn documented() -> BTreeMap<String, usize> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/probes.md");
    let page = fs::read_to_string(page).unwrap();
    let table = page.split("## Arguments").next().unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<_> = row.split(" | ").collect();
        let name = cells[0].trim_start_matches("| ").trim_matches('`').to_owned();
        (name, cells[2].split(',').count())
    })
    .collect()
}

fn check(notes: &[Note]) {
    assert!(notes.iter().all(|note| note.provider == "paravane"), "{notes:?}");
    let found: BTreeMap<_, _> = notes.iter().map(|note| (note.name.clone(), note.arguments)).collect();
    assert_eq!(found, documented());
    assert_eq!(found.len(), notes.len(), "a probe has several places: {notes:?}");
    let distinct = |which: usize| notes.iter().map(|note| note.addresses[which]).collect::<BTreeSet<_>>();
    for address in [0, 2] {
        assert_eq!(distinct(address).len(), notes.len(), "{notes:?}");
    }
    assert_eq!(distinct(1).len(), 1, "one base: {notes:?}");
    assert!(notes.iter().all(|note| !note.addresses.contains(&0)), "{notes:?}");
}

#[test]
fn the_program_has_the_probes_of_the_book() {
    let program = Path::new(env!("CARGO_BIN_EXE_paravane"));
    if let Some(notes) = notes(program, "the_program_has_the_probes_of_the_book") {
        check(&notes);
    }
}

#[test]
fn probes_survive_strip() {
    let folder = tempfile::tempdir().unwrap();
    let stripped = folder.path().join("paravane");
    let mut strip = Command::new("strip");
    match strip.arg("-o").arg(&stripped).arg(env!("CARGO_BIN_EXE_paravane")).status() {
        Ok(status) => assert!(status.success()),
        Err(_) => return skip("probes_survive_strip", "strip is missing (binutils)"),
    }
    if let Some(notes) = notes(&stripped, "probes_survive_strip") {
        check(&notes);
    }
}
