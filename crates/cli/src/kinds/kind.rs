//! The interface between the program and a kind of device: the kind, its specification, an open device.
//!
//! ```text
//!   Kind --parse--> Arguments --check--> Spec --open--> Opening --> Opened: Device, Observe
//!   (static)        (one device's        (validated,    (perhaps
//!                   options)             not open)      waits)
//! ```
//! Most methods have a default, so a kind implements only what differs.
use super::blk::args::Blk;
use super::changes::Change;
use super::checked::OptionError;
use super::endpoint::EndpointArgs;
use super::observe::Observe;
use super::opening::{Earlier, LinkEnds, OpenContext, Opening};
use crate::doctor::finding::Finding;
use crate::doctor::negotiated::{Check, QueueUse};
use crate::reference::names::Bit;
use crate::serve::metrics::of_kind::Metrics;
use crate::serve::report::Settings;
use crate::serve::sandbox::paths::AllowedPaths;
use crate::serve::told::Told;
use clap::{ArgMatches, Args, Command};
use paravane_command_line::sections::Sections;
use paravane_store::Location;
use paravane_vhost::KnownToDriver;
use rustix::thread::CapabilitySet;
use std::any::Any;
use std::fmt::{self, Debug};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Default of --poll-us, in microseconds.
pub(crate) const POLL_US: u32 = 50;

/// A kind of device.
///
/// [`Kind::new`] has defaults for most fields.
pub(crate) struct Kind {
    /// Name of the subcommand, the table in a file, and the label of metrics.
    pub(crate) name: &'static str,
    /// Adds its options.
    pub(crate) options: fn(Command) -> Command,
    /// Reads the options of one device. Fails if an option is invalid.
    pub(crate) parse: fn(&ArgMatches) -> Result<Box<dyn Arguments>, clap::Error>,
    /// `type` of the schema docs/interop/vhost-user.json of QEMU.
    pub(crate) device_type: &'static str,
    /// Features of the schema; empty: the schema lists none for this type.
    pub(crate) capabilities: &'static [&'static str],
    /// Texts for help, manuals and the reference.
    pub(crate) texts: Texts,
    /// Feature bits of its device type, for the reference.
    pub(crate) features: Features,
    /// Checks devices of this kind against each other; the numbers are theirs in the file.
    ///
    /// Fails if a device conflicts with another one: its number, and why.
    pub(crate) check_together: CheckTogether,
    /// Adds the facts that a driver has read from the configuration space.
    pub(crate) recorded: fn(&KnownToDriver, &mut Told),
    /// Adds optional parts of the device that the driver uses, by its accepted features.
    pub(crate) accepted: fn(u64, &mut Told),
    /// Checks of the negotiated features, for `paravane doctor --client`.
    pub(crate) checks: &'static [Check],
    /// Whether the device takes buffers of this queue as soon as the driver makes them available.
    pub(crate) takes_at_once: fn(u16) -> bool,
    /// Metrics that only devices of this kind have.
    pub(crate) metrics: Metrics,
    /// How `paravane doctor --client` judges its queues.
    pub(crate) queue_use: QueueUse,
}

/// See [`Kind::check_together`].
type CheckTogether = fn(&[(usize, &dyn Spec)]) -> Result<(), (usize, OptionError)>;

impl Kind {
    /// A kind with the options `A`.
    pub(super) const fn new<A: Arguments + Args + 'static>(
        name: &'static str,
        texts: Texts,
        features: Features,
    ) -> Self {
        Self {
            name,
            options: |command| EndpointArgs::behind(command, A::augment_args),
            parse: |matches| Ok(Box::new(A::from_arg_matches(matches)?)),
            device_type: name,
            capabilities: &[],
            texts,
            features,
            check_together: |_| Ok(()),
            recorded: |_, _| {},
            accepted: |_, _| {},
            checks: &[],
            takes_at_once: |_| true,
            metrics: Metrics { plain: &[], labelled: &[] },
            queue_use: QueueUse::Fixed,
        }
    }
}

/// Texts on a kind.
pub(crate) struct Texts {
    /// Sections of `paravane-serve-NAME(1)`.
    pub(crate) sections: Sections,
    /// "an entropy source".
    pub(crate) noun: &'static str,
    /// Summary of its table in a file.
    pub(crate) table: &'static str,
    /// A table for the example of a file.
    pub(crate) example: &'static str,
}

/// Features of a kind, for the reference.
pub(crate) struct Features {
    /// "disks".
    pub(crate) heading: &'static str,
    /// Of its device type; empty: it has none.
    pub(crate) bits: &'static [Bit],
    /// Bits that only some devices offer, and which devices.
    pub(crate) sometimes: &'static [(u64, &'static str)],
    /// Paragraph below the table.
    pub(crate) remark: &'static str,
    /// Devices that together offer all that it can, by their options; IMAGE stands for a disk image.
    pub(crate) samples: &'static [&'static [&'static str]],
}

/// The options of one device.
pub(crate) trait Arguments: Debug {
    /// Validates them without touching the host.
    ///
    /// # Errors
    /// An option is invalid.
    fn check(&self, name: &str, endpoint: &EndpointArgs) -> Result<Arc<dyn Spec>, OptionError>;
}

/// A validated device that is not open yet: the part of its specification that belongs to its kind.
pub(crate) trait Spec: Any + Debug + Send + Sync {
    fn kind(&self) -> &'static Kind;

    /// Compares two specifications.
    fn is(&self, other: &dyn Spec) -> bool;

    /// Default of --poll-us, in microseconds.
    fn default_poll(&self) -> u32 {
        POLL_US
    }

    /// The same with paths relative to `base`; `None`: it has no paths.
    fn resolved(&self, base: &Path) -> Option<Arc<dyn Spec>> {
        let _ = base;
        None
    }

    /// Host resources that other devices cannot use at the same time.
    fn claims(&self) -> Vec<Claim> {
        Vec::new()
    }

    /// Images and their layers.
    fn locations(&self) -> Vec<&Location> {
        Vec::new()
    }

    /// Name of its TAP device, which may be deleted and created again.
    fn tap(&self) -> Option<&str> {
        None
    }

    /// Name of the link to another device of the daemon. Linked devices start and stop together.
    fn link(&self) -> Option<&str> {
        None
    }

    /// Adds its paths to the sandbox. `beside`: also the folders of its images, for later reloads.
    fn allow(&self, allowed: &mut AllowedPaths, beside: bool) {
        let _ = (allowed, beside);
    }

    /// Capabilities that it needs after it is open. `reload`: it may be opened again.
    fn capabilities(&self, reload: bool) -> CapabilitySet {
        let _ = reload;
        CapabilitySet::empty()
    }

    /// Descriptors that it needs.
    fn descriptors(&self) -> Descriptors;

    /// Whether io_uring serves it.
    fn io_uring(&self) -> IoUring {
        IoUring::No
    }

    /// Findings of `paravane doctor --config` about this device and the host.
    fn examine(&self) -> Vec<Finding> {
        Vec::new()
    }

    /// Opens it.
    ///
    /// # Errors
    /// It cannot be opened.
    fn open(
        &self,
        name: &str,
        context: &OpenContext,
        link_ends: &mut LinkEnds,
        earlier: Earlier,
    ) -> Result<Opening, anyhow::Error>;

    /// Opens the device as far as two daemons can have it open: images without locks, some stores.
    ///
    /// `None`: the device has nothing exclusive and can be opened at once.
    ///
    /// # Errors
    /// It cannot be opened.
    fn prepare(&self, name: &str, context: &OpenContext) -> Result<Option<Opening>, anyhow::Error> {
        let _ = (name, context);
        Ok(None)
    }

    /// Opens the local part of a device whose servers may be slow, so that other devices need not wait.
    ///
    /// `None`: open the whole device now. `changes_user`: the process becomes another user later.
    ///
    /// # Errors
    /// A file cannot be opened.
    fn without_servers(&self, name: &str, changes_user: bool) -> Result<Option<Opening>, anyhow::Error> {
        let _ = (name, changes_user);
        Ok(None)
    }

    /// Whether it uses buffers in the order in which they were made available.
    fn in_order(&self) -> bool {
        false
    }

    /// Adds the facts that its guest reads.
    fn told(&self, told: &mut Told) {
        let _ = told;
    }

    /// Adds the optional parts that it does not offer.
    fn missing(&self, told: &mut Told) {
        let _ = told;
    }

    /// Adds the differences to `wanted`, which is of the same kind.
    fn changes(&self, wanted: &dyn Spec, all: &mut Change) {
        let _ = (wanted, all);
    }

    /// A copy with those settings of `wanted` that can change in place.
    fn with_settings(&self, wanted: &dyn Spec) -> Option<Arc<dyn Spec>> {
        let _ = wanted;
        None
    }

    /// Applies the settings that can change in place to the open device.
    fn apply(&self, observer: &dyn Observe) {
        let _ = observer;
    }

    /// Fills in its settings for the report.
    fn settings(&self, settings: &mut Settings) {
        let _ = settings;
    }

    /// The disk, if it is one.
    fn disk(&self) -> Option<&Blk> {
        None
    }
}

impl Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl dyn Spec {
    /// Name of its kind.
    pub(crate) fn name(&self) -> &'static str {
        self.kind().name
    }
}

impl PartialEq for dyn Spec {
    fn eq(&self, other: &Self) -> bool {
        self.is(other)
    }
}

impl Eq for dyn Spec {}

/// Whether a device is served by io_uring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoUring {
    No,
    /// If the host has it.
    Maybe,
    /// Nothing else was asked for.
    Only,
}

/// Descriptors that a device needs.
pub(crate) struct Descriptors {
    /// Beside those of its endpoint and its queues.
    pub(crate) own: u64,
    /// Number of its queues.
    pub(crate) queues: u64,
}

/// A host resource that a device uses exclusively, or shares.
pub(crate) struct Claim {
    /// The option that names it.
    pub(crate) option: &'static str,
    pub(crate) resource: Resource,
    /// Devices may use it together if all of them share it.
    pub(crate) shares: bool,
    /// The device changes it.
    pub(crate) writes: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Resource {
    Image(Location),
    Interface(String),
    /// A socket or a file that is written to.
    Path(PathBuf),
}
