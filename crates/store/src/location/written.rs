//! A location with all that it takes to open it, but secrets.
use super::{HttpLocation, Location, NbdLocation, ObjectFiles, RbdLocation, S3Location, encoded};
use std::path::Path;
use url::Url;

/// A location as text, for another start of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// What [`Location`] reads.
    pub text: String,
    /// A query was left out, which may be a secret.
    pub lacks_secret: bool,
}

impl Location {
    /// The location with its parameters, while [`Display`](std::fmt::Display) has only its name.
    #[must_use]
    pub fn written(&self) -> Written {
        let whole = |text: String| Written { text, lacks_secret: false };
        let name = self.to_string();
        match self {
            Self::File(_) => whole(name),
            Self::Nbd(nbd) => whole(with(name, '?', &of_nbd(nbd))),
            Self::Rbd(RbdLocation { id, conf, .. }) => {
                let id = id.as_ref().map(|id| format!(":id={id}")).unwrap_or_default();
                let conf = conf.as_ref().map(|conf| format!(":conf={}", conf.display())).unwrap_or_default();
                whole(name + &id + &conf)
            }
            Self::Http(HttpLocation { url, files }) => {
                Written { text: with(name, '#', &of_files(files)), lacks_secret: url.query().is_some() }
            }
            Self::S3(s3) => {
                let (parameters, lacks_secret) = of_s3(s3);
                Written { text: with(name, '?', &parameters), lacks_secret }
            }
        }
    }
}

type Parameter = (&'static str, String);

/// Appends parameters to a URL.
fn with(mut text: String, first: char, parameters: &[Parameter]) -> String {
    for (key, value) in parameters {
        text.push(if text.contains(first) { '&' } else { first });
        text += &format!("{key}={}", encoded(value));
    }
    text
}

fn of_path(key: &'static str, path: Option<&Path>) -> Option<Parameter> {
    path.map(|path| (key, path.to_string_lossy().into_owned()))
}

fn of_nbd(nbd: &NbdLocation) -> Vec<Parameter> {
    let tls = nbd.tls.as_ref();
    let folder = of_path("tls-certificates", tls.and_then(|tls| tls.folder.as_deref()));
    let hostname = tls.and_then(|tls| tls.hostname.clone()).map(|name| ("tls-hostname", name));
    let through = nbd.write_through.then(|| ("write-through", "on".to_owned()));
    folder.into_iter().chain(hostname).chain(through).collect()
}

fn of_files(files: &ObjectFiles) -> Vec<Parameter> {
    let certificates = of_path("tls-certificates", files.certificates.as_deref());
    certificates.into_iter().chain(of_path("digests", files.digests.as_deref())).collect()
}

fn of_s3(s3: &S3Location) -> (Vec<Parameter>, bool) {
    let mut lacks_secret = false;
    let endpoint = s3.endpoint.clone().map(|mut url: Url| {
        lacks_secret = url.query().is_some();
        url.set_query(None);
        ("endpoint", url.to_string())
    });
    let region = s3.region.clone().map(|region| ("region", region));
    let credentials = of_path("credentials", s3.credentials.as_deref());
    let all = endpoint.into_iter().chain(region).chain(credentials).chain(of_files(&s3.files));
    (all.collect(), lacks_secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_written_with_its_parameters() {
        for text in [
            "/images/a b.img",
            "nbd://store:10809/vm0",
            "nbd://store:10809/vm0?write-through=on",
            "nbd+unix:///a%20b?socket=/run/n.sock&write-through=on",
            "nbds+unix:///x?socket=/s&tls-certificates=/pki/a%20b&tls-hostname=h",
            "rbd:pool/space/disk@monday:id=vm:conf=/c.conf",
            "https://host/a.img#tls-certificates=/etc/pki&digests=/list%26",
            "s3://bucket/k?endpoint=http://h:5000/&region=x&credentials=/keys&digests=/list",
        ] {
            let location: Location = text.parse().unwrap();
            let Written { text, lacks_secret } = location.written();
            assert_eq!((text.parse(), lacks_secret), (Ok(location), false), "{text}");
        }
    }

    #[test]
    fn secrets_are_left_out() {
        for (text, written) in [
            ("https://host/a.img?signature=secret#digests=/list", "https://host/a.img#digests=/list"),
            ("s3://bucket/k?endpoint=http://h/%3Fkey=secret", "s3://bucket/k?endpoint=http%3A//h/"),
        ] {
            let found = text.parse::<Location>().unwrap().written();
            assert_eq!((found.text.as_str(), found.lacks_secret), (written, true));
        }
    }
}
