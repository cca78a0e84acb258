//! How long a server may take while its store is opened.
use paravane_store::{Connector, Location, OpenOptions, Target, open};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Connects to servers that say nothing, and notes the limit of each connection.
#[derive(Debug, Default)]
struct Silent {
    servers: Mutex<Vec<UnixStream>>,
    limits: Mutex<Vec<Duration>>,
}

impl Connector for Silent {
    fn connect(&self, _: &Target, timeout: Duration) -> io::Result<OwnedFd> {
        let (near, far) = UnixStream::pair()?;
        self.servers.lock().unwrap().push(far);
        self.limits.lock().unwrap().push(timeout);
        Ok(near.into())
    }
}

/// Opens a store whose requests wait for `timeout`: its error, and the limits of its connections.
fn opened(url: &str, timeout: Duration) -> (String, Vec<Duration>) {
    let silent = Arc::new(Silent::default());
    let options = OpenOptions { read_only: true, timeout, ..OpenOptions::default() };
    let error = open(&url.parse::<Location>().unwrap(), &options, silent.clone()).unwrap_err().to_string();
    let limits = silent.limits.lock().unwrap().clone();
    (error, limits)
}

#[test]
fn a_silent_nbd_server_is_given_up_when_requests_would_be() {
    for (timeout, limit) in [(0, 1), (2, 2)] {
        let (error, limits) = opened("nbd://server/", Duration::from_secs(timeout));
        assert!(error.contains("does not answer in time"), "{error}");
        assert_eq!(limits, [Duration::from_secs(limit)]);
    }
}

#[cfg(feature = "http")]
#[test]
fn a_silent_http_server_is_given_up_when_requests_would_be() {
    for (timeout, limit) in [(0, "1s"), (2, "2s")] {
        let (error, _) = opened("http://server/object", Duration::from_secs(timeout));
        assert!(error.contains(&format!("no answer in {limit}")), "{error}");
    }
}
