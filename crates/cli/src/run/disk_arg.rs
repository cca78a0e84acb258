//! `--disk PATH[,ro]`: a short form of `--device blk,image=PATH`.
use super::device_arg::DeviceArg;
use crate::choices::name;
use crate::engine::ENGINES;
use crate::kinds::blk::BLK;
use paravane_device::blk::EngineChoice;
use paravane_store::Location;
use std::str::FromStr;

/// One disk of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiskArg {
    pub(crate) path: String,
    pub(crate) read_only: bool,
}

impl DiskArg {
    /// The disk as a device of its kind, with this engine.
    ///
    /// # Errors
    /// It is invalid.
    pub(crate) fn device(&self, engine: EngineChoice) -> Result<DeviceArg, anyhow::Error> {
        // What looks like a URL is the name of a file here.
        let is_path = self.path.parse().is_ok_and(|location: Location| location.path().is_some());
        let folder = if is_path { "" } else { "./" };
        let words = [
            format!("--image={folder}{}", self.path),
            format!("--engine={}", name(ENGINES, &engine)),
            "--queue-size=256".to_owned(),
            "--on-full=error".to_owned(),
        ];
        let read_only = self.read_only.then(|| "--read-only".to_owned());
        DeviceArg::new(&BLK, words.into_iter().chain(read_only))
    }
}

impl FromStr for DiskArg {
    type Err = String;

    /// Parses a path, or a path with `,rw` or `,ro` behind it.
    ///
    /// Only the text behind the last comma is an option: a path with a comma needs `,rw` or `,ro`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (path, read_only) = match text.rsplit_once(',') {
            None => (text, false),
            Some((path, "ro")) => (path, true),
            Some((path, "rw")) => (path, false),
            Some((_, option)) => {
                return Err(format!(
                    "unknown disk option {option:?}: use ro or rw; a path that contains a comma needs one of them"
                ));
            }
        };
        if path.is_empty() {
            return Err("empty path".to_owned());
        }
        Ok(Self { path: path.into(), read_only })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_a_device_with_a_local_image() {
        for path in ["a,b.img", "nbd://host/export", "/dev/vda"] {
            let disk = DiskArg { path: path.to_owned(), read_only: true };
            let device = disk.device(EngineChoice::Threads).unwrap();
            let locations = device.spec.locations();
            assert!(locations[0].path().is_some_and(|file| file.ends_with(path)), "{path}: {locations:?}");
        }
    }

    #[test]
    fn options_follow_the_last_comma() {
        let disk = |text: &str| text.parse::<DiskArg>().unwrap();
        assert_eq!(disk("a.img"), DiskArg { path: "a.img".into(), read_only: false });
        assert_eq!(disk("a.img,ro"), DiskArg { path: "a.img".into(), read_only: true });
        assert_eq!(disk("a,b.img,rw"), DiskArg { path: "a,b.img".into(), read_only: false });
        assert!("a.img,r0".parse::<DiskArg>().is_err());
        assert!(",ro".parse::<DiskArg>().is_err());
        assert!("".parse::<DiskArg>().is_err());
    }
}
