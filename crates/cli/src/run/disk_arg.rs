//! `--disk PATH[,OPTION]...`: a short form of `--device blk,image=PATH`.
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
    /// Number of queues; `None`: that of the guest's kind.
    pub(crate) queues: Option<u16>,
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
            format!("--queues={}", self.queues.unwrap_or(1)),
            "--queue-size=256".to_owned(),
            "--on-full=error".to_owned(),
        ];
        let read_only = self.read_only.then(|| "--read-only".to_owned());
        DeviceArg::new(&BLK, words.into_iter().chain(read_only))
    }
}

impl FromStr for DiskArg {
    type Err = String;

    /// Parses a path and the options behind it: `ro`, `rw`, `queues=N`.
    ///
    /// Commas before the options are the path's: a path that contains one needs an option.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut disk = Self { path: text.into(), read_only: false, queues: None };
        let mut has_option = false;
        while let Some((path, option)) = disk.path.rsplit_once(',') {
            match option.split_once('=') {
                None if option == "ro" => disk.read_only = true,
                None if option == "rw" => {}
                Some(("queues", number)) => {
                    let number = number.parse().ok().filter(|&number| number > 0);
                    disk.queues = Some(number.ok_or("queues: not a number from 1 to 65535")?);
                }
                _ if has_option => break,
                _ => {
                    return Err(format!(
                        "unknown disk option {option:?}: use ro, rw or queues=N; a path that contains a comma \
                         needs one of them"
                    ));
                }
            }
            has_option = true;
            disk.path = path.into();
        }
        if disk.path.is_empty() {
            return Err("empty path".to_owned());
        }
        Ok(disk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_a_device_with_a_local_image() {
        for path in ["a,b.img", "nbd://host/export", "/dev/vda"] {
            let disk = DiskArg { path: path.to_owned(), read_only: true, queues: None };
            let device = disk.device(EngineChoice::Threads).unwrap();
            let locations = device.spec.locations();
            assert!(locations[0].path().is_some_and(|file| file.ends_with(path)), "{path}: {locations:?}");
        }
    }

    #[test]
    fn options_are_behind_the_path() {
        let disk = |text: &str| text.parse::<DiskArg>().unwrap();
        let rw = DiskArg { path: "a.img".into(), read_only: false, queues: None };
        assert_eq!(disk("a.img"), rw);
        assert_eq!(disk("a.img,ro"), DiskArg { read_only: true, ..rw.clone() });
        assert_eq!(disk("a,b.img,rw"), DiskArg { path: "a,b.img".into(), ..rw.clone() });
        let four = DiskArg { queues: Some(4), ..rw.clone() };
        assert_eq!((disk("a.img,queues=4"), disk("a.img,rw,queues=4")), (four.clone(), four.clone()));
        assert_eq!(disk("a,b.img,queues=4,ro"), DiskArg { path: "a,b.img".into(), read_only: true, ..four });
        for wrong in ["a.img,r0", ",ro", "", "a.img,queues=0", "a.img,queues=x", "a.img,queues", "a,ro,b.img"]
        {
            assert!(wrong.parse::<DiskArg>().is_err(), "{wrong}");
        }
    }
}
