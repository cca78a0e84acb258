//! Texts that all kinds share.
use paravane_command_line::sections::{NONE, Sections, USAGE};

/// A command that serves one device.
pub(super) const SERVE_ONE: Sections =
    Sections { exit: SERVE_EXIT, see_also: &["paravane-serve(1)", "paravane-devices.toml(5)"], ..NONE };

/// Exit status of a command that serves.
pub(crate) const SERVE_EXIT: &[(u8, &str)] = &[
    (
        0,
        "The daemon ended by a signal and finished all requests, or handed its devices over; with --check, the configuration is valid.",
    ),
    (1, "The host failed, requests in flight were not finished in time, or a handover failed."),
    USAGE,
    (3, "With --check --against: a reload would refuse a change, as a VMM would have to reconnect."),
    (130, "A second SIGTERM or SIGINT ended the wait for requests in flight."),
];
