//! The new daemon's side.
use super::super::control::{self, Control};
use super::super::exports::Arrivals;
use super::super::metrics::Metrics;
use super::super::told::Told;
use super::super::trace::lines::{Ask, HandOverRequest};
use super::super::wire::{Parcel, Wire};
use super::{Message, Offer, Offered, PATIENCE, VERSION};
use anyhow::{Context, anyhow, bail};
use paravane_export::Handover;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// A connection to a daemon that offers its devices.
pub(crate) struct Taker {
    wire: Arc<Wire<Message>>,
    offer: Offer,
    path: PathBuf,
}

/// What a daemon gives besides its devices.
pub(crate) struct Took {
    pub(crate) control: Control,
    pub(crate) metrics: Option<Metrics>,
    pub(crate) arrivals: Arrivals,
    pub(crate) take_overs: u64,
}

/// The control socket of the daemon to take over from: `path`, else that of the only one.
///
/// # Errors
/// There is none, or there are several.
pub(crate) fn find(path: Option<&Path>) -> Result<PathBuf, anyhow::Error> {
    if path == Some(Path::new("off")) {
        bail!("--take-over asks the daemon behind --control: name its socket, not `off`");
    }
    control::only_daemon(path, " to take over from: omit --take-over")
}

impl Taker {
    /// Asks the daemon at `path` for the devices `wanted`, and changes nothing.
    ///
    /// # Errors
    /// It does not answer, refuses, or serves other devices or images.
    pub(crate) fn ask(path: &Path, wanted: &[Offered]) -> Result<Self, anyhow::Error> {
        let ask = || {
            let request = Ask::HandOver(HandOverRequest { version: VERSION });
            let stream = control::request(path, &request).context("cannot reach the running daemon")?;
            let wire = Wire::new(stream, PATIENCE)?;
            let offer = match wire.receive()?.map(|parcel| parcel.message) {
                Some(Message::Offer(offer)) => offer,
                Some(Message::Refused(why)) => bail!("refused: {why}"),
                Some(_) => bail!("the running daemon sends messages out of order"),
                None => bail!("the running daemon has closed the connection"),
            };
            if let Some(difference) = difference(&offer.devices, wanted) {
                bail!(
                    "{difference}; take over with the devices of the running daemon, then change them by SIGHUP"
                );
            }
            Ok(Self { wire: Arc::new(wire), offer, path: path.to_owned() })
        };
        ask().with_context(|| format!("cannot take over from {}", path.display()))
    }

    /// What the guests were told of their devices, by device.
    pub(crate) fn told(&self) -> HashMap<String, Told> {
        self.offer.devices.iter().map(|device| (device.name.clone(), device.told.clone())).collect()
    }

    /// Whether the daemon serves its metrics at this address.
    pub(crate) fn has_metrics(&self, address: SocketAddr) -> bool {
        self.offer.metrics == Some(address)
    }

    /// Has the daemon begin, and receives its listening sockets.
    ///
    /// `metrics`: take that of the metrics.
    ///
    /// # Errors
    /// The daemon has failed or refuses.
    pub(crate) fn begin(self, metrics: bool) -> Result<Took, anyhow::Error> {
        let Self { wire, offer, path } = self;
        let Offer { pid, version, devices, metrics: address, take_overs } = offer;
        tracing::info!(pid, version, devices = devices.len(), "taking over");
        let begin = || {
            wire.say(&Message::Begin)?;
            let one = |wanted: Message| {
                let parcel = wire.receive()?.context("it has closed the connection")?;
                match parcel.message {
                    Message::Refused(why) => Err(anyhow!("refused: {why}")),
                    message if message == wanted => {
                        parcel.fds.into_iter().next().context("it has sent no socket")
                    }
                    _ => Err(anyhow!("it sends messages out of order")),
                }
            };
            let control = UnixListener::from(one(Message::Control)?);
            let port = address.map(|_| one(Message::Metrics)).transpose()?;
            Ok::<_, anyhow::Error>((control, port))
        };
        let (listener, port) =
            begin().with_context(|| format!("cannot take over from {}", path.display()))?;
        let port = port.filter(|_| metrics).map(|port| Metrics::from_listener(port.into())).transpose()?;
        let (mut senders, mut receivers) = (HashMap::new(), HashMap::new());
        for Offered { name, .. } in devices {
            let (sender, receiver) = channel();
            senders.insert(name.clone(), sender);
            receivers.insert(name, receiver);
        }
        // The giver has a deadline; its end closes the connection.
        wire.wait_at_most(None);
        let answers = wire.clone();
        let answer = move |name: &str, result: Result<(), String>| {
            let name = name.to_owned();
            // The old daemon may have died.
            drop(answers.say(&match result {
                Ok(()) => Message::Taken(name),
                Err(why) => Message::Failed { name, why },
            }));
        };
        std::thread::Builder::new().name("take-over".into()).spawn(move || receive(&wire, senders))?;
        Ok(Took {
            control: Control { path, listener },
            metrics: port,
            arrivals: Arrivals { receivers, answer: Arc::new(answer) },
            take_overs: take_overs + 1,
        })
    }
}

/// Passes the devices on as they arrive. Those that do not arrive are started anew.
fn receive(wire: &Wire<Message>, mut senders: HashMap<String, Sender<Handover>>) {
    loop {
        match wire.receive() {
            Ok(Some(Parcel { message: Message::Device(name), record, fds })) => {
                if let Some(sender) = senders.remove(&name) {
                    drop(sender.send(Handover { record, fds }));
                }
            }
            Ok(Some(Parcel { message: Message::Failed { name, why }, .. })) => {
                tracing::error!(device = name, "not handed over, its client has to reconnect: {why}");
            }
            Ok(Some(_)) => {}
            // Now the old daemon has no image open, or soon will not.
            Ok(None) => break,
            Err(error) => {
                tracing::error!("the connection to the old daemon failed: {error}");
                break;
            }
        }
    }
    // The kernel closes the connection of a dead process before its other descriptors, perhaps.
    if !senders.is_empty() {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The first difference between the devices of two daemons.
fn difference(offered: &[Offered], wanted: &[Offered]) -> Option<String> {
    let find = |list: &[Offered], name: &str| list.iter().find(|device| device.name == name).cloned();
    for device in offered {
        match find(wanted, &device.name) {
            None => return Some(format!("only the running daemon has the device {}", device.name)),
            Some(wanted) if (&wanted.kind, &wanted.endpoint) != (&device.kind, &device.endpoint) => {
                return Some(format!(
                    "device {} is {} ({}) in the running daemon, and {} ({}) here",
                    device.name, device.kind, device.endpoint, wanted.kind, wanted.endpoint
                ));
            }
            Some(wanted) => {
                if let (Some(theirs), Some(ours)) = (&device.image, &wanted.image)
                    && !theirs.is(ours)
                {
                    return Some(format!(
                        "device {} has the image {} ({}) in the running daemon, since a snapshot perhaps, and {} ({}) \
                         here",
                        device.name, theirs.location, theirs.format, ours.location, ours.format
                    ));
                }
            }
        }
    }
    let new = wanted.iter().find(|wanted| find(offered, &wanted.name).is_none());
    new.map(|new| format!("the running daemon has no device {}", new.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::endpoint::Endpoint;
    use crate::kinds::rng::RngSpec;
    use crate::serve::spec::DeviceSpec;
    use crate::serve::take_over::image::OfferedImage;

    #[test]
    fn the_devices_must_be_the_same() {
        let spec = |name: &str, socket: &str| DeviceSpec {
            name: name.into(),
            endpoint: Endpoint::Listen(socket.into()),
            workers: Some(1),
            longest_poll: Duration::ZERO,
            latencies: true,
            packed: true,
            kind: Arc::new(RngSpec),
        };
        let [a, b, moved] = [spec("a", "/a"), spec("b", "/b"), spec("b", "/c")];
        let all = |specs: &[DeviceSpec]| {
            let offer = |spec: &DeviceSpec| Offered::new(spec, None, Told::default());
            specs.iter().map(offer).collect::<Vec<_>>()
        };
        let offered = all(&[a.clone(), b.clone()]);
        assert_eq!(difference(&offered, &all(&[b.clone(), a.clone()])), None);
        let told = |wanted: &[DeviceSpec]| difference(&offered, &all(wanted)).unwrap();
        assert!(told(std::slice::from_ref(&a)).contains("only the running daemon has the device b"));
        assert!(
            told(&[a.clone(), moved]).contains("rng (listen /b) in the running daemon, and rng (listen /c)")
        );
        assert!(told(&[a, b, spec("c", "/d")]).contains("no device c"));
    }

    #[test]
    fn the_images_must_be_the_same() {
        let image = |location: &str, format: &str, file| OfferedImage {
            location: location.to_owned(),
            format: format.to_owned(),
            file,
        };
        let disk = |image| Offered {
            name: "a".to_owned(),
            kind: "blk".to_owned(),
            endpoint: "listen /a".to_owned(),
            image,
            told: Told::default(),
        };
        let differ = |one, other| difference(&[disk(one)], &[disk(other)]);
        let base = || Some(image("/base.img", "raw", Some([1, 7])));
        assert_eq!(differ(base(), base()), None);
        assert_eq!(differ(base(), Some(image("/link", "raw", Some([1, 7])))), None);
        // An earlier version, or a device that is not served; and a store.
        assert_eq!(differ(None, base()), None);
        let store = || Some(image("nbd://host/vm", "raw", None));
        assert_eq!(differ(store(), store()), None);
        for other in [
            image("/base.img", "raw", Some([1, 8])),
            image("/base.img", "qcow2", Some([1, 7])),
            image("/top.qcow2", "qcow2", Some([1, 9])),
            image("/base.img", "raw", None),
        ] {
            let told = differ(base(), Some(other)).unwrap();
            assert!(told.contains("device a has the image /base.img (raw) in the running daemon"), "{told}");
        }
    }
}
