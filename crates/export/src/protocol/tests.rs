//! A protocol of one message, which shows that an export knows no other.
use super::*;
use crate::handover::REQUIRED;
use crate::{Endpoint, Export, ExportConfig, ExportError, Handover, Keeper, Kept};
use paravane_device::rng::Rng;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Each message begins with the length of its text, in 4 bytes, and 8 zeroes.
pub(crate) const FRAMING: Framing = Framing {
    header: 12,
    max_message: 72,
    max_fds: 2,
    payload: |header| Ok(u32::from_le_bytes(header[..4].try_into()?) as usize),
};

/// Collects letters, and answers each message with all of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Letters;

impl Letters {
    pub(crate) const NUMBER: u32 = 0x6c65;
}

const TEXT: u32 = 3;

impl Protocol for Letters {
    fn number(&self) -> u32 {
        Self::NUMBER
    }

    fn name(&self) -> &'static str {
        "letters"
    }

    fn max_queues(&self) -> usize {
        1
    }

    fn framing(&self) -> &'static Framing {
        &FRAMING
    }

    fn check(&self, sections: &[Section]) -> Result<(), HandoverError> {
        match sections.iter().find(|section| section.tag > REQUIRED | 1) {
            Some(section) => Err(HandoverError::Section(section.tag)),
            None => Ok(()),
        }
    }

    fn begin(
        &self,
        device: Box<dyn Device>,
        _threads: Arc<DeviceThreads>,
        _status: Arc<SharedStatus>,
        _offer: Offer,
    ) -> Result<Box<dyn Session>, (Box<dyn Device>, SessionEnd)> {
        Ok(Box::new(LettersSession { device, text: Vec::new() }))
    }
}

struct LettersSession {
    device: Box<dyn Device>,
    text: Vec<u8>,
}

fn message(payload: &[u8]) -> Vec<u8> {
    [&(payload.len() as u32).to_le_bytes(), &[0; 8][..], payload].concat()
}

impl Session for LettersSession {
    fn device(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    fn track(&mut self) -> Result<(), SessionEnd> {
        Ok(())
    }

    fn replay(&mut self, sections: Vec<Section>, _hold: bool) -> Result<(), SessionEnd> {
        self.text = sections.into_iter().flat_map(|section| section.value).collect();
        Ok(())
    }

    fn release(&mut self) -> Result<(), SessionEnd> {
        Ok(())
    }

    fn prepare(&mut self, _message: &[u8]) -> Result<bool, SessionEnd> {
        Ok(false)
    }

    fn answer(&mut self, said: &[u8], _fds: Vec<OwnedFd>) -> (Option<Answer>, Result<(), SessionEnd>) {
        if said[12..].contains(&b'!') {
            return (None, Err("no letter: !".into()));
        }
        self.text.extend(&said[12..]);
        (Some((message(&self.text), None)), Ok(()))
    }

    fn config_changed(&mut self) {}

    fn translates(&self) -> bool {
        false
    }

    fn rest(&mut self) -> Option<Duration> {
        None
    }

    fn descriptors(&self) -> Vec<(u8, BorrowedFd<'_>)> {
        Vec::new()
    }

    fn woken(&mut self, _number: u8) -> Result<bool, SessionEnd> {
        Ok(false)
    }

    fn tick(&mut self) -> Result<(), SessionEnd> {
        Ok(())
    }

    fn stop(&mut self) -> Result<(), HandoverError> {
        Ok(())
    }

    fn save(&mut self, _successor: Successor, into: &mut dyn Sections) -> Result<(), HandoverError> {
        into.push(TEXT, self.text.clone(), &[])
    }

    fn leave(self: Box<Self>) -> (Box<dyn Device>, Box<dyn Any + Send>) {
        (self.device, Box::new(()))
    }

    fn end(self: Box<Self>) -> Box<dyn Device> {
        self.device
    }
}

/// A client that waits for its answers at most this long.
fn client(path: &Path) -> UnixStream {
    let client = UnixStream::connect(path).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    client
}

fn say(mut client: &UnixStream, text: &[u8]) -> io::Result<Vec<u8>> {
    client.write_all(&message(text))?;
    let mut header = [0; 12];
    client.read_exact(&mut header)?;
    let mut answer = vec![0; header[0].into()];
    client.read_exact(&mut answer)?;
    Ok(answer)
}

fn config(path: &Path) -> ExportConfig<Letters> {
    ExportConfig::new("letters", Endpoint::Listen(path.to_owned()))
}

fn wait_for<T>(mut found: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < end, "nothing after 30 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_export_serves_a_protocol_that_it_does_not_know() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let export = Export::start(config(&path), Box::new(Rng::new())).unwrap();
    let first = client(&path);
    assert_eq!(say(&first, b"ab").unwrap(), b"ab");
    assert_eq!(say(&first, b"c").unwrap(), b"abc");
    say(&first, b"!").unwrap_err();
    let status = wait_for(|| Some(export.status()).filter(|status| status.protocol_errors == 1));
    assert_eq!(status.last_error.as_deref(), Some("no letter: !"));
    // A frame that is too long.
    let second = client(&path);
    (&second).write_all(&message(&[0; 61])[..12]).unwrap();
    let status = wait_for(|| Some(export.status()).filter(|status| status.protocol_errors == 2));
    assert_eq!(status.last_error.as_deref(), Some("message of 73 bytes: at most 72"));
    assert_eq!(say(&client(&path), b"d").unwrap(), b"d");
}

#[test]
fn a_session_of_any_protocol_is_handed_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let export = Export::start(config(&path), Box::new(Rng::new())).unwrap();
    let client = client(&path);
    assert_eq!(say(&client, b"ab").unwrap(), b"ab");
    export.begin_hand_over();
    let handover = wait_for(|| export.take_handover()).unwrap();
    assert_eq!(handover.session_sections().unwrap(), [(TEXT, &b"ab"[..])]);
    // Only by an export of the same protocol.
    let other = ExportConfig { protocol: Other, ..other_config() };
    let refused = Export::resume(other, Box::new(Rng::new()), handover.try_clone().unwrap()).unwrap_err();
    let is_named = |error: &HandoverError| {
        matches!(error, HandoverError::Protocol { recorded: Letters::NUMBER, own: 0 })
    };
    assert!(matches!(&refused, ExportError::Handover(error) if is_named(error)), "{refused}");
    let _next = Export::resume(config(&path), Box::new(Rng::new()), handover).unwrap();
    assert_eq!(say(&client, b"c").unwrap(), b"abc");
}

/// As [`Letters`], with the number of vhost-user.
#[derive(Debug, Default)]
struct Other;

fn other_config() -> ExportConfig<Other> {
    ExportConfig::new("other", Endpoint::Handover)
}

impl Protocol for Other {
    fn number(&self) -> u32 {
        0
    }

    fn name(&self) -> &'static str {
        "other"
    }

    fn max_queues(&self) -> usize {
        0
    }

    fn framing(&self) -> &'static Framing {
        &FRAMING
    }

    fn check(&self, _sections: &[Section]) -> Result<(), HandoverError> {
        Ok(())
    }

    fn begin(
        &self,
        device: Box<dyn Device>,
        threads: Arc<DeviceThreads>,
        status: Arc<SharedStatus>,
        offer: Offer,
    ) -> Result<Box<dyn Session>, (Box<dyn Device>, SessionEnd)> {
        Letters.begin(device, threads, status, offer)
    }
}

#[test]
fn a_device_with_more_queues_than_the_protocol_addresses_is_refused() {
    let refused = Export::start(other_config(), Box::new(Rng::new())).unwrap_err();
    assert_eq!(refused.to_string(), "the device has 1 queues; other addresses at most 0");
}

/// Copies of descriptors, as another process would have them.
#[derive(Clone, Debug, Default)]
struct Copies(Arc<Mutex<HashMap<u64, OwnedFd>>>);

impl Keeper for Copies {
    fn put(&mut self, number: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(number, fd.try_clone_to_owned()?);
        Ok(())
    }

    fn remove(&mut self, number: u64) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
        Ok(())
    }
}

impl Copies {
    /// What a process finds that starts now.
    fn kept(&self) -> Vec<(u64, OwnedFd)> {
        let copies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        copies.iter().map(|(number, fd)| (*number, fd.try_clone().unwrap())).collect()
    }
}

#[test]
fn a_session_of_any_protocol_survives_its_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let copies = Copies::default();
    let keeper = || Some(Box::new(copies.clone()) as Box<dyn Keeper>);
    let export =
        Export::start(ExportConfig { keeper: keeper(), ..config(&path) }, Box::new(Rng::new())).unwrap();
    let client = client(&path);
    assert_eq!(say(&client, b"ab").unwrap(), b"ab");
    assert_eq!(say(&client, b"c").unwrap(), b"abc");
    // The record follows the answer.
    let text = |kept: &Kept| -> Vec<u8> {
        let Handover { .. } = kept.handover();
        kept.handover().session_sections().unwrap().iter().flat_map(|(_, value)| value.to_vec()).collect()
    };
    let kept = wait_for(|| Kept::open(copies.kept()).unwrap().filter(|kept| text(kept) == b"abc"));
    // Its thread serves nobody from here on.
    export.begin_leave();
    wait_for(|| export.has_ended().then_some(()));
    let _next =
        Export::recover(ExportConfig { keeper: keeper(), ..config(&path) }, Box::new(Rng::new()), kept)
            .unwrap();
    assert_eq!(say(&client, b"d").unwrap(), b"abcd");
}
