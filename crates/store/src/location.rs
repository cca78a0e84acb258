//! Where an image lies: a path, or a URL.
mod written;

use crate::Target;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use thiserror::Error;
use url::Url;

pub use written::Written;

/// Port of NBD servers.
const NBD_PORT: u16 = 10809;

/// Where an image lies.
///
/// ```
/// use paravane_store::Location;
/// use std::path::Path;
///
/// let location: Location = "nbd://store.example/vm0".parse()?;
/// assert!(matches!(&location, Location::Nbd(nbd) if nbd.export == "vm0"));
/// let file: Location = "images/vm0.img".parse()?;
/// assert_eq!(file.path(), Some(Path::new("images/vm0.img")));
/// # Ok::<(), paravane_store::LocationError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// A file or block device of this host.
    File(PathBuf),
    /// `nbd://HOST[:PORT]/[EXPORT]`, `nbd+unix:///[EXPORT]?socket=PATH`; `nbds` for TLS.
    ///
    /// `?[tls-certificates=FOLDER][&tls-hostname=NAME][&write-through=on]`.
    Nbd(NbdLocation),
    /// `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][:id=USER][:conf=FILE]`.
    Rbd(RbdLocation),
    /// `http://` or `https://`: an object that is read by ranges.
    ///
    /// `#[tls-certificates=FOLDER][&digests=FILE]`: a server's query is its own.
    Http(HttpLocation),
    /// `s3://BUCKET/KEY[?endpoint=URL][&region=REGION][&credentials=FILE][&tls-certificates=FOLDER]
    /// [&digests=FILE]`.
    S3(Box<S3Location>),
}

/// An export of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NbdLocation {
    /// The server.
    pub target: Target,
    /// Name of the export; may be empty.
    pub export: String,
    /// TLS, if the connection must have it.
    pub tls: Option<TlsFiles>,
    /// Each write is durable when it is acknowledged.
    pub write_through: bool,
}

/// Where the keys and certificates of TLS lie.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct TlsFiles {
    /// Folder with `ca-cert.pem`, `client-cert.pem` and `client-key.pem` [the authorities of this
    /// host, no certificate of the client].
    pub folder: Option<PathBuf>,
    /// Name in the server's certificate [the host of the URL].
    pub hostname: Option<String>,
}

/// An image of a Ceph cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RbdLocation {
    /// Name of the pool.
    pub pool: String,
    /// Namespace in the pool.
    pub namespace: Option<String>,
    /// Name of the image.
    pub image: String,
    /// Snapshot to read.
    pub snapshot: Option<String>,
    /// User without `client.` \[admin\].
    pub id: Option<String>,
    /// Configuration file \[/etc/ceph/ceph.conf\].
    pub conf: Option<PathBuf>,
}

/// An object of an HTTP server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HttpLocation {
    /// What the server knows it by, without fragment.
    pub url: Url,
    /// Whom and what this side believes.
    pub files: ObjectFiles,
}

/// Files that say whom and what of an object this side believes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ObjectFiles {
    /// Folder with `ca-cert.pem`, `client-cert.pem` and `client-key.pem` [the authorities of this
    /// host, no certificate of the client].
    pub certificates: Option<PathBuf>,
    /// SHA-256 of each chunk in hexadecimal, one a line in order [the server is trusted].
    ///
    /// `split -b 262144 --filter=sha256sum FILE` prints them for chunks of 256 KiB.
    pub digests: Option<PathBuf>,
}

/// An object of a store that speaks S3.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct S3Location {
    /// Name of the bucket.
    pub bucket: String,
    /// Key of the object.
    pub key: String,
    /// URL of the server [Amazon's].
    pub endpoint: Option<Url>,
    /// Region of the bucket \[us-east-1\].
    pub region: Option<String>,
    /// Keys in the format of `~/.aws/credentials`, profile `default` [the environment's
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`; none: anonymous].
    pub credentials: Option<PathBuf>,
    /// Whom and what this side believes.
    pub files: ObjectFiles,
}

impl ObjectFiles {
    /// Takes a parameter of a location. `false`: it is none of these.
    fn take(&mut self, name: &str, value: &str) -> bool {
        match name {
            "tls-certificates" => self.certificates = Some(value.into()),
            "digests" => self.digests = Some(value.into()),
            _ => return false,
        }
        true
    }

    fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        self.certificates.iter_mut().chain(&mut self.digests)
    }
}

/// A location is malformed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{location}: {reason}")]
pub struct LocationError {
    /// As it was written, without what may be secret.
    pub location: String,
    /// What is wrong, and what is right.
    pub reason: String,
}

impl Location {
    /// Reads a location; what is not UTF-8 is a path.
    ///
    /// # Errors
    /// A URL is malformed.
    pub fn from_os(text: &OsStr) -> Result<Self, LocationError> {
        text.to_str().map_or_else(|| Ok(Self::File(text.into())), str::parse)
    }

    /// Makes relative paths in it relative to `base`.
    pub fn resolve(&mut self, base: &Path) {
        let join = |path: &mut PathBuf| *path = base.join(&path);
        match self {
            Self::File(path) => join(path),
            Self::Nbd(nbd) => {
                if let Target::Unix(path) = &mut nbd.target {
                    join(path);
                }
                nbd.tls.iter_mut().filter_map(|tls| tls.folder.as_mut()).for_each(join);
            }
            Self::Rbd(rbd) => rbd.conf.iter_mut().for_each(join),
            Self::Http(http) => http.files.paths().for_each(join),
            Self::S3(s3) => s3.files.paths().chain(&mut s3.credentials).for_each(join),
        }
    }

    /// Files and folders with keys that it names.
    #[must_use]
    pub fn keys(&self) -> Vec<&Path> {
        let (first, second) = match self {
            Self::File(_) | Self::Rbd(_) => (None, None),
            Self::Nbd(nbd) => (nbd.tls.as_ref().and_then(|tls| tls.folder.as_ref()), None),
            Self::Http(http) => (http.files.certificates.as_ref(), None),
            Self::S3(s3) => (s3.files.certificates.as_ref(), s3.credentials.as_ref()),
        };
        first.into_iter().chain(second).map(PathBuf::as_path).collect()
    }

    /// The path, if it is a file.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            _ => None,
        }
    }

    /// Last part of its name, for example to identify the disk.
    #[must_use]
    pub fn name(&self) -> String {
        let last = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
        match self {
            Self::File(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            Self::Nbd(nbd) => last(&nbd.export),
            Self::Rbd(rbd) => rbd.image.clone(),
            Self::Http(http) => last(http.url.path()),
            Self::S3(s3) => last(&s3.key),
        }
    }
}

impl From<PathBuf> for Location {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

impl FromStr for Location {
    type Err = LocationError;

    fn from_str(text: &str) -> Result<Self, LocationError> {
        let malformed = |reason: String| LocationError { location: without_secrets(text), reason };
        let Some((written, rest)) = text.split_once(':') else { return Ok(Self::File(text.into())) };
        let is_url = rest.starts_with("//") && has_form_of_scheme(written);
        // Upper case is as good as lower case in a URL; other names with a colon are files.
        let scheme = if is_url { &*written.to_ascii_lowercase() } else { written };
        if !is_scheme(scheme) {
            return if is_url { Err(unknown(text, rest, scheme)) } else { Ok(Self::File(text.into())) };
        }
        if scheme == "rbd" {
            return rbd(&text["rbd:".len()..]).map(Self::Rbd).map_err(malformed);
        }
        let url = Url::parse(text).map_err(|error| malformed(error.to_string()))?;
        if names_user(&url) {
            return Err(malformed(NO_PASSWORD.into()));
        }
        match scheme {
            "http" | "https" => http(url).map(Self::Http).map_err(malformed),
            "s3" => s3(&url).map(|s3| Self::S3(Box::new(s3))).map_err(malformed),
            _ => nbd(&url).map(Self::Nbd).map_err(malformed),
        }
    }
}

const NO_PASSWORD: &str = "a location holds no user or password; every user can read it in the process list";

fn names_user(url: &Url) -> bool {
    !url.username().is_empty() || url.password().is_some()
}

/// A location as it was written, for messages, without what may be secret: users and passwords, and
/// values of parameters.
///
/// ```
/// use paravane_store::without_secrets;
///
/// assert_eq!(without_secrets("raw:http://user:secret@host/a.img?token=secret"), "raw:http://...@host/a.img?...");
/// assert_eq!(without_secrets("rbd:pool/disk:id=vm:key=secret"), "rbd:pool/disk:id=...:key=...");
/// assert_eq!(without_secrets("images/a.img"), "images/a.img");
/// ```
#[must_use]
pub fn without_secrets(text: &str) -> String {
    if let Some((scheme, rest)) = text.split_once("://") {
        // A password may hold any character.
        let (user, rest) = rest.rsplit_once('@').map_or(("", rest), |(_, rest)| ("...@", rest));
        let end = rest.find(['?', '#']).map_or(rest.len(), |at| at + 1);
        let more = if end < rest.len() { "..." } else { "" };
        return format!("{scheme}://{user}{}{more}", &rest[..end]);
    }
    if text.starts_with("rbd:") || text.contains(":rbd:") {
        let shown =
            |part: &str| part.split_once('=').map_or(part.to_owned(), |(name, _)| format!("{name}=..."));
        return text.split(':').map(shown).collect::<Vec<_>>().join(":");
    }
    text.to_owned()
}

/// Whether a text before a colon makes the rest a URL.
fn is_scheme(text: &str) -> bool {
    matches!(text, "nbd" | "nbds" | "nbd+unix" | "nbds+unix" | "rbd" | "http" | "https" | "s3")
}

/// Whether a text may be the scheme of a URL (RFC 3986, section 3.1).
fn has_form_of_scheme(text: &str) -> bool {
    let other = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    text.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic()) && text.bytes().all(other)
}

/// The error for a URL of another kind, without what may be a password.
fn unknown(text: &str, rest: &str, scheme: &str) -> LocationError {
    let reason = match (scheme, rest.strip_prefix("//").unwrap_or(rest)) {
        ("file", path) if path.starts_with('/') => format!("is the URL of a file; write its path, {path}"),
        _ => "unknown kind of URL; use nbd, nbds, nbd+unix, nbds+unix, rbd, http, https or s3, or begin the \
              path of a file with ./"
            .into(),
    };
    LocationError { location: without_secrets(text), reason }
}

fn nbd(url: &Url) -> Result<NbdLocation, String> {
    let export = decoded(url.path().strip_prefix('/').unwrap_or_default())?;
    if export.len() > 4096 {
        return Err(format!("an export's name has at most 4096 bytes, not {}", export.len()));
    }
    let (mut socket, mut tls, mut write_through) = (None, TlsFiles::default(), false);
    for (key, value) in url.query_pairs() {
        match &*key {
            "socket" => socket = Some(PathBuf::from(&*value)),
            "tls-certificates" => tls.folder = Some(PathBuf::from(&*value)),
            "tls-hostname" => tls.hostname = Some(value.into_owned()),
            "write-through" => {
                write_through = match &*value {
                    "on" => true,
                    "off" => false,
                    _ => return Err(format!("write-through is on or off, not {value}")),
                }
            }
            _ => {
                return Err(format!(
                    "unknown parameter {key}; there are socket, tls-certificates, tls-hostname, write-through"
                ));
            }
        }
    }
    let with_tls = url.scheme().starts_with("nbds");
    if !with_tls && tls != TlsFiles::default() {
        return Err("certificates need the scheme nbds or nbds+unix".into());
    }
    let target = match (url.scheme().ends_with("+unix"), socket) {
        (true, Some(socket)) => {
            if with_tls && tls.hostname.is_none() {
                return Err("TLS over a Unix socket needs tls-hostname=NAME".into());
            }
            Target::Unix(socket)
        }
        (true, None) => {
            return Err("a Unix socket needs socket=PATH, as in nbd+unix:///EXPORT?socket=PATH".into());
        }
        (false, Some(_)) => return Err("socket=PATH needs the scheme nbd+unix or nbds+unix".into()),
        (false, None) => Target::Tcp { host: host(url)?, port: url.port().unwrap_or(NBD_PORT) },
    };
    Ok(NbdLocation { target, export, tls: with_tls.then_some(tls), write_through })
}

/// The host of a URL; an IPv6 address loses its brackets.
fn host(url: &Url) -> Result<String, String> {
    let host = url.host_str().filter(|host| !host.is_empty()).ok_or("names no host")?;
    Ok(host.trim_start_matches('[').trim_end_matches(']').to_owned())
}

fn http(mut url: Url) -> Result<HttpLocation, String> {
    let mut files = ObjectFiles::default();
    for (name, value) in url::form_urlencoded::parse(url.fragment().unwrap_or_default().as_bytes()) {
        if !files.take(&name, &value) {
            return Err(format!("unknown parameter {name} after #; there are tls-certificates, digests"));
        }
    }
    if files.certificates.is_some() && url.scheme() != "https" {
        return Err("certificates need the scheme https".into());
    }
    url.set_fragment(None);
    Ok(HttpLocation { url, files })
}

fn s3(url: &Url) -> Result<S3Location, String> {
    let key = decoded(url.path().strip_prefix('/').unwrap_or_default())?;
    if key.is_empty() {
        return Err("names no object, as in s3://BUCKET/KEY".into());
    }
    let mut found = S3Location {
        bucket: host(url)?,
        key,
        endpoint: None,
        region: None,
        credentials: None,
        files: ObjectFiles::default(),
    };
    for (name, value) in url.query_pairs() {
        match &*name {
            "endpoint" => {
                let url = value.parse().map_err(|error| format!("endpoint: {error}"))?;
                if names_user(&url) {
                    return Err(format!("endpoint: {NO_PASSWORD}"));
                }
                found.endpoint = Some(url);
            }
            "region" => found.region = Some(value.into_owned()),
            "credentials" => found.credentials = Some(value.as_ref().into()),
            _ if found.files.take(&name, &value) => {}
            _ => {
                return Err(format!(
                    "unknown parameter {name}; there are endpoint, region, credentials, tls-certificates, \
                     digests"
                ));
            }
        }
    }
    if found.files.certificates.is_some() && found.endpoint.as_ref().is_some_and(|url| url.scheme() == "http")
    {
        return Err("certificates need an endpoint with https".into());
    }
    Ok(found)
}

fn rbd(text: &str) -> Result<RbdLocation, String> {
    let mut parts = text.split(':');
    let name = parts.next().unwrap_or_default();
    let (path, snapshot) = match name.split_once('@') {
        Some((path, snapshot)) => (path, Some(snapshot.to_owned())),
        None => (name, None),
    };
    let (pool, namespace, image) = match path.split('/').collect::<Vec<_>>()[..] {
        [pool, image] => (pool, None, image),
        [pool, namespace, image] => (pool, Some(namespace.to_owned()), image),
        _ => ("", None, ""),
    };
    // A parameter that is written as those of a URL.
    if name.contains('?') || pool.is_empty() || image.is_empty() || snapshot.as_deref() == Some("") {
        return Err("an image of Ceph is rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][:id=USER][:conf=FILE]".into());
    }
    let mut found =
        RbdLocation { pool: pool.into(), namespace, image: image.into(), snapshot, ..RbdLocation::default() };
    for part in parts {
        match part.split_once('=') {
            Some(("id", id)) => found.id = Some(id.into()),
            Some(("conf", conf)) => found.conf = Some(conf.into()),
            _ => {
                let name = part.split('=').next().unwrap_or_default();
                return Err(format!("unknown parameter {name}; there are id=USER and conf=FILE"));
            }
        }
    }
    Ok(found)
}

/// Decodes %XX.
fn decoded(text: &str) -> Result<String, String> {
    percent_encoding::percent_decode_str(text)
        .decode_utf8()
        .map(Into::into)
        .map_err(|_| "a name is not UTF-8".into())
}

fn encoded(text: &str) -> impl fmt::Display + '_ {
    const KEEP: &percent_encoding::AsciiSet =
        &percent_encoding::NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');
    percent_encoding::utf8_percent_encode(text, KEEP)
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Nbd(nbd) => nbd.fmt(f),
            Self::Rbd(rbd) => rbd.fmt(f),
            Self::Http(http) => {
                // A query may hold a signature.
                let mut shown = http.url.clone();
                shown.set_query(None);
                shown.fmt(f)
            }
            Self::S3(s3) => write!(f, "s3://{}/{}", s3.bucket, encoded(&s3.key)),
        }
    }
}

impl fmt::Display for NbdLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls.is_some() { "nbds" } else { "nbd" };
        match &self.target {
            Target::Unix(path) => {
                write!(
                    f,
                    "{scheme}+unix:///{}?socket={}",
                    encoded(&self.export),
                    encoded(&path.to_string_lossy())
                )
            }
            Target::Tcp { .. } => write!(f, "{scheme}://{}/{}", self.target, encoded(&self.export)),
        }
    }
}

impl fmt::Display for RbdLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rbd:{}/", self.pool)?;
        if let Some(namespace) = &self.namespace {
            write!(f, "{namespace}/")?;
        }
        f.write_str(&self.image)?;
        match &self.snapshot {
            Some(snapshot) => write!(f, "@{snapshot}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
