//! Where the requests for an object go.
use super::error::ObjectError;
use crate::{Location, NamedFiles, ObjectFiles, S3Location, Target};
use rusty_s3::{Bucket, Credentials, S3Action, UrlStyle};
use sha2::{Digest, Sha256};
use std::fmt;
use std::time::Duration;
use url::Url;

/// How long a signature holds: clocks differ.
const SIGNED_FOR: Duration = Duration::from_secs(3600);

/// Region of a bucket, if none is named.
const REGION: &str = "us-east-1";

/// An object, and what a request for it needs.
pub(super) struct Origin {
    kind: Kind,
    /// Without query and so without secrets.
    shown: String,
    /// Files that say whom and what this side believes.
    pub(super) files: ObjectFiles,
}

enum Kind {
    Http(Url),
    S3 { bucket: Bucket, key: String, credentials: Option<Credentials> },
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Origin").field(&self.shown).finish()
    }
}

impl Origin {
    /// The origin of a location, with the rights that it names, or those of the environment.
    ///
    /// # Errors
    /// It is no object, or the credentials cannot be read.
    pub(super) fn new(location: &Location, files: &NamedFiles) -> Result<Self, ObjectError> {
        let mut origin = Self::anonymous(location)?;
        if let (Kind::S3 { credentials, .. }, Location::S3(s3)) = (&mut origin.kind, location) {
            *credentials = match &s3.credentials {
                Some(file) => Some(Credentials::clone(&*files.credentials(file)?)),
                None => Credentials::from_env(),
            };
        }
        Ok(origin)
    }

    /// The origin of a location, without rights.
    ///
    /// # Errors
    /// It is no object.
    pub(super) fn anonymous(location: &Location) -> Result<Self, ObjectError> {
        let (kind, files) = match location {
            Location::Http(http) if http.url.username().is_empty() => {
                (Kind::Http(http.url.clone()), &http.files)
            }
            Location::Http(_) => {
                return Err(ObjectError::Invalid("a URL of an object names no user".into()));
            }
            Location::S3(s3) => {
                (Kind::S3 { bucket: bucket(s3)?, key: s3.key.clone(), credentials: None }, &s3.files)
            }
            _ => return Err(ObjectError::NoObject(Box::new(location.clone()))),
        };
        let origin = Self { kind, shown: location.to_string(), files: files.clone() };
        if origin.url().host_str().is_none_or(str::is_empty) {
            return Err(ObjectError::Invalid("names no host".into()));
        }
        Ok(origin)
    }

    /// The URL without signature, which a cache may know it by.
    pub(super) fn name(&self) -> Url {
        let mut url = self.url();
        url.set_query(None);
        url
    }

    fn url(&self) -> Url {
        match &self.kind {
            Kind::Http(url) => url.clone(),
            Kind::S3 { bucket, key, .. } => bucket.object_url(key),
        }
    }

    /// The URL of a request to get some of it, signed if it must be. It is secret.
    pub(super) fn signed(&self) -> Url {
        match &self.kind {
            Kind::Http(url) => url.clone(),
            Kind::S3 { bucket, key, credentials } => {
                bucket.get_object(credentials.as_ref(), key).sign(SIGNED_FOR)
            }
        }
    }

    /// A digest of what tells users of the same object with other rights apart.
    pub(super) fn rights(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        match &self.kind {
            Kind::Http(url) => digest.update(url.query().unwrap_or_default()),
            Kind::S3 { credentials: Some(keys), .. } => {
                for part in [keys.key(), keys.secret(), keys.token().unwrap_or_default()] {
                    digest.update((part.len() as u64).to_le_bytes());
                    digest.update(part);
                }
            }
            Kind::S3 { credentials: None, .. } => {}
        }
        digest.finalize().into()
    }

    /// Whether connections have TLS.
    pub(super) fn tls(&self) -> bool {
        self.name().scheme() == "https"
    }

    /// The server.
    pub(super) fn target(&self) -> Target {
        target(&self.name()).unwrap_or(Target::Tcp { host: String::new(), port: 0 })
    }

    /// Goes on where a redirect points to, if that is the same server.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn redirect(&mut self, to: &str) -> Result<(), String> {
        let Kind::Http(url) = &mut self.kind else {
            return Err("the server sends requests elsewhere; check endpoint and region".into());
        };
        let next = url.join(to).map_err(|error| format!("the server redirects to no URL: {error}"))?;
        let mut shown = next.clone();
        shown.set_query(None);
        if next.scheme() != url.scheme() || target(&next) != target(url) {
            return Err(format!(
                "the server redirects to another one, {shown}; name that one if it is to be used"
            ));
        }
        *url = next;
        self.shown = shown.into();
        Ok(())
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

/// The server of a URL.
fn target(url: &Url) -> Option<Target> {
    let host = url.host_str()?.trim_start_matches('[').trim_end_matches(']').to_owned();
    Some(Target::Tcp { host, port: url.port_or_known_default()? })
}

fn bucket(s3: &S3Location) -> Result<Bucket, ObjectError> {
    let invalid = |why: String| ObjectError::Invalid(why);
    let region = s3.region.clone().unwrap_or_else(|| REGION.into());
    let (endpoint, style) = match &s3.endpoint {
        Some(endpoint) if !matches!(endpoint.scheme(), "http" | "https") => {
            return Err(invalid("an endpoint is an http or https URL".into()));
        }
        Some(endpoint) => (endpoint.clone(), UrlStyle::Path),
        None => {
            let endpoint = format!("https://s3.{region}.amazonaws.com");
            let endpoint = endpoint.parse().map_err(|error| invalid(format!("region: {error}")))?;
            // Certificates hold for one label before the region.
            (endpoint, if s3.bucket.contains('.') { UrlStyle::Path } else { UrlStyle::VirtualHost })
        }
    };
    Bucket::new(endpoint, style, s3.bucket.clone(), region).map_err(|error| invalid(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(location: &str) -> Origin {
        Origin::new(&location.parse().unwrap(), &NamedFiles::default()).unwrap()
    }

    fn tcp(host: &str, port: u16) -> Target {
        Target::Tcp { host: host.into(), port }
    }

    #[test]
    fn servers_and_names() {
        let plain = origin("http://[::1]:8080/a%20b.img?token=secret#digests=/x");
        assert_eq!((plain.target(), plain.tls()), (tcp("::1", 8080), false));
        assert_eq!(plain.name().as_str(), "http://[::1]:8080/a%20b.img");
        assert_eq!(plain.signed().as_str(), "http://[::1]:8080/a%20b.img?token=secret");
        assert!(!format!("{plain} {plain:?}").contains("secret"));
        assert_eq!(origin("https://host/x").target(), tcp("host", 443));

        let s3 = origin("s3://bucket/a/b c.img?region=eu-west-1");
        assert_eq!(s3.target(), tcp("bucket.s3.eu-west-1.amazonaws.com", 443));
        assert_eq!(s3.name().path(), "/a/b%20c.img");
        let dots = origin("s3://a.b/k");
        assert_eq!(dots.name().as_str(), "https://s3.us-east-1.amazonaws.com/a.b/k");
        let own = origin("s3://bucket/k?endpoint=http://127.0.0.1:5000");
        assert_eq!(own.name().as_str(), "http://127.0.0.1:5000/bucket/k");
        assert_eq!((own.target(), own.to_string().as_str()), (tcp("127.0.0.1", 5000), "s3://bucket/k"));
    }

    #[test]
    fn redirects_stay_with_the_server() {
        let mut plain = origin("http://host/a");
        plain.redirect("/b?c").unwrap();
        assert_eq!(
            (plain.signed().as_str(), plain.to_string().as_str()),
            ("http://host/b?c", "http://host/b")
        );
        for other in ["https://host/a", "http://other/a?secret", "//other/", "http://host:81/a"] {
            let error = plain.redirect(other).unwrap_err();
            assert!(error.contains("redirects to another one, ") && !error.contains("secret"), "{error}");
        }
        assert!(plain.redirect("http://[").is_err());
        assert!(origin("s3://bucket/k").redirect("/x").unwrap_err().contains("region"));
    }
}
