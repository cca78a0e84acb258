//! Texts on consoles.
use crate::kinds::kind::{Features, Texts};
use crate::kinds::texts::SERVE_ONE;
use crate::reference::names::Bit;
use paravane_command_line::sections::Sections;
use paravane_spec::console;

pub(super) const TEXTS: Texts = Texts {
    sections: Sections {
        command: "paravane-serve-console",
        examples: &[
            (
                "paravane serve console --terminal-socket /run/con0.term --socket /run/con0.sock",
                "Serve a console to terminal programs, for example socat -,raw,echo=0 UNIX:/run/con0.term.",
            ),
            (
                "paravane serve console --log /var/log/vm0.console --socket /run/con0.sock",
                "Keep what the guest writes.",
            ),
            (
                "paravane serve console --pty --window 80x25 --socket /run/con0.sock",
                "Serve a console at a pseudo-terminal.",
            ),
        ],
        files: &[("/dev/ptmx", "Pseudo-terminals (--pty).")],
        ..SERVE_ONE
    },
    noun: "a console",
    table: "A console. Needs name, one of terminal-socket, pty and log, and one of socket, connect and \
            socket-activation.",
    example: "[[console]]
name = \"vm0-console\"
terminal-socket = \"/run/paravane/vm0-console.term\"
socket = \"/run/paravane/vm0-console.sock\"
",
};

pub(super) const FEATURES: Features = Features {
    heading: "consoles",
    bits: BITS,
    sometimes: &[],
    remark: "",
    samples: &[&["--pty", "--window", "80x25"]],
};

const BITS: &[Bit] = &[("VIRTIO_CONSOLE_F_SIZE", console::F_SIZE, "Size of the window (--window).")];
