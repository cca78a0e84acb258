//! How the devices of a group begin: at the start, by a reload, and again after a failure.
//!
//! ```text
//!   opened ahead, or now --> locked --> the kept session is resumed, if there is one --> Served
//!      '-- a failure ---------'-> Failed, the session stays kept --1, 2, 4 ... 30 s, or SIGHUP--> again
//! ```
//! A session is taken only when all devices of the group are open. So what keeps a device from being
//! opened costs its client nothing but time.
use super::super::open;
use super::super::report;
use super::super::shelf::KeptSession;
use super::super::spec::{DeviceSpec, told_recorded};
use super::super::take_over::image::OfferedImage;
use super::super::told::{self, Told};
use super::failed::failed_by;
use super::lock_wait::LockWait;
use super::served::{ServedDevice, Session};
use super::state::{Exports, Inner, Start, all_or_none};
use crate::failure::one_line;
use crate::kinds::opening::{Earlier, LinkEnds, Opened, Opening};
use anyhow::{Context, anyhow};
use paravane_device::LogDevice;
use paravane_dma::MappingQuota;
use paravane_vhost::KnownToDriver;
use std::collections::HashMap;
use std::io;

impl Exports {
    /// Opens and serves all devices of the group `id`, or none. `ahead`: those that are open, by name.
    pub(super) fn begin_group(
        &self,
        id: u64,
        specs: &[DeviceSpec],
        mut ahead: HashMap<String, Opening>,
        wait: &LockWait,
    ) -> Start {
        let mut link_ends = LinkEnds::default();
        let mut members = Vec::new();
        for spec in specs {
            let _named = LogDevice::enter(Some(spec.name.as_str().into()));
            let quota = self.0.context.pool.quota();
            match self.open_member(spec, ahead.remove(&spec.name), &mut link_ends, wait) {
                Ok(device) => members.push((device, quota)),
                Err(error) => return Err(failed_by(specs, spec, &error)),
            }
        }
        // Until the sessions of both cards of a link are resumed.
        let _holds: Vec<_> = members.iter_mut().map(|(device, _)| device.hold.take()).collect();
        all_or_none(specs, members, |spec, (device, quota)| self.serve_member(id, spec, device, quota, wait))
    }

    /// Opens a device, and locks its image.
    fn open_member(
        &self,
        spec: &DeviceSpec,
        ahead: Option<Opening>,
        link_ends: &mut LinkEnds,
        wait: &LockWait,
    ) -> Result<Opened, anyhow::Error> {
        let context = &self.0.context;
        let kept = self.inner().kept.get(&spec.name).map(|session| earlier(spec, session)).transpose()?;
        // A record that cannot be read is refused when it is resumed.
        let note = self.inner().kept.get(&spec.name).and_then(|session| session.kept.note().ok());
        let (told, earlier) = kept.unwrap_or_default();
        let mut opening = match ahead {
            Some(Opening::Late(_)) | None => open::open(spec, link_ends, &context.opening, earlier)?,
            Some(opening) => opening,
        };
        if let Some(told) = told {
            opening.check_told(spec, &told, context.shelf.is_some()).context(told::NOT_RESUMED)?;
        }
        if let Some(last) = note.as_deref().and_then(OfferedImage::from_note) {
            opening.check_image(spec, &last).context(told::NOT_RESUMED)?;
        }
        wait.wait(&spec.name, opening.go_on(&context.opening)?)
    }

    /// Serves a device that is open, with the session that was kept for it.
    fn serve_member(
        &self,
        group: u64,
        spec: &DeviceSpec,
        device: Opened,
        quota: MappingQuota,
        wait: &LockWait,
    ) -> Result<ServedDevice, anyhow::Error> {
        let context = &self.0.context;
        let session = self.take_session(group, &spec.name)?;
        let Some(KeptSession { kept, numbers }) = session else {
            return ServedDevice::start(spec.clone(), device, quota, context, &self.0.changed, None);
        };
        let session = Some(Session::Kept(kept));
        let resumed = ServedDevice::start(spec.clone(), device, quota, context, &self.0.changed, session);
        resumed.or_else(|error| {
            if let Some(shelf) = &context.shelf {
                shelf.forget(&spec.name, &numbers);
            }
            self.not_resumed(spec, &error);
            self.start_anew(spec, wait)
        })
    }

    pub(super) fn not_resumed(&self, spec: &DeviceSpec, error: &anyhow::Error) {
        let (name, why) = (&spec.name, one_line(error));
        tracing::error!(device = name, "session not resumed, the client has to reconnect: {why}");
    }

    /// The session that was kept for a device of this group.
    fn take_session(&self, group: u64, device: &str) -> Result<Option<KeptSession>, anyhow::Error> {
        let mut inner = self.inner();
        // A reload that has changed the device leaves the session to the new one.
        match inner.groups.iter().any(|wanted| wanted.id == group) {
            true => Ok(inner.kept.remove(device)),
            false => Err(anyhow!("removed or changed while it was opened")),
        }
    }
}

/// What the guest of a session was told of its device, if it is known, and what the device had.
pub(crate) fn earlier(spec: &DeviceSpec, session: &KeptSession) -> io::Result<(Option<Told>, Earlier)> {
    // A record that cannot be read is refused when it is resumed.
    let known = KnownToDriver::recorded(session.kept.handover()).ok().flatten();
    let told = known.map(|known| told_recorded(spec.kind.kind(), &known));
    let earlier = Earlier { fds: session.kept.device_fds()?, told: told.clone().unwrap_or_default() };
    Ok((told, earlier))
}

impl Inner {
    /// Devices that are not served, with what is known of them.
    pub(super) fn failed(&self) -> impl Iterator<Item = report::Failed> {
        let failed = self.groups.iter().flat_map(|group| {
            let retry_s = group.time_to_retry().map(|time| time.as_secs_f64());
            group.failures().iter().map(move |failed| (failed, retry_s))
        });
        failed.map(|(failed, retry_s)| {
            let kept = self.kept.contains_key(&failed.name);
            report::Failed { retry_s, kept, ..failed.clone() }
        })
    }
}
