//! Manual pages and completions for packagers.
use crate::daemon::{Folder, paravane};

#[test]
fn manual_pages_and_completions_are_made_from_the_command_line() {
    let folder = Folder::new();
    let output = paravane().arg("manuals").arg(folder.path("made")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |name: &str| std::fs::read_to_string(folder.path("made").join(name)).unwrap();
    // Undo the escapes of dashes.
    let page = |name: &str| read(name).replace("\\-", "-");
    assert!(page("paravane-serve.1").contains("--config"));
    assert!(page("paravane-serve-blk.1").contains("--socket-activation"));
    assert!(page("paravane-serve-net.1").contains("--tap"));
    assert!(page("paravane-serve-rng.1").contains("--connect"));
    assert!(page("paravane-status.1").contains("--json"));
    assert!(page("paravane-run.1").contains("--kernel"));
    // Hidden commands have pages, too.
    for page in ["paravane-manuals.1", "paravane-reference.1", "paravane-completions.1"] {
        assert!(read(page).contains("EXIT STATUS"), "{page}");
    }
    for (shell, file) in [("bash", "paravane.bash"), ("zsh", "_paravane"), ("fish", "paravane.fish")] {
        let output = paravane().args(["completions", shell]).output().unwrap();
        assert!(
            output.status.success() && String::from_utf8(output.stdout).unwrap() == read(file),
            "{shell}"
        );
    }
    for completions in ["paravane.bash", "_paravane", "paravane.fish"] {
        assert!(read(completions).contains("socket-activation"), "{completions}");
    }
}
