//! Requests for ranges, over connections that are kept.
use super::answer::{Failure, ObjectIdentity};
use super::dialer::ObjectDialer;
use super::options::ObjectOptions;
use super::origin::Origin;
use super::tls::Tls;
use crate::lock::lock;
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{ACCEPT_ENCODING, HOST, HeaderValue, RANGE, USER_AGENT};
use hyper::http::response::Parts;
use hyper::rt::{Read, Write};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};

/// Longest head of an answer, in bytes, and most bytes to read at once.
const BUFFER: usize = 64 << 10;

/// Bytes that a server must send in the time of a stall.
const PROGRESS: usize = 4096;

/// Redirects to follow at most.
const MOST_REDIRECTS: usize = 5;

type Sender = SendRequest<Empty<Bytes>>;

/// A server with an object.
#[derive(Debug)]
pub(super) struct HttpClient {
    /// The object.
    pub(super) origin: Origin,
    tls: Option<Tls>,
    dialer: ObjectDialer,
    idle: Mutex<Vec<Sender>>,
    most_idle: usize,
    connect_timeout: Duration,
    open_timeout: Option<Duration>,
    stall_timeout: Duration,
    /// Connections that are up.
    pub(super) connections: Arc<AtomicU32>,
    /// The last request has failed: the next connection takes the place of its own.
    failed: AtomicBool,
    /// Connections that were made in place of one that failed.
    pub(super) reconnects: AtomicU64,
}

/// The bytes of an answer.
#[derive(Debug)]
pub(super) struct Body<'a> {
    client: &'a HttpClient,
    incoming: Incoming,
    sender: Option<Sender>,
}

/// Counts a connection for as long as it is up.
struct Up(Arc<AtomicU32>);

impl Drop for Up {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl HttpClient {
    /// A server without connections.
    pub(super) fn new(
        origin: Origin,
        tls: Option<Tls>,
        dialer: ObjectDialer,
        options: &ObjectOptions,
    ) -> Self {
        Self {
            origin,
            tls,
            dialer,
            idle: Mutex::default(),
            most_idle: options.connections.into(),
            connect_timeout: options.connect_timeout,
            open_timeout: options.open_timeout,
            stall_timeout: options.stall_timeout,
            connections: Arc::default(),
            failed: AtomicBool::new(false),
            reconnects: AtomicU64::new(0),
        }
    }

    /// Notes that a request has failed.
    pub(super) fn failed(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Asks what the object is, and follows redirects of the server to itself.
    ///
    /// # Errors
    /// It cannot be read by ranges, or the server takes too long.
    pub(super) async fn find(&mut self) -> Result<ObjectIdentity, Failure> {
        let Some(limit) = self.open_timeout else { return self.find_slowly().await };
        match timeout(limit, self.find_slowly()).await {
            Err(_) => Err(Failure::Again(format!("no answer in {limit:?}"))),
            Ok(found) => found,
        }
    }

    async fn find_slowly(&mut self) -> Result<ObjectIdentity, Failure> {
        for _ in 0..=MOST_REDIRECTS {
            match self.identity().await {
                Err(Failure::Redirect(to)) => self.origin.redirect(&to).map_err(Failure::Refused)?,
                found => return found,
            }
        }
        Err(Failure::Refused("the server redirects in a circle".into()))
    }

    /// Asks what the object is.
    ///
    /// # Errors
    /// It cannot be read by ranges.
    pub(super) async fn identity(&self) -> Result<ObjectIdentity, Failure> {
        let (head, mut body) = self.request(0, 0, None).await?;
        let identity = ObjectIdentity::of(&head)?;
        // So that the connection can be used again. The byte is of no use.
        while body.next().await?.is_some_and(|bytes| bytes.len() <= 1) {}
        Ok(identity)
    }

    /// Asks for the bytes from `first` to `last`.
    ///
    /// # Errors
    /// The answer is not that.
    pub(super) async fn get(
        &self,
        identity: &ObjectIdentity,
        first: u64,
        last: u64,
    ) -> Result<Body<'_>, Failure> {
        let (head, body) = self.request(first, last, Some(identity)).await?;
        identity.check(&head, first, last)?;
        Ok(body)
    }

    async fn request(
        &self,
        first: u64,
        last: u64,
        identity: Option<&ObjectIdentity>,
    ) -> Result<(Parts, Body<'_>), Failure> {
        loop {
            let kept = lock(&self.idle).pop();
            let (mut sender, fresh) = match kept {
                Some(sender) if sender.is_closed() => continue,
                Some(sender) => (sender, false),
                None => (self.connect().await?, true),
            };
            let request = self.range_request(first, last, identity)?;
            match timeout(self.stall_timeout, sender.send_request(request)).await {
                Err(_) => return Err(self.stalled()),
                Ok(Ok(response)) => {
                    let (head, incoming) = Response::into_parts(response);
                    return Ok((head, Body { client: self, incoming, sender: Some(sender) }));
                }
                // The server may have closed a connection that it no longer wanted to keep.
                Ok(Err(_)) if !fresh => {}
                Ok(Err(error)) => return Err(Failure::Again(format!("no answer: {}", cause(&error)))),
            }
        }
    }

    fn range_request(
        &self,
        first: u64,
        last: u64,
        identity: Option<&ObjectIdentity>,
    ) -> Result<Request<Empty<Bytes>>, Failure> {
        // Secret if it is signed: it is in no message.
        let url = self.origin.signed();
        let path = match url.query() {
            Some(query) => format!("{}?{query}", url.path()),
            None => url.path().to_owned(),
        };
        let host = url.host_str().unwrap_or_default();
        let host = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        let mut request = Request::get(path)
            .header(HOST, host)
            .header(RANGE, format!("bytes={first}-{last}"))
            .header(ACCEPT_ENCODING, HeaderValue::from_static("identity"))
            .header(USER_AGENT, concat!("paravane/", env!("CARGO_PKG_VERSION")));
        if let Some((name, value)) = identity.and_then(ObjectIdentity::condition) {
            request = request.header(name, value);
        }
        request.body(Empty::new()).map_err(|_| Failure::Refused("the URL cannot be sent".into()))
    }

    fn stalled(&self) -> Failure {
        Failure::Again(format!("the server stalls for {:?}", self.stall_timeout))
    }

    async fn connect(&self) -> Result<Sender, Failure> {
        let target = self.origin.target();
        let failed =
            |why: &dyn std::fmt::Display| Failure::Again(format!("cannot connect to {target}: {why}"));
        // The connector keeps to the time itself; others may be before us.
        let stream = match timeout(2 * self.connect_timeout, self.dialer.connect()).await {
            Err(_) => return Err(failed(&"no connection in time")),
            Ok(stream) => stream.and_then(tokio_stream).map_err(|error| failed(&error))?,
        };
        let sender = match &self.tls {
            None => self.handshake(TokioIo::new(stream)).await,
            Some(tls) => {
                let connector = tokio_rustls::TlsConnector::from(tls.config.clone());
                match timeout(self.stall_timeout, connector.connect(tls.name.clone(), stream)).await {
                    Err(_) => return Err(self.stalled()),
                    Ok(Err(error)) => return Err(failed(&error)),
                    Ok(Ok(stream)) => self.handshake(TokioIo::new(stream)).await,
                }
            }
        };
        let sender = sender.map_err(|error| failed(&cause(&error)))?;
        if self.failed.swap(false, Ordering::Relaxed) {
            self.reconnects.fetch_add(1, Ordering::Relaxed);
        }
        Ok(sender)
    }

    async fn handshake<S>(&self, stream: S) -> hyper::Result<Sender>
    where
        S: Read + Write + Unpin + Send + 'static,
    {
        let (sender, connection) = http1::Builder::new().max_buf_size(BUFFER).handshake(stream).await?;
        self.connections.fetch_add(1, Ordering::Relaxed);
        let up = Up(self.connections.clone());
        tokio::spawn(async move {
            let _up = up;
            // Its errors are those of the request.
            let _ = connection.await;
        });
        Ok(sender)
    }
}

impl Body<'_> {
    /// The next bytes; `None` at the end, after which the connection is kept.
    ///
    /// # Errors
    /// The connection ends too early, or the server stalls.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        let end = Instant::now() + self.client.stall_timeout;
        // A server that sends a byte now and then stalls, too.
        let mut joined = Vec::new();
        while joined.len() < PROGRESS {
            match timeout_at(end, self.incoming.frame()).await {
                Err(_) => return Err(self.client.stalled()),
                Ok(Some(Err(error))) => {
                    return Err(Failure::Again(format!("the answer breaks off: {}", cause(&error))));
                }
                Ok(None) if joined.is_empty() => {
                    self.keep().await;
                    return Ok(None);
                }
                Ok(None) => break,
                Ok(Some(Ok(frame))) => {
                    let Ok(data) = frame.into_data() else { continue };
                    if joined.is_empty() && data.len() >= PROGRESS {
                        return Ok(Some(data));
                    }
                    joined.extend_from_slice(&data);
                }
            }
        }
        Ok(Some(joined.into()))
    }

    async fn keep(&mut self) {
        let Some(mut sender) = self.sender.take() else { return };
        // A server that does not keep the connection closes it now.
        if let Ok(Ok(())) = timeout(self.client.stall_timeout, sender.ready()).await {
            let mut idle = lock(&self.client.idle);
            if idle.len() < self.client.most_idle {
                idle.push(sender);
            }
        }
    }
}

/// The innermost cause of an error.
fn cause(error: &hyper::Error) -> String {
    let mut inner: &dyn std::error::Error = error;
    while let Some(next) = inner.source() {
        inner = next;
    }
    inner.to_string()
}

fn tokio_stream(stream: OwnedFd) -> io::Result<tokio::net::TcpStream> {
    // Not by `set_nonblocking`, which takes an ioctl: sandboxes know few of them.
    let flags = fcntl_getfl(&stream)?;
    fcntl_setfl(&stream, flags | OFlags::NONBLOCK)?;
    tokio::net::TcpStream::from_std(TcpStream::from(stream))
}
