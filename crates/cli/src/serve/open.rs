//! Opens devices by their specifications.
use super::spec::DeviceSpec;
use super::take_over::Offered;
use super::take_over::image::OfferedImage;
use super::told::Told;
use crate::failure::one_line;
use crate::kinds::opening::{Earlier, LinkEnds, OpenContext, Opening};
use crate::serve::sandbox::paths::AllowedPaths;
use anyhow::anyhow;
use paravane_device::LogDevice;
use paravane_device::blk::FileId;
use paravane_export::Endpoint;
use paravane_vhost::ExportConfig;

/// Opens a device. An error names the sandbox if that may be the cause.
///
/// The two cards of a link are opened one after the other, with the same `link_ends`.
///
/// # Errors
/// The device cannot be opened.
pub(crate) fn open(
    spec: &DeviceSpec,
    link_ends: &mut LinkEnds,
    context: &OpenContext,
    earlier: Earlier,
) -> Result<Opening, anyhow::Error> {
    // Inherited by the threads that the device starts.
    let _named = LogDevice::enter(Some(spec.name.as_str().into()));
    spec.kind.open(&spec.name, context, link_ends, earlier).map_err(|error| {
        match context.allowed.as_deref() {
            Some(allowed) => explained(error, spec, allowed),
            None => error,
        }
    })
}

/// Adds why access may have been refused: by the sandbox only if it does not allow what `spec` needs.
fn explained(error: anyhow::Error, spec: &DeviceSpec, allowed: &AllowedPaths) -> anyhow::Error {
    let cause = |error: &anyhow::Error| {
        let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
        causes
            .find(|cause| cause.kind() == std::io::ErrorKind::PermissionDenied)
            .map(|cause| cause.raw_os_error())
    };
    let Some(number) = cause(&error) else { return error };
    let mut wanted = AllowedPaths::default();
    spec.allow(&mut wanted, false);
    let why = match spec.kind.tap() {
        Some(_) if allowed.net_admin => return error,
        Some(_) => {
            "the daemon keeps CAP_NET_ADMIN only if its file has a TAP device at startup: restart it".into()
        }
        None if !allowed.covers(&wanted) => allowed.remark(),
        None if number == Some(libc::EPERM) => "is it immutable or append-only? see lsattr".into(),
        None => format!("the daemon is user {}", rustix::process::geteuid().as_raw()),
    };
    anyhow!("{} ({why})", one_line(&error))
}

/// Opens a device as far as the daemon that still serves it allows.
///
/// # Errors
/// The device cannot be opened.
pub(crate) fn prepare(
    spec: &DeviceSpec,
    link_ends: &mut LinkEnds,
    context: &OpenContext,
) -> Result<Opening, anyhow::Error> {
    let _named = LogDevice::enter(Some(spec.name.as_str().into()));
    match spec.kind.prepare(&spec.name, context)? {
        Some(opening) => Ok(opening),
        None => open(spec, link_ends, context, Earlier::default()),
    }
}

/// Opens what needs no server; see [`Spec::without_servers`](crate::kinds::kind::Spec::without_servers).
///
/// # Errors
/// A file cannot be opened.
pub(crate) fn without_servers(
    spec: &DeviceSpec,
    changes_user: bool,
) -> Result<Option<Opening>, anyhow::Error> {
    let _named = LogDevice::enter(Some(spec.name.as_str().into()));
    spec.kind.without_servers(&spec.name, changes_user)
}

/// The export of a device, by its specification.
pub(crate) fn export_config(spec: &DeviceSpec, endpoint: Endpoint) -> ExportConfig {
    let mut config = ExportConfig::new(spec.name.clone(), endpoint);
    config.workers = spec.workers.unwrap_or(1).into();
    config.longest_poll = spec.longest_poll;
    config.latencies = spec.latencies;
    config.packed = spec.packed;
    config.in_order = spec.kind.in_order();
    config
}

impl Opening {
    /// What another daemon must offer for this device.
    pub(crate) fn wanted(&self, spec: &DeviceSpec) -> Offered {
        let file = match self {
            Self::Device(_) | Self::Unlocked(_) => self.file_id(),
            Self::Ahead(_) | Self::Late(_) => {
                let image = spec.kind.locations().first().and_then(|image| image.path());
                image.and_then(|image| FileId::at(image).ok())
            }
        };
        Offered::new(spec, file, Told::default())
    }

    /// Checks that a guest goes on with the image that it used last, if no mark shows that.
    ///
    /// An overlay that is gone was merged.
    ///
    /// # Errors
    /// It is another one.
    pub(crate) fn check_image(&self, spec: &DeviceSpec, last: &OfferedImage) -> Result<(), anyhow::Error> {
        match self.wanted(spec).image {
            Some(now) if !self.has_marks() && !last.goes_on_with(&now) && last.is_there() => Err(anyhow!(
                "its guest used {} last, and this is {}: after a snapshot, name the overlay and its layers, as `paravane \
                 disk snapshot` has printed them",
                last.location,
                now.location
            )),
            _ => Ok(()),
        }
    }

    /// Checks that the guest would be told of its device what it was told `before`.
    ///
    /// A disk keeps the block size of its guest, unless its specification names another one. `is_kept`: the
    /// daemon has a descriptor store.
    ///
    /// # Errors
    /// The device differs, or its image cannot be used.
    pub(crate) fn check_told(
        &mut self,
        spec: &DeviceSpec,
        before: &Told,
        is_kept: bool,
    ) -> Result<(), anyhow::Error> {
        self.keep(before);
        let mut new = spec.told_planned(is_kept);
        self.told(&mut new)?;
        before.difference(&new).map_or(Ok(()), |difference| Err(anyhow!(difference)))
    }
}
