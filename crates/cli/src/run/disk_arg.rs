//! `--disk PATH[,ro]`.
use std::path::PathBuf;
use std::str::FromStr;

/// One disk of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiskArg {
    pub(crate) path: PathBuf,
    pub(crate) read_only: bool,
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
