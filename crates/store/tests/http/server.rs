//! A server whose answers a test writes.
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// A request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// First and last byte.
    pub(crate) range: (u64, u64),
    pub(crate) path: String,
    /// All lines of the head, in small letters.
    pub(crate) head: String,
}

/// An answer.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) bytes: Vec<u8>,
    pub(crate) then: Then,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Keep,
    Close,
    /// Sends nothing more.
    Stall,
}

type Script = dyn Fn(&Request) -> Answer + Send + Sync;

/// A server on a port of this host.
pub(crate) struct Server {
    port: u16,
    requests: Arc<Mutex<Vec<Request>>>,
    stop: Arc<AtomicBool>,
}

impl Server {
    pub(crate) fn start(script: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (requests, stop): (Arc<Mutex<Vec<Request>>>, Arc<AtomicBool>) = Default::default();
        let script: Arc<Script> = Arc::new(script);
        let server = Self { port, requests: requests.clone(), stop: stop.clone() };
        thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let (script, requests) = (script.clone(), requests.clone());
                thread::spawn(move || serve(&stream.unwrap(), &*script, &requests));
            }
        });
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/disk.img", self.port)
    }

    /// Requests so far.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn serve(stream: &TcpStream, script: &Script, requests: &Mutex<Vec<Request>>) {
    stream.set_nodelay(true).unwrap();
    let mut lines = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            match lines.read_line(&mut head) {
                Ok(len) if len > 0 => {}
                _ => return,
            }
        }
        let path = head.split(' ').nth(1).unwrap().to_owned();
        let head = head.to_lowercase();
        let range = head.split_once("range: bytes=").unwrap().1.split("\r\n").next().unwrap();
        let (first, last) = range.split_once('-').unwrap();
        let request = Request { range: (first.parse().unwrap(), last.parse().unwrap()), path, head };
        requests.lock().unwrap().push(request.clone());
        let answer = script(&request);
        let mut stream = stream;
        if stream.write_all(&answer.bytes).is_err() {
            return;
        }
        match answer.then {
            Then::Keep => {}
            Then::Close => return,
            Then::Stall => {
                // Until the client gives up.
                let _ = lines.read_line(&mut String::new());
                return;
            }
        }
    }
}

impl Answer {
    pub(crate) fn new(head: &str, body: &[u8]) -> Self {
        let mut bytes = head.replace('\n', "\r\n").into_bytes();
        bytes.extend_from_slice(b"\r\n");
        bytes.extend_from_slice(body);
        Self { bytes, then: Then::Keep }
    }

    /// A status without a body.
    pub(crate) fn status(status: u16, headers: &str) -> Self {
        Self::new(&format!("HTTP/1.1 {status} X\n{headers}Content-Length: 0\n"), &[])
    }

    /// What a good server answers.
    pub(crate) fn good(content: &[u8], tag: &str, request: &Request) -> Self {
        Self::range(content, tag, request.range, content.len())
    }

    /// Bytes of a range with the head that belongs to it.
    pub(crate) fn range(content: &[u8], tag: &str, (first, last): (u64, u64), size: usize) -> Self {
        let body = &content[first as usize..=(last as usize).min(content.len() - 1)];
        let head = format!(
            "HTTP/1.1 206 Partial Content\nETag: \"{tag}\"\nContent-Range: bytes {first}-{last}/{size}\n\
            Content-Length: {}\n",
            body.len()
        );
        Self::new(&head, body)
    }

    pub(crate) fn then(mut self, then: Then) -> Self {
        self.then = then;
        self
    }

    /// Without its last bytes.
    pub(crate) fn cut(mut self, bytes: usize) -> Self {
        self.bytes.truncate(self.bytes.len().saturating_sub(bytes));
        self
    }
}
