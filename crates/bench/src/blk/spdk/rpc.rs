//! JSON-RPC 2.0 over a Unix socket: one call at a time.
use serde::Deserialize;
use serde_json::Value;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Time limit for an answer.
const LONGEST: Duration = Duration::from_secs(30);

/// A connection to a server of RPCs.
pub(super) struct Connection {
    stream: UnixStream,
}

#[derive(Deserialize)]
struct Answer {
    error: Option<Failure>,
}

#[derive(Deserialize)]
struct Failure {
    code: i64,
    message: String,
}

impl Connection {
    pub(super) fn new(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(LONGEST))?;
        Ok(Self { stream })
    }

    /// Calls `method` and waits for its end.
    ///
    /// # Errors
    /// Why it failed, in one line.
    pub(super) fn call(&mut self, method: &str, params: &Value) -> Result<(), String> {
        let request = serde_json::json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        let failed = |reason: &dyn std::fmt::Display| format!("{method}: {reason}");
        self.stream.write_all(request.to_string().as_bytes()).map_err(|error| failed(&error))?;
        // The answer ends with its closing brace.
        let mut answers = serde_json::Deserializer::from_reader(&self.stream).into_iter::<Answer>();
        match answers.next() {
            Some(Ok(Answer { error: None })) => Ok(()),
            Some(Ok(Answer { error: Some(Failure { code, message }) })) => {
                Err(failed(&format_args!("{message} ({code})")))
            }
            Some(Err(error)) => Err(failed(&error)),
            None => Err(failed(&"the connection ended")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_call_returns_its_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rpc");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            for answer in [
                r#"{"jsonrpc": "2.0", "id": 1, "result": "disk"}"#,
                r#"{"jsonrpc": "2.0", "id": 1, "error": {"code": -19, "message": "No such device"}}"#,
            ] {
                let mut request = [0; 512];
                let len = stream.read(&mut request).unwrap();
                let request: Value = serde_json::from_slice(&request[..len]).unwrap();
                assert_eq!(request["params"]["name"], "disk");
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        let mut connection = Connection::new(&path).unwrap();
        let params = serde_json::json!({"name": "disk"});
        assert_eq!(connection.call("bdev_malloc_create", &params), Ok(()));
        let error = connection.call("vhost_create_blk_controller", &params).unwrap_err();
        assert_eq!(error, "vhost_create_blk_controller: No such device (-19)");
        server.join().unwrap();
        assert_eq!(connection.call("x", &params).unwrap_err().split(':').next(), Some("x"));
    }
}
