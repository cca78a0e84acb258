//! Objects that are open: users of the same one share it.
use super::answer::{Failure, ObjectIdentity};
use super::client::HttpClient;
use super::dialer::ObjectDialer;
use super::error::ObjectError;
use super::fetch;
use super::options::ObjectOptions;
use super::origin::Origin;
use super::source::Source;
use super::tls::Tls;
use crate::cache::{Cache, CacheConfig, Layout};
use crate::lock::lock;
use crate::{Connector, Location, ObjectFiles, Target};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of a chunk, if no folder says otherwise.
const CHUNK_BYTES: u32 = 256 << 10;

/// Bytes to fetch ahead, likewise.
const READ_AHEAD: u64 = 4 << 20;

/// How long the server's word holds for the next user of an object.
const FRESH: Duration = Duration::from_secs(5);

/// Stack of the thread that fetches, in bytes.
const STACK: usize = 1 << 20;

/// What makes two users of an object the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Name {
    url: String,
    cache: Option<(PathBuf, u32)>,
    files: ObjectFiles,
}

/// Holds an object. Locked while it is being opened.
type Place = Arc<Mutex<Weak<ObjectShared>>>;

/// The objects that are open.
static OPEN: Mutex<Option<HashMap<Name, Place>>> = Mutex::new(None);

/// An object that is open, with the thread that fetches.
#[derive(Debug)]
pub(super) struct ObjectShared {
    pub(super) source: Arc<Source>,
    /// Digest of the rights that the server has found good, and when.
    checked: Mutex<([u8; 32], Instant)>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for ObjectShared {
    fn drop(&mut self) {
        self.source.stop();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a thread that fetches an object has panicked");
        }
    }
}

/// Opens an object, or joins the users of it.
///
/// # Errors
/// See [`ObjectError`].
pub(super) fn open(
    location: &Location,
    options: &ObjectOptions,
    cache: Option<&CacheConfig>,
    connector: Arc<dyn Connector>,
) -> Result<Arc<ObjectShared>, ObjectError> {
    let origin = Origin::new(location, &options.files)?;
    let name = Name {
        url: origin.name().into(),
        cache: cache.map(|cache| (cache.folder.clone(), cache.chunk_bytes)),
        files: origin.files.clone(),
    };
    let place = {
        let mut open = lock(&OPEN);
        let open = open.get_or_insert_default();
        // Places that nobody uses or waits for.
        open.retain(|_, place| {
            Arc::strong_count(place) > 1 || place.try_lock().is_ok_and(|it| it.strong_count() > 0)
        });
        open.entry(name).or_default().clone()
    };
    let mut place = lock(&place);
    let rights = origin.rights();
    let known = place.upgrade().filter(|known| !known.source.is_unusable());
    if let Some(known) = &known {
        let checked = lock(&known.checked);
        if checked.0 == rights && checked.1.elapsed() < FRESH {
            drop(checked);
            return Ok(known.clone());
        }
    }
    let thread = Thread::start(origin, options, connector)?;
    let (client, identity) = thread.found()?;
    if let Some(known) = known {
        if known.source.identity == identity {
            *lock(&known.checked) = (rights, Instant::now());
            return Ok(known);
        }
        known.source.changed(&Failure::Unusable("the object has changed".into()));
    }
    let source = Arc::new(source(client, identity, options, cache)?);
    let checked = Mutex::new((rights, Instant::now()));
    let shared = Arc::new(ObjectShared { thread: Some(thread.serve(source.clone())), source, checked });
    *place = Arc::downgrade(&shared);
    Ok(shared)
}

fn source(
    client: HttpClient,
    identity: ObjectIdentity,
    options: &ObjectOptions,
    cache: Option<&CacheConfig>,
) -> Result<Source, ObjectError> {
    let chunk_bytes = cache.map_or(CHUNK_BYTES, |cache| cache.chunk_bytes);
    let layout = Layout::new(identity.size, chunk_bytes).map_err(ObjectError::Invalid)?;
    let digests = client.origin.files.digests.as_deref();
    let read = |path: &Path| {
        let digests = options.files.digests(path)?;
        digests.check(layout).map_err(|why| ObjectError::File { path: path.into(), why })?;
        Ok::<_, ObjectError>(digests)
    };
    let digests = digests.map(read).transpose()?;
    if !identity.is_certain() && digests.is_none() {
        return Err(ObjectError::Refused(
            "the server gives neither ETag nor Last-Modified, so a change would not show; name a file of digests"
                .into(),
        ));
    }
    // What must not differ for kept chunks to be right.
    let mut key = Sha256::new();
    key.update(client.origin.name().as_str());
    key.update([0]);
    key.update(identity.bytes());
    key.update(chunk_bytes.to_le_bytes());
    key.update(digests.as_ref().map(|digests| digests.digest()).unwrap_or_default());
    let kept = Cache::open(layout, key.finalize().into(), cache, options.memory_bytes);
    let kept = kept.map_err(|source| match cache {
        Some(cache) => ObjectError::Cache { path: cache.folder.clone(), source },
        None => ObjectError::Host(source),
    })?;
    let read_ahead = cache.map_or(READ_AHEAD, |cache| cache.read_ahead.into());
    Ok(Source::new(client, identity, layout, digests, kept, read_ahead, options.retry))
}

/// A thread with the connections of one object.
struct Thread {
    found: Receiver<Result<(HttpClient, ObjectIdentity), Failure>>,
    source: Sender<Arc<Source>>,
    thread: JoinHandle<()>,
}

impl Thread {
    /// Starts the thread, which asks the server what the object is.
    fn start(
        origin: Origin,
        options: &ObjectOptions,
        connector: Arc<dyn Connector>,
    ) -> Result<Self, ObjectError> {
        let target = origin.target();
        let tls = match &target {
            Target::Tcp { host, .. } if origin.tls() => {
                Some(Tls::new(host, origin.files.certificates.as_deref(), &options.files)?)
            }
            _ => None,
        };
        let dialer = ObjectDialer::start(connector, target, options.connect_timeout)?;
        let mut client = HttpClient::new(origin, tls, dialer, options);
        let parallel = usize::from(options.connections).max(1);
        // Its descriptors are made here, before a sandbox may refuse them.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let (send_found, found) = channel();
        let (source, served) = channel::<Arc<Source>>();
        let thread = std::thread::Builder::new().name("http-fetch".into()).stack_size(STACK);
        let thread = thread.spawn(move || {
            let identity = runtime.block_on(client.find());
            let _ = send_found.send(identity.map(|identity| (client, identity)));
            // None: the object is not opened after all.
            if let Ok(source) = served.recv() {
                fetch::run(&runtime, &source, parallel);
            }
        })?;
        Ok(Self { found, source, thread })
    }

    /// What the server has answered.
    fn found(&self) -> Result<(HttpClient, ObjectIdentity), ObjectError> {
        let gone = || io::Error::other("the thread that fetches has ended");
        self.found.recv().map_err(|_| gone())?.map_err(|failure| match failure {
            Failure::Again(why) => ObjectError::Unreachable(why),
            failure => ObjectError::Refused(failure.message().into()),
        })
    }

    /// Fetches chunks of the object until it is stopped.
    fn serve(self, source: Arc<Source>) -> JoinHandle<()> {
        // It waits for this.
        let _ = self.source.send(source);
        self.thread
    }
}
