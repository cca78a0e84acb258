//! Keeping sessions for a process that starts when this one has died.
//!
//! A [`Keeper`] has copies of all descriptors of an export, in a process that outlives this one. One
//! of them is a record file ([`crate::record_file`]), which says what the others are. For each
//! message of the client:
//!
//! ```text
//!   peeked --may it start queues?--> record: begun --> done --did it change anything?--> record: done, answer
//!     |            no: ----------------------------------^       no: -----------------------.     |
//!     |                                                                                     v     v
//!     '<-- record: no more pending <-- message taken off the connection, and answered, in one step
//! ```
//! A process that dies before that step leaves the message on the connection, and its successor does
//! it again or, if it is done, answers it. After that step nothing is left to do. The kernel knows on
//! which side of the step a process has died: the peek offset of the connection (SO_PEEK_OFF) is the
//! length of the message until that is taken.
//!
//! Queues go on from an in-flight region, of the client or else of the session
//! (`inflight`), so no message and no record is on the path of a request. That of a queue
//! which starts anew is cleared before "begun" is recorded: a successor starts no queue before the
//! message is done, and finds the region either new or in use.
//!
//! Without io_uring the step is two: a successor that cannot know whether a message was answered
//! disconnects the client.
mod same_file;

use crate::export::note::Note;
use crate::handover::record::{ConnectionState, EndpointState, ExportState, Pending, note_of};
use crate::handover::{Handover, HandoverError};
use crate::protocol::{Collected, Session, Successor};
use crate::record_file::{RecordFile, RecordFileError};
use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use thiserror::Error;

/// Number of the record file among the descriptors of an export.
pub const RECORD: u64 = 0;
/// Maximum length of a record in bytes.
///
/// One of 256 queues has less than half of it. The file takes memory for what is written only.
const CAPACITY: usize = 1 << 20;
/// Length of the number of a descriptor in a record.
const NUMBER: usize = 8;

/// Keeps copies of an export's descriptors when this process ends.
pub trait Keeper: Debug + Send {
    /// Keeps a copy of a descriptor under a number that is not in use.
    ///
    /// # Errors
    /// There is no room, or the keeper has ended. [`io::ErrorKind::WouldBlock`]: not yet, see
    /// [`Export::keep`](crate::Export::keep).
    fn put(&mut self, number: u64, fd: BorrowedFd<'_>) -> io::Result<()>;

    /// Closes the copy of a descriptor.
    ///
    /// # Errors
    /// The keeper has ended.
    fn remove(&mut self, number: u64) -> io::Result<()>;
}

/// Kept descriptors that make no export.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KeptError {
    /// There is no record file, or several.
    #[error("{0} record files among the descriptors, not one")]
    Files(usize),
    /// The record file is unusable.
    #[error(transparent)]
    File(#[from] RecordFileError),
    /// The record names a descriptor that is not there.
    #[error("descriptor {0} is missing: the descriptor store was full (FileDescriptorStoreMax= of systemd)")]
    Missing(u64),
    /// A descriptor cannot be duplicated.
    #[error("cannot duplicate a descriptor: {0}")]
    Fd(#[source] io::Error),
    /// The record is cut off.
    #[error("the list of descriptors is cut off")]
    List,
}

/// What a dead process has left of an export, for [`Export::recover`](crate::Export::recover).
#[derive(Debug)]
pub struct Kept {
    pub(crate) handover: Handover,
    pub(crate) keeping: Active,
    device: Vec<OwnedFd>,
}

impl Kept {
    /// Finds the export among kept descriptors, each with its number.
    ///
    /// `None`: the process had recorded that there is nothing to continue.
    ///
    /// # Errors
    /// The descriptors are not those of an export. All are closed.
    pub fn open(fds: Vec<(u64, OwnedFd)>) -> Result<Option<Self>, KeptError> {
        let stored: HashSet<u64> = fds.iter().map(|(number, _)| *number).collect();
        let next = stored.iter().max().map_or(RECORD, |last| last.saturating_add(1)).max(RECORD + 1);
        let (mut files, others): (Vec<_>, Vec<_>) =
            fds.into_iter().partition(|(number, _)| *number == RECORD);
        let file = match (files.len(), files.pop()) {
            (1, Some((_, file))) => file,
            (count, _) => return Err(KeptError::Files(count)),
        };
        let others: HashMap<u64, OwnedFd> = others.into_iter().collect();
        let (file, content) = RecordFile::open(file)?;
        let Some(content) = content.filter(|content| !content.is_empty()) else { return Ok(None) };
        let (list, of_device, record) = split(&content).ok_or(KeptError::List)?;
        let (mut device, mut fds) = (Vec::new(), Vec::new());
        for number in list {
            let kept = others.get(&number).ok_or(KeptError::Missing(number))?;
            let fd = kept.try_clone().map_err(KeptError::Fd)?;
            if device.len() < of_device { &mut device } else { &mut fds }.push(fd);
        }
        let handover = Handover { record: record.to_vec(), fds };
        let keeping = Active { file, numbers: HashMap::new(), known: others, next, stored, last: content };
        Ok(Some(Self { handover, keeping, device }))
    }

    /// The state of the export.
    pub fn handover(&self) -> &Handover {
        &self.handover
    }

    /// The note of the owner that had it kept ([`ExportConfig::note`](crate::ExportConfig::note)).
    ///
    /// Empty: an earlier version, or there was none.
    ///
    /// # Errors
    /// As [`Handover::session_sections`].
    pub fn note(&self) -> Result<Vec<u8>, HandoverError> {
        note_of(&self.handover.record)
    }

    /// Copies of the descriptors of the device: those of a network card's TAP device, for example.
    ///
    /// Open the device with them.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn device_fds(&self) -> io::Result<Vec<OwnedFd>> {
        self.device.iter().map(OwnedFd::try_clone).collect()
    }
}

/// The numbers of descriptors at the beginning of a record, how many of them are the device's, and
/// the rest.
fn split(content: &[u8]) -> Option<(Vec<u64>, usize, &[u8])> {
    let (counts, rest) = content.split_first_chunk::<8>()?;
    let [count, device] = [0, 4].map(|at| u32::from_le_bytes(std::array::from_fn(|byte| counts[at + byte])));
    let len = (count as usize).checked_mul(NUMBER)?;
    let (list, record) = rest.split_at_checked(len)?;
    let list = list.as_chunks::<NUMBER>().0.iter().map(|number| u64::from_le_bytes(*number));
    (device <= count).then(|| (list.collect(), device as usize, record))
}

/// The keeping of an export's state.
#[derive(Debug)]
pub(crate) struct Keeping {
    keeper: Box<dyn Keeper>,
    fixed: Fixed,
    /// `None`: the keeper has failed, or is not there yet.
    active: Option<Active>,
    /// A record was not kept.
    has_given_up: bool,
}

/// What stays the same as long as an export lives.
#[derive(Debug)]
pub(crate) struct Fixed {
    pub(crate) endpoint: EndpointState,
    /// Descriptors of the device.
    pub(crate) device: Vec<OwnedFd>,
    pub(crate) note: Arc<Note>,
    /// Number of the export's protocol.
    pub(crate) protocol: u32,
}

/// State of a keeper that works.
#[derive(Debug)]
pub(crate) struct Active {
    file: RecordFile,
    /// Number under which each open descriptor is kept.
    numbers: HashMap<RawFd, u64>,
    /// Copies of what an earlier process or export has had kept, until the first record.
    known: HashMap<u64, OwnedFd>,
    next: u64,
    /// All numbers in use.
    stored: HashSet<u64>,
    /// The record of the file.
    last: Vec<u8>,
}

/// What to record.
pub(crate) struct State<'a> {
    /// Number of sessions so far.
    pub(crate) sessions: u64,
    pub(crate) client: Option<Client<'a>>,
}

/// Client in a record.
pub(crate) struct Client<'a> {
    pub(crate) socket: BorrowedFd<'a>,
    pub(crate) session: &'a mut dyn Session,
    pub(crate) pending: Option<Pending>,
}

/// A record that cannot be written.
#[derive(Debug, Error)]
enum KeepError {
    #[error(transparent)]
    State(#[from] HandoverError),
    #[error(transparent)]
    File(#[from] RecordFileError),
    #[error(transparent)]
    Keeper(#[from] io::Error),
}

impl Keeping {
    pub(crate) fn new(keeper: Box<dyn Keeper>, fixed: Fixed) -> Self {
        Self { keeper, fixed, active: None, has_given_up: false }
    }

    /// Goes on with what the keeper has of an earlier export.
    pub(crate) fn adopt(&mut self, active: Option<Active>) {
        self.active = active;
    }

    /// The session is about to close this descriptor: its number stays known by a copy.
    pub(crate) fn detach(&mut self, fd: BorrowedFd<'_>) {
        if let Some(active) = &mut self.active
            && let Some(number) = active.numbers.remove(&fd.as_raw_fd())
            // Without a copy, the next export has it kept once more.
            && let Ok(copy) = fd.try_clone_to_owned()
        {
            active.known.insert(number, copy);
        }
    }

    /// Copies of the descriptors of the device, if they are kept.
    pub(crate) fn device_fds(&self) -> io::Result<Vec<OwnedFd>> {
        let kept = self.fixed.device.iter().filter(|_| self.active.is_some());
        kept.map(OwnedFd::try_clone).collect()
    }

    /// What is kept, for another [`Keeping`]. All descriptors of the session are detached.
    pub(crate) fn into_active(self) -> Option<Active> {
        let Self { fixed: Fixed { endpoint, device, note: _, protocol: _ }, active, .. } = self;
        let mut active = active?;
        for fd in device.into_iter().chain(endpoint.listener) {
            if let Some(number) = active.numbers.remove(&fd.as_raw_fd()) {
                active.known.insert(number, fd);
            }
        }
        // Others may have the numbers of what was closed.
        active.numbers.clear();
        Some(active)
    }

    /// Whether the state is kept.
    pub(crate) fn is_active(&self) -> bool {
        self.active.is_some()
    }

    /// Begins to keep, if it does not already.
    pub(crate) fn begin(&mut self) {
        if self.active.is_some() {
            return;
        }
        let begin = |keeper: &mut dyn Keeper| {
            let file = RecordFile::create(CAPACITY)?;
            keeper.put(RECORD, file.as_fd())?;
            let (numbers, stored) = (HashMap::new(), HashSet::from([RECORD]));
            let (next, last, known) = (RECORD + 1, Vec::new(), HashMap::new());
            Ok::<_, KeepError>(Active { file, numbers, known, next, stored, last })
        };
        match begin(&mut *self.keeper) {
            Ok(active) => (self.active, self.has_given_up) = (Some(active), false),
            Err(KeepError::Keeper(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => tracing::warn!("cannot keep sessions for the next process: {error}"),
        }
    }

    /// These descriptors have just been received: others with their numbers are closed.
    pub(crate) fn received(&mut self, fds: &[OwnedFd]) {
        if let Some(active) = &mut self.active {
            for fd in fds {
                active.numbers.remove(&fd.as_raw_fd());
            }
        }
    }

    /// Whether this is not the state on record.
    pub(crate) fn differs(&mut self, state: State<'_>) -> bool {
        let Some(active) = &mut self.active else { return false };
        // An error is reported when the state is recorded.
        let content = active.content(&mut *self.keeper, &self.fixed, state);
        content.is_err() || content.is_ok_and(|(content, _)| content != active.last)
    }

    /// Records the state of the export, unless it is that on record.
    ///
    /// Returns whether it was recorded. On failure nothing is kept any more.
    pub(crate) fn record(&mut self, state: State<'_>) -> bool {
        let Some(active) = &mut self.active else { return false };
        match active.record(&mut *self.keeper, &self.fixed, state) {
            Ok(is_new) => is_new,
            Err(KeepError::State(HandoverError::Transfer(_))) => {
                // Until it has ended.
                self.forget();
                false
            }
            Err(error) => {
                tracing::warn!("sessions are not kept for the next process any more: {error}");
                self.give_up();
                false
            }
        }
    }

    /// Records that there is nothing to continue.
    pub(crate) fn forget(&mut self) {
        if let Some(active) = self.active.as_mut().filter(|active| !active.last.is_empty()) {
            // A file in memory that was written before takes a shorter record.
            let _ = active.file.write(&[]);
            active.last.clear();
        }
    }

    /// Whether there was no room for a session, and there may be for the next one.
    pub(crate) fn has_given_up(&self) -> bool {
        self.has_given_up
    }

    /// Keeps nothing, and takes no room from others.
    fn give_up(&mut self) {
        self.forget();
        if let Some(active) = self.active.take() {
            // A keeper that has ended refuses all.
            let _ = active.stored.into_iter().try_for_each(|number| self.keeper.remove(number));
        }
        self.has_given_up = true;
    }

    /// Ends the keeping: there is nothing to continue.
    pub(crate) fn end(mut self) {
        self.give_up();
    }
}

impl Active {
    /// The content of the file for this state, and all numbers in it.
    ///
    /// Has the keeper keep descriptors that are new.
    fn content(
        &mut self,
        keeper: &mut dyn Keeper,
        fixed: &Fixed,
        state: State<'_>,
    ) -> Result<(Vec<u8>, HashSet<u64>), KeepError> {
        let Self { numbers, known, next, stored, .. } = self;
        let mut used = HashSet::from([RECORD]);
        let mut give = |fd: BorrowedFd<'_>| {
            let number = match numbers.get(&fd.as_raw_fd()) {
                Some(number) => *number,
                None => {
                    // Some keepers take an open file only once.
                    let earlier = known.iter().map(|(number, other)| (other.as_raw_fd(), *number));
                    let mut all = numbers.iter().map(|(other, number)| (*other, *number)).chain(earlier);
                    let number = match all.find(|(other, _)| same_file::is_same(fd, *other)) {
                        Some((_, number)) => number,
                        None => {
                            let number = *next;
                            *next += 1;
                            keeper.put(number, fd).map_err(HandoverError::Keep)?;
                            stored.insert(number);
                            number
                        }
                    };
                    numbers.insert(fd.as_raw_fd(), number);
                    number
                }
            };
            used.insert(number);
            Ok(number)
        };
        let State { sessions, client } = state;
        let Fixed { endpoint, device, note, protocol } = fixed;
        let device = device.iter().map(|fd| give(fd.as_fd())).collect::<Result<Vec<u64>, _>>()?;
        let endpoint = EndpointState {
            kind: endpoint.kind,
            path: endpoint.path.clone(),
            file: endpoint.file,
            listener: endpoint.listener.as_ref().map(|listener| give(listener.as_fd())).transpose()?,
        };
        let connection = client.map(|Client { socket, session, pending }| {
            let mut collected = Collected { sections: Vec::new(), give: &mut give };
            session.save(Successor::Later, &mut collected)?;
            let session = collected.sections;
            let partial = (Vec::new(), Vec::new());
            Ok::<_, HandoverError>(ConnectionState { socket: give(socket)?, partial, session, pending })
        });
        let connection = connection.transpose()?;
        let (protocol, note) = (*protocol, note.bytes());
        let (record, list) = ExportState { protocol, endpoint, sessions, connection, note }.write()?;
        let count = device.len() + list.len();
        let mut content = Vec::with_capacity(8 + count * NUMBER + record.len());
        for count in [count, device.len()] {
            content.extend((count as u32).to_le_bytes());
        }
        device.iter().chain(&list).for_each(|number| content.extend(number.to_le_bytes()));
        content.extend(record);
        Ok((content, used))
    }

    fn record(
        &mut self,
        keeper: &mut dyn Keeper,
        fixed: &Fixed,
        state: State<'_>,
    ) -> Result<bool, KeepError> {
        let (content, used) = self.content(keeper, fixed, state)?;
        if content == self.last {
            return Ok(false);
        }
        self.file.write(&content)?;
        self.last = content;
        self.known.clear();
        // After the record that does not name them.
        for number in self.stored.extract_if(|number| !used.contains(number)) {
            keeper.remove(number)?;
        }
        self.numbers.retain(|_, number| used.contains(number));
        Ok(true)
    }
}
