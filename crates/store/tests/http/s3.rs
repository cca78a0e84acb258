//! S3: a server of moto, and signatures as botocore makes them.
use crate::daemon::{Daemon, moto};
use crate::reader::{CHUNK, Reader, at_once, cache, content, open};
use crate::server::{Answer, Server};
use paravane_store::{Link, Store};
use paravane_test_support::{Random, skip};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use tempfile::TempDir;

const SIZE: usize = 40 * CHUNK as usize + 5;
const KEYS: &str =
    "[default]\naws_access_key_id = AKIDEXAMPLE\naws_secret_access_key = wJalrXUtnFEMI/K7MDENG+b\n";

fn put(port: u16, path: &str, body: &[u8]) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head = format!(
        "PUT {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nx-amz-acl: public-read\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
}

#[test]
fn moto_serves_an_object() {
    let Some(daemon) = Daemon::start(|_, port| {
        let mut command = Command::new(moto());
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        command
    }) else {
        return skip("moto_serves_an_object", "moto_server is missing: scripts/moto installs it");
    };
    let bytes = content(SIZE);
    put(daemon.port, "/images", b"");
    put(daemon.port, "/images/base/disk%20one.img", &bytes);
    let keys = daemon.folder.path().join("keys");
    std::fs::write(&keys, KEYS).unwrap();
    let url = |name: &str| format!("s3://images/base/{name}?endpoint=http://127.0.0.1:{}", daemon.port);
    let signed = |name: &str| format!("{}&credentials={}", url(name), keys.display());
    let folder = TempDir::new().unwrap();
    for url in [url("disk%20one.img"), signed("disk%20one.img")] {
        let object = open(&url, &at_once(), Some(&cache(folder.path()))).unwrap();
        assert_eq!(object.size(), SIZE as u64);
        let mut reader = Reader::new(&object);
        let mut random = Random::new(2);
        for _ in 0..50 {
            let (at, len) = (random.below(SIZE), 1 + random.below(5 * CHUNK as usize));
            assert!(reader.read(at as u64, len).unwrap() == bytes[at..SIZE.min(at + len)]);
        }
        let status = object.status();
        assert_eq!((status.link, status.error), (Link::Up, None));
        assert_eq!(status.location, "s3://images/base/disk%20one.img");
    }
    let error = open(&signed("missing"), &at_once(), None).unwrap_err();
    assert!(error.contains("no such object"), "{error}");
    std::fs::write(&keys, "[default]\naws_secret_access_key = hidden").unwrap();
    let error = open(&signed("disk%20one.img"), &at_once(), None).unwrap_err();
    assert!(error.contains("has no aws_access_key_id") && !error.contains("hidden"), "{error}");

    put(daemon.port, "/images/base/changes.img", &bytes);
    let object = open(&url("changes.img"), &at_once(), Some(&cache(folder.path()))).unwrap();
    let mut reader = Reader::new(&object);
    assert_eq!(reader.read(0, 10).unwrap(), bytes[..10]);
    let other: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
    put(daemon.port, "/images/base/changes.img", &other);
    assert_eq!(reader.read(10 * CHUNK, 10), Err(libc::EIO));
    assert_eq!(object.status().link, Link::Unusable);
}

/// What botocore makes of the parameters of a signed URL.
const BOTOCORE: &str = "
import sys, datetime
from urllib.parse import urlsplit, parse_qs
import botocore.auth, botocore.credentials, botocore.awsrequest
url, token = sys.argv[1], sys.argv[2] or None
query = {k: v[0] for k, v in parse_qs(urlsplit(url).query).items()}
now = datetime.datetime.strptime(query['X-Amz-Date'], '%Y%m%dT%H%M%SZ')
class Clock(datetime.datetime):
    @classmethod
    def utcnow(cls): return now
    @classmethod
    def now(cls, tz=None): return now
botocore.auth.datetime = type('D', (), {'datetime': Clock})
botocore.auth.get_current_datetime = lambda remove_tzinfo=True: now
keys = botocore.credentials.Credentials('AKIDEXAMPLE', 'wJalrXUtnFEMI/K7MDENG+b', token)
request = botocore.awsrequest.AWSRequest('GET', url.split('?')[0])
auth = botocore.auth.S3SigV4QueryAuth(keys, 's3', 'eu-west-1', expires=int(query['X-Amz-Expires']))
auth.add_auth(request)
print(parse_qs(urlsplit(request.url).query)['X-Amz-Signature'][0])
";

#[test]
fn signatures_are_those_of_botocore() {
    let python = moto().with_file_name("python3");
    if !Command::new(&python)
        .args(["-c", "import botocore.auth"])
        .output()
        .is_ok_and(|it| it.status.success())
    {
        return skip("signatures_are_those_of_botocore", "botocore is missing: scripts/moto installs it");
    }
    let bytes = content(SIZE);
    let server = Server::start(move |request| Answer::good(&bytes, "a", request));
    let endpoint = server.url().replace("/disk.img", "");
    let folder = TempDir::new().unwrap();
    for (name, token) in [("plain", ""), ("a b+c/d=e", ""), ("with-token", "Token/with+signs==")] {
        let keys = folder.path().join("keys");
        let line = if token.is_empty() { String::new() } else { format!("aws_session_token={token}\n") };
        std::fs::write(&keys, format!("{KEYS}{line}")).unwrap();
        let path = name.replace(' ', "%20").replace('+', "%2B").replace('=', "%3D");
        let keys = keys.display();
        let url = format!("s3://images/{path}?endpoint={endpoint}&region=eu-west-1&credentials={keys}");
        let object = open(&url, &at_once(), None).unwrap();
        let request = server.requests().pop().unwrap();
        let sent = format!("{endpoint}{}", request.path);
        assert!(!request.path.contains("wJalr"), "{sent}");
        let output = Command::new(&python).args(["-c", BOTOCORE, &sent, token]).output().unwrap();
        let signature = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(sent.ends_with(&format!("&X-Amz-Signature={}", signature.trim())), "{sent} {signature}");
        // Nothing that is shown has the signature or the token.
        let shown = format!("{object:?} {:?}", object.status());
        assert!(!shown.contains("Signature") && !shown.contains("Token/"), "{shown}");
    }
}
