//! What help, manual pages and the reference say of a command beside its options.
use crate::kinds::KINDS;
use crate::kinds::texts::SERVE_EXIT;
use clap::Command;
use paravane_command_line::sections::{NONE, RUST_LOG, Sections, USAGE};

const CONTROL: (&str, &str) = (
    "/run/paravane/PID.sock",
    "Control socket of a daemon; for users other than root in XDG_RUNTIME_DIR/paravane.",
);

const RUNTIME_DIRECTORY: (&str, &str) = ("RUNTIME_DIRECTORY", "Directory of control sockets.");
const XDG_RUNTIME_DIR: (&str, &str) =
    ("XDG_RUNTIME_DIR", "Parent directory of control sockets of users other than root.");

/// A command that reads no variable but RUST_LOG.
const PLAIN: Sections = Sections { environment: &[RUST_LOG], ..NONE };

/// A command that asks daemons.
const CLIENT: Sections =
    Sections { files: &[CONTROL], environment: &[RUST_LOG, RUNTIME_DIRECTORY, XDG_RUNTIME_DIR], ..NONE };

const DISK_EXIT: &[(u8, &str)] = &[
    (0, "The disk writes to the overlay."),
    (1, "The daemon sends an unexpected answer, or the output was closed."),
    (2, "Nothing was changed, as the message says."),
];

/// A command on disk images.
const DISK: Sections =
    Sections { see_also: &["paravane-disk(1)", "paravane-serve-blk(1)", "qemu-img(1)"], ..PLAIN };

const RELOAD_EXIT: &[(u8, &str)] = &[
    (0, "All devices are as the file has them."),
    (1, "A device failed, or was not done within --timeout; the others are as the file has them."),
    (2, "Nothing was changed: the daemon did not answer, or its file is invalid."),
    (3, "A change was refused; the other devices are as the file has them."),
];

/// Commands but those of the kinds of devices.
const COMMANDS: &[Sections] = &[
    Sections {
        command: "paravane",
        examples: &[
            ("paravane run", "Boot the built-in guest and verify a temporary disk."),
            ("paravane doctor", "Check this host."),
        ],
        exit: &[(0, "Success."), (1, "The command ran and failed."), USAGE, (130, "Stopped by a signal.")],
        see_also: &[
            "paravane-run(1)",
            "paravane-serve(1)",
            "paravane-hold(1)",
            "paravane-reload(1)",
            "paravane-status(1)",
            "paravane-top(1)",
            "paravane-trace(1)",
            "paravane-disk(1)",
            "paravane-doctor(1)",
            "paravane-bench(1)",
            "paravane-completions(1)",
            "paravane-devices.toml(5)",
        ],
        ..PLAIN
    },
    #[cfg(feature = "run")]
    Sections {
        command: "paravane-run",
        examples: &[
            ("paravane run", "Write-test a temporary disk."),
            ("paravane run --disk vm.img", "Read an image in the guest and compare its SHA-256."),
            (
                "paravane run --iommu --dirty-log=verify",
                "Put devices behind IOMMUs and verify the dirty log.",
            ),
            (
                "paravane run --net echo,size=1k,frames=100000 --depth 1",
                "Measure the latency of a network card.",
            ),
            (
                "paravane run --disk a.img --disk b.img,ro --write-test --depth 16 --block 4k --seconds 5",
                "Overwrite and verify a.img, read and verify b.img.",
            ),
            (
                "paravane run --kernel vmlinuz --initrd initrd.img --disk root.img --transport pci --net tap=tap0",
                "Boot Linux with a disk and a network card.",
            ),
        ],
        exit: &[
            (0, "All data was verified; with --kernel, the guest powered off or rebooted."),
            (1, "The data differs, the guest crashed or hung, or the host failed."),
            USAGE,
            (130, "Stopped by SIGINT or SIGTERM; the report covers the work so far."),
        ],
        signals: &[(
            "SIGINT, SIGTERM",
            "End the run and print the report; a second one after 0.5 s ends the process at once.",
        )],
        files: &[
            ("/dev/kvm", "KVM; without it the built-in guest runs in a thread."),
            ("/dev/net/tun", "TAP devices (--net tap=NAME)."),
            ("/dev/vhost-net", "vhost-net (--net tap=NAME,vhost=on)."),
        ],
        environment: &[RUST_LOG],
        see_also: &["paravane(1)", "paravane-doctor(1)"],
    },
    Sections {
        command: "paravane-serve",
        examples: &[
            (
                "paravane serve blk --image vm.img --socket /run/vm0.sock --queues 4",
                "Serve a disk with 4 queues.",
            ),
            (
                "paravane serve net --tap tap0 --socket /run/net0.sock",
                "Serve a network card on a TAP device.",
            ),
            ("paravane serve --config devices.toml --check", "Validate a file of devices."),
            (
                "paravane serve --config devices.toml --check --against /run/paravane/control",
                "Show what a reload of the file would do to a running daemon.",
            ),
            ("paravane serve --config devices.toml", "Serve the devices of a file."),
            (
                "paravane serve --config devices.toml --take-over",
                "Take the devices over from the running daemon; VMMs stay connected.",
            ),
        ],
        exit: SERVE_EXIT,
        signals: &[
            (
                "SIGTERM, SIGINT",
                "Finish requests in flight, remove the sockets and exit; a second one exits at once.",
            ),
            (
                "SIGHUP",
                "Read --config again, as `paravane reload` does, and restart devices that have to; tell drivers if the sizes of images have changed.",
            ),
        ],
        files: &[("/etc/paravane/devices.toml", "Devices of paravane.service."), CONTROL],
        environment: &[
            RUST_LOG,
            ("RUNTIME_DIRECTORY", "Directory of the control socket (set by systemd for RuntimeDirectory=)."),
            ("XDG_RUNTIME_DIR", "Parent directory of the control socket of users other than root."),
            ("NOTIFY_SOCKET", "Socket of the service manager: readiness, reload and stop (sd_notify(3))."),
            ("LISTEN_FDS", "Sockets for --socket-activation (sd_listen_fds(3))."),
        ],
        see_also: &[
            "paravane-serve-blk(1)",
            "paravane-serve-net(1)",
            "paravane-serve-rng(1)",
            "paravane-reload(1)",
            "paravane-status(1)",
            "paravane-devices.toml(5)",
        ],
    },
    Sections {
        command: "paravane-hold",
        examples: &[
            ("paravane hold --socket /run/paravane/hold", "Keep the descriptors of a daemon."),
            (
                "paravane hold --socket /run/paravane/hold --max-descriptors 65536",
                "Keep those of a daemon with thousands of devices.",
            ),
        ],
        exit: &[
            (0, "Ended by a signal."),
            (1, "The host failed: the socket is in use, for example, or RLIMIT_NOFILE is too low."),
            USAGE,
        ],
        signals: &[
            ("SIGTERM, SIGINT", "Close all descriptors, remove the socket and exit."),
            ("SIGHUP", "Ignored."),
        ],
        environment: &[
            RUST_LOG,
            ("NOTIFY_SOCKET", "Socket of the service manager: readiness (sd_notify(3))."),
        ],
        see_also: &["paravane-serve(1)"],
        ..NONE
    },
    Sections {
        command: "paravane-reload",
        examples: &[
            ("paravane reload", "Apply changes of the file to the only daemon of this user."),
            ("paravane reload --restart vm0-disk", "Also restart a disk for which its VMM has to reconnect."),
        ],
        exit: RELOAD_EXIT,
        see_also: &["paravane-serve(1)", "paravane-status(1)", "paravane-devices.toml(5)"],
        ..CLIENT
    },
    Sections {
        command: "paravane-status",
        examples: &[
            ("paravane status --summary", "Show a line for each daemon."),
            ("paravane status --problems", "Show only devices that need attention."),
            ("paravane status --sort done --limit 20", "Show the 20 busiest devices."),
            ("paravane status 'vm17-*' --json", "Print the report of some devices as JSON."),
        ],
        exit: &[
            (0, "All daemons answered; there may be none."),
            (1, "A daemon did not answer, or a named device does not exist."),
            USAGE,
            (3, "All daemons answered; a device of a file is not served."),
        ],
        see_also: &["paravane-serve(1)", "paravane-top(1)"],
        ..CLIENT
    },
    Sections {
        command: "paravane-top",
        examples: &[
            ("paravane top", "Watch all devices."),
            ("paravane top --sort p99 'vm17-*'", "Watch some devices, the slowest first."),
            ("paravane top --once --interval 10", "Print the figures of 10 seconds."),
            ("paravane top --json --interval 5", "Print a line of JSON every 5 seconds."),
        ],
        exit: &[
            (0, "Ended by q, or by the end of its output; with --once, the figures were printed."),
            (1, "A daemon did not answer (--control, --once), or the terminal failed."),
            USAGE,
            (130, "Stopped by a signal."),
        ],
        environment: &[
            RUST_LOG,
            RUNTIME_DIRECTORY,
            XDG_RUNTIME_DIR,
            ("LC_ALL, LC_CTYPE, LANG", "Without UTF-8, HISTORY and units are ASCII."),
            ("NO_COLOR", "Without colours."),
        ],
        see_also: &["paravane-status(1)", "paravane-serve(1)"],
        ..CLIENT
    },
    Sections {
        command: "paravane-trace",
        examples: &[
            ("paravane trace vm0-disk --slower-than 5ms", "Show the slow requests of a disk."),
            ("paravane trace vm0-disk --operation read,write --queue 0 --count 100", "Show 100 requests."),
            ("paravane trace vm0-disk --json --duration 10s", "Print the requests of 10 seconds as JSON."),
            (
                "paravane trace vm0-disk --chrome trace.json --duration 1s",
                "Write a second to a file for ui.perfetto.dev.",
            ),
        ],
        exit: &[
            (0, "--count or --duration was reached, the device has stopped, or the output was closed."),
            (1, "No daemon has the device, or the daemon does not trace it."),
            USAGE,
            (130, "Stopped by a signal; a Chrome trace is complete."),
        ],
        signals: &[("SIGINT, SIGTERM, SIGHUP", "End the trace, and write the Chrome trace.")],
        see_also: &["paravane-top(1)", "paravane-status(1)", "paravane-serve(1)"],
        ..CLIENT
    },
    Sections {
        command: "paravane-disk",
        examples: &[
            ("paravane disk create --backing raw:base.img vm0.qcow2", "Create an overlay on a base."),
            ("paravane disk info vm0.qcow2", "Describe an image."),
        ],
        exit: &[(0, "Done."), (1, "A read or write failed."), USAGE, (130, "Stopped by a signal.")],
        see_also: &[
            "paravane-disk-create(1)",
            "paravane-disk-info(1)",
            "paravane-disk-convert(1)",
            "paravane-disk-commit(1)",
            "paravane-disk-snapshot(1)",
            "paravane-disk-fork(1)",
            "paravane-serve-blk(1)",
            "qemu-img(1)",
        ],
        ..PLAIN
    },
    Sections {
        command: "paravane-disk-create",
        examples: &[
            ("paravane disk create --size 20G vm0.qcow2", "Create an empty qcow2 image."),
            (
                "paravane disk create --backing raw:base.img vm0.qcow2",
                "Create an overlay of the same size on a raw base.",
            ),
            ("paravane disk create --format raw --size 20G vm0.img", "Create an empty raw image."),
        ],
        exit: &[
            (0, "The image is there, and on disk."),
            (1, "A write failed; there is no image."),
            (2, "The request was invalid, or an image is in use; nothing was changed."),
        ],
        ..DISK
    },
    Sections {
        command: "paravane-disk-info",
        examples: &[
            ("paravane disk info vm0.qcow2", "Describe an image."),
            ("paravane disk info --format raw vm0.img --json", "Print a report as JSON."),
        ],
        exit: &[
            (0, "The report is on stdout, also of an image that Paravane does not open."),
            (2, "The image cannot be read, is in use, or does not have the format of --format."),
        ],
        ..DISK
    },
    Sections {
        command: "paravane-disk-convert",
        examples: &[
            ("paravane disk convert qcow2:vm0.qcow2 raw:vm0.img", "Make a raw image of a qcow2 image."),
            (
                "paravane disk convert qcow2:vm0.qcow2 --backing raw:base.img qcow2:whole.qcow2",
                "Copy an overlay and its base to one image.",
            ),
            (
                "paravane disk convert qcow2:vm0.qcow2 raw:/dev/vg/vm0 --target-exists",
                "Copy a disk to a logical volume.",
            ),
            (
                "paravane disk convert raw:vm0.img raw:rbd:pool/vm0 --target-exists",
                "Copy a disk to an image of Ceph, made by rbd create.",
            ),
        ],
        exit: &[
            (0, "The target is complete, and on disk."),
            (1, "A read, write or flush failed; there is no target, or a part of it with --target-exists."),
            (2, "The request was invalid, or an image is in use; nothing was changed."),
            (130, "Stopped by a signal; there is no target, or a part of it with --target-exists."),
        ],
        signals: &[(
            "SIGINT, SIGTERM",
            "Remove the unfinished target and end; a second one after 0.5 s ends the process at once.",
        )],
        ..DISK
    },
    Sections {
        command: "paravane-disk-commit",
        examples: &[
            ("paravane disk commit vm0.qcow2 --backing raw:base.img", "Merge an overlay into its base."),
            (
                "paravane disk commit top.qcow2 --backing qcow2:middle.qcow2 --backing raw:base.img",
                "Merge the top of three layers into the middle one.",
            ),
        ],
        exit: &[
            (0, "All is in the backing file, and on disk."),
            (1, "A read or write failed; keep the overlay, and run it again."),
            (2, "The request was invalid, or an image is in use; nothing was changed."),
            (130, "Stopped by a signal; keep the overlay, and run it again."),
        ],
        signals: &[(
            "SIGINT, SIGTERM",
            "End after the current step; a second one after 0.5 s ends the process at once.",
        )],
        ..DISK
    },
    Sections {
        command: "paravane-disk-snapshot",
        examples: &[
            ("paravane disk snapshot vm0-disk /img/vm0-1.qcow2", "Freeze the image of a served disk."),
            (
                "paravane disk snapshot vm0-disk /img/vm0-1.qcow2 --pause-limit 50ms --json",
                "Only if that is quick.",
            ),
        ],
        exit: DISK_EXIT,
        see_also: &["paravane-disk-fork(1)", "paravane-status(1)", "paravane-serve-blk(1)"],
        ..CLIENT
    },
    Sections {
        command: "paravane-disk-fork",
        examples: &[(
            "paravane disk fork vm0-disk /img/vm0-1.qcow2 /img/vm1.qcow2 /img/vm2.qcow2",
            "Make two disks for other guests from the disk of a guest that runs.",
        )],
        exit: DISK_EXIT,
        see_also: &["paravane-disk-snapshot(1)", "paravane-status(1)", "paravane-serve-blk(1)"],
        ..CLIENT
    },
    Sections {
        command: "paravane-doctor",
        examples: &[
            ("paravane doctor", "Check this host."),
            (
                "paravane doctor --config /etc/paravane/devices.toml",
                "Check what the devices of the service need.",
            ),
            (
                "paravane doctor --client /run/paravane/vm0-disk.sock",
                "Explain what the VMM of a device has negotiated.",
            ),
            ("paravane doctor --client vm0-disk --json", "Print the same as JSON."),
        ],
        exit: &[
            (0, "The check ran; without --config and --client, with any findings."),
            (
                1,
                "With --config, a finding is `missing`: a device cannot be served. With --client, no such device, or \
                 no VMM is connected.",
            ),
            USAGE,
        ],
        see_also: &["paravane-run(1)", "paravane-serve(1)", "paravane-devices.toml(5)"],
        ..CLIENT
    },
    Sections {
        command: "paravane-completions",
        examples: &[
            (
                "paravane completions bash >~/.local/share/bash-completion/completions/paravane",
                "Install the completions of Bash for this user.",
            ),
            (
                "paravane completions fish >~/.config/fish/completions/paravane.fish",
                "Install the completions of fish for this user.",
            ),
        ],
        exit: &[(0, "The completions are on stdout."), USAGE],
        see_also: &["paravane(1)", "paravane-manuals(1)"],
        ..PLAIN
    },
    Sections {
        command: "paravane-manuals",
        examples: &[("paravane manuals target/manuals", "Write manual pages and completions to a folder.")],
        exit: &[(0, "The files are written."), (1, "A file cannot be written."), USAGE],
        see_also: &["paravane(1)", "paravane-completions(1)"],
        ..PLAIN
    },
    Sections {
        command: "paravane-reference",
        examples: &[("paravane reference docs/reference", "Write the generated chapters of the reference.")],
        exit: &[(0, "The files are written."), (1, "A file cannot be written."), USAGE],
        see_also: &["paravane(1)"],
        ..PLAIN
    },
    #[cfg(feature = "bench")]
    paravane_command_line::bench::SECTIONS,
];

/// The sections of all commands.
pub(crate) fn all() -> impl Iterator<Item = &'static Sections> {
    let of_kinds = |after: &Sections| {
        let kinds = if after.command == "paravane-serve" { KINDS } else { &[] };
        kinds.iter().map(|kind| &kind.texts.sections)
    };
    COMMANDS.iter().flat_map(move |sections| std::iter::once(sections).chain(of_kinds(sections)))
}

/// The sections of a command, by its name with dashes.
pub(crate) fn of(command: &str) -> Option<&'static Sections> {
    all().find(|sections| sections.command == command)
}

/// The command line with the sections at the end of each command's `--help`.
pub(crate) fn with_sections(command: Command) -> Command {
    paravane_command_line::sections::with_sections(command, of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;

    fn names(command: &Command, parent: &str) -> Vec<String> {
        let name =
            if parent.is_empty() { "paravane".into() } else { format!("{parent}-{}", command.get_name()) };
        let below = command.get_subcommands().filter(|below| below.get_name() != "help");
        let below: Vec<_> = below.flat_map(|below| names(below, &name)).collect();
        std::iter::once(name).chain(below).collect()
    }

    #[test]
    fn every_command_has_examples_and_exit_statuses() {
        let mut commands = names(&Cli::command(), "");
        // `serve` alone starts it.
        commands.retain(|name| {
            !["paravane-broker", "paravane-inspector", "paravane-reader"].contains(&name.as_str())
        });
        for sections in all() {
            assert!(!sections.examples.is_empty() && !sections.exit.is_empty(), "{}", sections.command);
        }
        let mut known: Vec<_> = all().map(|sections| sections.command.to_owned()).collect();
        commands.sort();
        known.sort();
        assert_eq!(commands, known);
    }

    #[test]
    fn examples_are_valid_command_lines() {
        for (example, _) in all().flat_map(|sections| sections.examples) {
            let words = example.replace('\'', "");
            // The rest is for the shell.
            let words = words.split(" >").next().unwrap();
            Cli::command()
                .try_get_matches_from(words.split(' '))
                .unwrap_or_else(|error| panic!("{example}: {error}"));
        }
    }
}
