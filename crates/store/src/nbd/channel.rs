//! A connection over its losses: who uses it, what waits for it, and until when.
//!
//! ```text
//!          lost                      request_timeout
//!   Up ----------> Reconnecting ------------------------> Down
//!    ^                |   |                                 |
//!    '----resume------'   '--the export has changed,        |
//!    |                       or the protocol is broken--> Unusable
//!    '----------------------resume, if all is well again----'
//! ```
//! Jobs wait while it is reconnecting; they fail while it is down or unusable.
//!
//! One lock guards all. It is taken once for a batch of jobs and once for a batch of outcomes. A
//! member that receives delivers to the others, too.
use super::export::Export;
use super::member::{Fds, Member};
use super::session::{EndedTask, Lost, NbdSession};
use super::shared::{NbdShared, OldSocket};
use super::socket::timespec;
use super::task::{Tasks, Work};
use super::wire::Wire;
use crate::lock::lock;
use crate::{Link, Outcome, WakeSet};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// Sessions in a row that break the protocol, with no job done: the server is of no use.
const VIOLATIONS: u32 = 3;
/// Broken sessions until a job that was in flight in each fails.
const STRIKES: u8 = 3;
/// Lost connections until a job that was in flight in each fails: it may be what the server dies of.
const LOSSES: u8 = 16;
/// Without a byte for so long, with requests in flight, observers are told.
const SILENCE: Duration = Duration::from_secs(5);

/// Starts the thread that makes a connection again, at once or after a pause.
pub(super) type Launch = dyn Fn(&Arc<Channel>, Option<OldSocket>, Begin) -> io::Result<()> + Send + Sync;

/// When a connection is made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begin {
    AtOnce,
    /// The export is unusable: observers see it for a while, and its server has some peace.
    Later,
}

/// A connection.
pub(super) struct Channel {
    me: Weak<Self>,
    pub(super) shared: Arc<NbdShared>,
    launch: Box<Launch>,
    state: Mutex<ChannelState>,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct ChannelState {
    link: Link,
    session: Option<NbdSession>,
    tasks: Tasks,
    to_send: VecDeque<u32>,
    ended: Vec<EndedTask>,
    members: Vec<Member>,
    /// Members wait for room in the socket, too.
    awaits_room: bool,
    timer: OwnedFd,
    due: Option<Instant>,
    /// A thread makes the connection again.
    has_helper: bool,
    violations: u32,
    /// Bytes received when the timer was set.
    heard: u64,
    /// Bytes received as an observer saw them, and when.
    seen: Option<(u64, Instant)>,
}

/// What became of a new connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Resumed {
    Yes,
    /// It cannot be used; the link is unusable.
    Refused,
}

/// State for observers.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) link: Link,
    pub(super) waiting: u32,
    pub(super) error: Option<String>,
}

impl Channel {
    /// A channel over a new connection.
    pub(super) fn new(
        shared: Arc<NbdShared>,
        launch: Box<Launch>,
        wire: Wire,
        export: Export,
    ) -> io::Result<Arc<Self>> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let session = NbdSession::new(wire, export, &shared.options);
        Ok(Arc::new_cyclic(|me| Self {
            me: me.clone(),
            shared,
            launch,
            state: Mutex::new(ChannelState {
                link: Link::Up,
                session: Some(session),
                tasks: Tasks::default(),
                to_send: VecDeque::new(),
                ended: Vec::new(),
                members: Vec::new(),
                awaits_room: false,
                timer,
                due: None,
                has_helper: false,
                violations: 0,
                heard: 0,
                seen: None,
            }),
        }))
    }

    /// Adds a user with room for `jobs` jobs.
    pub(super) fn join(&self, jobs: usize) -> io::Result<(u16, Arc<Fds>)> {
        let mut state = lock(&self.state);
        let mut new = Member::new(jobs, &state.timer)?;
        if let Some(session) = &state.session {
            new.connect(&session.wire, state.awaits_room)?;
        }
        let fds = new.fds.clone();
        let index = match state.members.iter().position(|member| !member.is_used) {
            Some(free) => {
                state.members[free] = new;
                free
            }
            None => {
                state.members.push(new);
                state.members.len() - 1
            }
        };
        let all =
            state.members.iter().filter(|member| member.is_used).map(|member| member.jobs).sum::<usize>();
        let ChannelState { tasks, to_send, ended, .. } = &mut *state;
        let room = all.saturating_sub(tasks.capacity());
        tasks.reserve(room);
        to_send.reserve(all);
        ended.reserve(all);
        let index = u16::try_from(index).map_err(|_| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        Ok((index, fds))
    }

    /// Removes a user. Its memory is touched no more when this returns.
    pub(super) fn leave(&self, member: u16) {
        let mut state = lock(&self.state);
        let has_begun = state.session.as_ref().is_some_and(NbdSession::has_begun);
        let front = state.to_send.front().copied().filter(|_| has_begun);
        let cuts = front.is_some_and(|task| state.tasks.get(task).member == member);
        if cuts {
            self.lose(&mut state, Lost::because("a queue has ended in the middle of a request"));
        }
        for task in state.tasks.find(|task| task.member == member) {
            let waits = state.to_send.iter().position(|other| *other == task);
            match waits {
                Some(place) => {
                    state.to_send.remove(place);
                    state.tasks.remove(task);
                }
                // Its reply still comes; data of it is dropped.
                None => state.tasks.get(task).is_orphan = true,
            }
        }
        self.finish(&mut state, None);
        let state = &mut *state;
        let left = &mut state.members[usize::from(member)];
        left.leave(state.session.as_ref().map(|session| &session.wire));
    }

    /// See [`StoreQueue::register`](crate::StoreQueue::register).
    pub(super) fn register(&self, member: u16, wakes: Option<&WakeSet>) -> io::Result<()> {
        let mut state = lock(&self.state);
        let ChannelState { members, session, timer, awaits_room, .. } = &mut *state;
        let wire = session.as_ref().map(|session| (&session.wire, *awaits_room));
        members[usize::from(member)].register(wakes, timer, wire)
    }

    /// Takes jobs over, and sends what can be sent.
    pub(super) fn submit(&self, member: u16, jobs: &mut Vec<(u16, Work)>) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let fails = matches!(state.link, Link::Down | Link::Unusable);
        for (head, work) in jobs.drain(..) {
            let task = state.tasks.add(member, head, work);
            if fails {
                state.ended.push(EndedTask { task, result: -libc::EIO });
            } else {
                state.to_send.push_back(task);
            }
        }
        let was_blocked = state.session.as_ref().is_none_or(|session| session.is_blocked);
        let sent = match &mut state.session {
            Some(session) if !was_blocked => {
                session.send(&mut state.tasks, &mut state.to_send, &mut state.ended)
            }
            _ => Ok(()),
        };
        self.after(state, sent);
        self.finish(state, None);
    }

    /// Does what can be done without waiting, and moves outcomes of a member to a list.
    pub(super) fn reap(&self, member: u16, outcomes: &mut VecDeque<Outcome>) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        // Others, or a wait, may have received for it: then it comes again.
        if state.members[usize::from(member)].outcomes.is_empty() {
            self.serve(state);
            self.finish(state, Some(member));
        }
        let mine = &mut state.members[usize::from(member)];
        mine.clear_signal();
        outcomes.append(&mut mine.outcomes);
    }

    /// Whether there is something to do that no descriptor tells of.
    pub(super) fn has_more(&self) -> bool {
        lock(&self.state).session.as_ref().is_some_and(|session| session.has_more)
    }

    /// Whether a member has outcomes, or there is something to do that no descriptor tells of.
    pub(super) fn has_news(&self, member: u16) -> bool {
        let state = lock(&self.state);
        !state.members[usize::from(member)].outcomes.is_empty()
            || state.session.as_ref().is_some_and(|session| session.has_more)
    }

    /// Whether a member has outcomes.
    pub(super) fn has_outcomes(&self, member: u16) -> bool {
        !lock(&self.state).members[usize::from(member)].outcomes.is_empty()
    }

    /// Waits for nothing: works once. For members that wait on their own.
    pub(super) fn work(&self, member: u16) {
        let mut state = lock(&self.state);
        self.serve(&mut state);
        self.finish(&mut state, Some(member));
    }

    /// Extents that the job with this head has found.
    pub(super) fn take_extents(&self, member: u16, head: u16) -> Vec<(u64, u32)> {
        let mut state = lock(&self.state);
        let lists = &mut state.members[usize::from(member)].extents;
        let place = lists.iter().position(|(other, _)| *other == head);
        place.map(|place| lists.swap_remove(place).1).unwrap_or_default()
    }

    /// Ends jobs of a member that were never sent, not even in part, and others at once.
    pub(super) fn cancel(&self, member: u16, pushed: &mut Vec<(u16, Work)>) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        for (head, work) in pushed.drain(..) {
            let task = state.tasks.add(member, head, work);
            state.ended.push(EndedTask { task, result: -libc::ECANCELED });
        }
        let ChannelState { to_send, tasks, ended, .. } = state;
        to_send.retain(|index| {
            let task = tasks.get(*index);
            let cancels = task.member == member && task.is_untouched();
            if cancels {
                ended.push(EndedTask { task: *index, result: -libc::ECANCELED });
            }
            !cancels
        });
        self.finish(state, None);
    }

    /// Gives up what waits for a connection, now and later.
    pub(super) fn give_up(&self) {
        let mut state = lock(&self.state);
        if state.session.is_none() {
            self.go_down(&mut state);
            self.finish(&mut state, None);
        } else if state.tasks.count() > 0 {
            state.heard = state.session.as_ref().map(|session| session.received).unwrap_or_default();
            self.set_timer(&mut state, Some(self.shared.options.request_timeout));
        }
    }

    /// Makes the connection again although it works, so that the server tells its facts anew.
    pub(super) fn renew(&self) {
        let mut state = lock(&self.state);
        if state.session.is_some() {
            self.lose(&mut state, Lost::because("the export is opened again, to use its new size"));
            self.finish(&mut state, None);
        }
    }

    /// The helper ends without a connection.
    pub(super) fn helper_ends(&self) {
        lock(&self.state).has_helper = false;
    }

    /// Goes on with a new connection. What was in flight is sent first.
    pub(super) fn resume(&self, wire: Wire, export: Export) -> Resumed {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let mut session = NbdSession::new(wire, export, &self.shared.options);
        if let Some(why) = export.differs(&self.shared.opened()) {
            session.say_goodbye();
            self.unusable(state, why);
            return Resumed::Refused;
        }
        let mut adds = state.members.iter_mut().filter(|member| member.is_used);
        let added = adds.try_for_each(|member| member.connect(&session.wire, false));
        if let Err(error) = added {
            self.shared.note(format!("the host refuses to wait for the server: {error}"));
            state.members.iter_mut().for_each(|member| member.disconnect(&session.wire));
            return Resumed::Refused;
        }
        self.shared.grow(export.size);
        self.shared.reconnects.fetch_add(1, Ordering::Relaxed);
        state.has_helper = false;
        state.link = Link::Up;
        (state.awaits_room, state.seen, state.heard) = (false, None, 0);
        tracing::info!(requests = state.to_send.len(), "NBD connection made again");
        self.set_timer(state, None);
        let sent = session.send(&mut state.tasks, &mut state.to_send, &mut state.ended);
        state.session = Some(session);
        self.after(state, sent);
        self.finish(state, None);
        Resumed::Yes
    }

    pub(super) fn report(&self) -> Report {
        let mut state = lock(&self.state);
        let state = &mut *state;
        if state.tasks.count() == 0 {
            // Nobody else may see that the server has closed it.
            self.serve(state);
            self.finish(state, None);
        }
        let Some(session) = &state.session else {
            let waiting = u32::try_from(state.tasks.count()).unwrap_or(u32::MAX);
            return Report { link: state.link, waiting, error: None };
        };
        // Also those that the socket does not take.
        let (count, now) = (state.tasks.count(), Instant::now());
        let up = Report { link: state.link, waiting: 0, error: None };
        match state.seen {
            Some((received, since)) if count > 0 && received == session.received => {
                let silence = now - since;
                if silence < SILENCE {
                    return up;
                }
                let error = format!("{count} requests have had no reply for {} s", silence.as_secs());
                let waiting = u32::try_from(count).unwrap_or(u32::MAX);
                Report { link: Link::Stalled, waiting, error: Some(error) }
            }
            _ => {
                // A request that is sent later begins a silence of its own.
                state.seen = (count > 0).then_some((session.received, now));
                up
            }
        }
    }

    /// Does what can be done without waiting.
    fn serve(&self, state: &mut ChannelState) {
        if state.due.is_some_and(|due| Instant::now() >= due) {
            self.time_is_over(state);
        }
        if state.session.is_none() && !state.has_helper && !self.shared.gave_up() {
            self.start_helper(state, None);
        }
        let mut done = Ok(());
        if let Some(session) = &mut state.session {
            done = session.receive(&mut state.tasks, &mut state.to_send, &mut state.ended);
            if done.is_ok() && (session.is_blocked || !state.to_send.is_empty()) {
                done = session.send(&mut state.tasks, &mut state.to_send, &mut state.ended);
            }
        }
        self.after(state, done);
    }

    /// A turn is over: a loss is dealt with, the timer is set. What has ended is delivered later.
    fn after(&self, state: &mut ChannelState, done: Result<(), Lost>) {
        match done {
            Ok(()) => self.watch_socket(state),
            Err(lost) => self.lose(state, lost),
        }
        if let Some(stall) = self.shared.options.stall_timeout
            && state.due.is_none()
            && state.tasks.in_flight > 0
            && let Some(session) = &state.session
        {
            state.heard = session.received;
            self.set_timer(state, Some(stall));
        }
    }

    /// Has all members wait for room in the socket while a send is incomplete.
    ///
    /// All: the one that sent may have ended its turn, and others wait for replies.
    fn watch_socket(&self, state: &mut ChannelState) {
        let Some(session) = &state.session else { return };
        if session.is_blocked == state.awaits_room {
            return;
        }
        state.awaits_room = session.is_blocked;
        let members = state.members.iter().filter(|member| member.is_used);
        members.for_each(|member| member.await_room(&session.wire, session.is_blocked));
    }

    /// Delivers what has ended.
    fn finish(&self, state: &mut ChannelState, reaps: Option<u16>) {
        let ChannelState { ended, tasks, members, session, violations, .. } = state;
        for EndedTask { task, result } in ended.drain(..) {
            let task = tasks.remove(task);
            if task.is_orphan {
                continue;
            }
            if result >= 0 {
                *violations = 0;
            } else if let Some(text) = session.as_mut().and_then(|session| session.message.take()) {
                self.shared.note(format!("the server says: {text}"));
            }
            let member = &mut members[usize::from(task.member)];
            if matches!(task.work, Work::Extents { .. }) {
                member.extents.push((task.head, std::mem::take(&mut task.extents)));
            }
            // SAFETY: its request was answered, or its connection is closed or was never made: the
            // task is gone, and with it the only pointers to its memory.
            member.outcomes.push_back(unsafe { Outcome::new(task.head, result) });
            if reaps != Some(task.member) {
                member.signal();
            }
        }
    }

    /// The connection is of no more use.
    fn lose(&self, state: &mut ChannelState, lost: Lost) {
        // What was answered before is not sent again.
        self.finish(state, None);
        let Some(session) = state.session.take() else { return };
        for member in state.members.iter_mut().filter(|member| member.is_used) {
            member.disconnect(&session.wire);
        }
        state.awaits_room = false;
        tracing::warn!(reason = lost.reason, "NBD connection lost");
        state.violations += u32::from(lost.is_violation);
        state.link = Link::Reconnecting;
        state.tasks.unsend(&mut state.to_send);
        for task in state.tasks.find(|task| task.sequence != 0) {
            let touched = state.tasks.get(task);
            touched.losses += 1;
            touched.strikes += u8::from(lost.is_violation);
            let result = if lost.faulty == Some(task) {
                -libc::EFAULT
            } else if touched.is_orphan || touched.losses >= LOSSES || touched.strikes >= STRIKES {
                -libc::EIO
            } else {
                continue;
            };
            state.ended.push(EndedTask { task, result });
            state.to_send.retain(|other| *other != task);
        }
        let old = OldSocket(session.wire.into_socket());
        if state.violations >= VIOLATIONS {
            self.unusable(state, lost.reason);
        } else {
            self.shared.note(lost.reason);
            self.set_timer(state, Some(self.shared.options.request_timeout));
        }
        if self.shared.gave_up() {
            self.go_down(state);
            return;
        }
        self.start_helper(state, Some(old));
    }

    fn start_helper(&self, state: &mut ChannelState, old: Option<OldSocket>) {
        let Some(me) = self.me.upgrade() else { return };
        let begin = if state.link == Link::Unusable { Begin::Later } else { Begin::AtOnce };
        match (self.launch)(&me, old, begin) {
            Ok(()) => state.has_helper = true,
            Err(error) => self.shared.note(format!("the host refuses a thread to connect again: {error}")),
        }
    }

    fn unusable(&self, state: &mut ChannelState, why: String) {
        tracing::warn!(reason = why, "NBD export is unusable");
        self.shared.note(why);
        self.go_down(state);
        state.link = Link::Unusable;
        self.finish(state, None);
    }

    /// All that waits fails.
    fn go_down(&self, state: &mut ChannelState) {
        state.link = Link::Down;
        self.set_timer(state, None);
        state.ended.extend(state.to_send.drain(..).map(|task| EndedTask { task, result: -libc::EIO }));
    }

    /// The timer has run out: for waiting jobs, or for replies.
    fn time_is_over(&self, state: &mut ChannelState) {
        self.set_timer(state, None);
        let Some(received) = state.session.as_ref().map(|session| session.received) else {
            tracing::warn!(jobs = state.tasks.count(), "NBD jobs fail: no connection in time");
            self.go_down(state);
            return;
        };
        let options = &self.shared.options;
        let limit = if self.shared.gave_up() { Some(options.request_timeout) } else { options.stall_timeout };
        let Some(limit) = limit.filter(|_| state.tasks.in_flight > 0) else { return };
        if received == state.heard {
            let reason = format!("no reply for {limit:?}");
            self.lose(state, Lost::because(reason));
        } else {
            state.heard = received;
            self.set_timer(state, Some(limit));
        }
    }

    /// Sets the timer that all members wait on.
    fn set_timer(&self, state: &mut ChannelState, after: Option<Duration>) {
        // A moment later, so that the timer is not seen before its time.
        let value = after.map_or(Duration::ZERO, |after| after + Duration::from_millis(1));
        let spec = Itimerspec { it_interval: timespec(Duration::ZERO), it_value: timespec(value) };
        if let Err(error) = timerfd_settime(&state.timer, TimerfdTimerFlags::empty(), &spec) {
            tracing::warn!(%error, "cannot set a timer");
        }
        state.due = after.map(|after| Instant::now() + after);
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if let Some(session) = &mut lock(&self.state).session {
            session.say_goodbye();
        }
        self.shared.wake();
    }
}
