//! A file that appears at its place when it is complete.
//!
//! ```text
//!   create: .NAME.XXXXXX in the same folder --write--> finish: renamed, folder synced
//!      '-- dropped before: removed
//! ```
use crate::failure::Failure;
use crate::kinds::checked::directory_of;
use anyhow::{Context, anyhow};
use paravane_device::blk::LayerSource;
use paravane_device::blk::images::WriteLock;
use std::fs::{File, Metadata, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use tempfile::TempPath;

/// Permissions of a new file, before the umask.
const MODE: u32 = 0o666;

/// A file under a temporary name, which is removed when this is dropped.
pub(super) struct NewFile {
    temporary: TempPath,
    target: PathBuf,
    /// The file that is replaced. It stays locked until then.
    replaced: Option<WriteLock>,
}

impl NewFile {
    /// Makes an empty file in the folder of `path`.
    ///
    /// # Errors
    /// There is a file already, and not `force`; or it is in use, or no regular file. Or the folder
    /// cannot be written.
    pub(super) fn create(path: &Path, force: bool) -> Result<Self, Failure> {
        let replaced = replaceable(path, force).map_err(Failure::request)?;
        // Of a symbolic link, the file that it names is replaced.
        let target = match &replaced {
            Some(_) => path.canonicalize().with_context(|| path.display().to_string())?,
            None => path.to_owned(),
        };
        let make = || -> std::io::Result<TempPath> {
            let mut name = std::ffi::OsString::from(".");
            name.push(target.file_name().ok_or(std::io::ErrorKind::InvalidFilename)?);
            name.push(".");
            let file = tempfile::Builder::new()
                .prefix(&name)
                .permissions(Permissions::from_mode(MODE))
                .tempfile_in(directory_of(&target))?;
            if let Some((metadata, _)) = &replaced {
                keep_owner(file.as_file(), metadata)?;
                // Afterwards: a new owner takes bits off.
                file.as_file().set_permissions(metadata.permissions())?;
            }
            Ok(file.into_temp_path())
        };
        let temporary = make()
            .with_context(|| format!("{}: cannot create the image", path.display()))
            .map_err(Failure::request)?;
        Ok(Self { temporary, target, replaced: replaced.map(|(_, lock)| lock) })
    }

    /// Where the file is until it is complete.
    pub(super) fn place(&self) -> LayerSource {
        LayerSource::Path(self.temporary.to_path_buf())
    }

    /// The same, to be removed at an exit that drops nothing.
    pub(super) fn path(&self) -> PathBuf {
        self.temporary.to_path_buf()
    }

    /// Renames the file, whose content is on disk, and makes that durable.
    pub(super) fn finish(self) -> Result<(), Failure> {
        let Self { temporary, target, replaced } = self;
        let named = || format!("{}: cannot put the image in its place", target.display());
        let renamed = match &replaced {
            Some(lock) => {
                lock.check(&target).with_context(named)?;
                temporary.persist(&target)
            }
            // Another program may have made it meanwhile.
            None => temporary.persist_noclobber(&target),
        };
        renamed.map_err(|error| error.error).with_context(named)?;
        File::open(directory_of(&target)).and_then(|folder| folder.sync_all()).with_context(named)?;
        Ok(())
    }
}

/// Gives a new file the owner of the one that it replaces.
fn keep_owner(file: &File, replaced: &Metadata) -> std::io::Result<()> {
    let own = file.metadata()?;
    let change = |new: u32, old: u32| (new != old).then_some(new);
    let (owner, group) = (change(replaced.uid(), own.uid()), change(replaced.gid(), own.gid()));
    if (owner, group) == (None, None) {
        return Ok(());
    }
    fchown(file, owner, group).map_err(|error| {
        let what = format!(
            "it cannot have the owner of the one there, {}:{}: {error}; remove that first, or run this as root",
            replaced.uid(),
            replaced.gid()
        );
        std::io::Error::new(error.kind(), what)
    })
}

/// The file that is to be replaced, locked, if there is one and it can be.
fn replaceable(path: &Path, force: bool) -> Result<Option<(Metadata, WriteLock)>, anyhow::Error> {
    if path.symlink_metadata().is_err() {
        return Ok(None);
    }
    let metadata = path.metadata().with_context(|| path.display().to_string())?;
    if !metadata.is_file() {
        return Err(anyhow!("{}: is there and is not a regular file; choose another name", path.display()));
    }
    if !force {
        return Err(anyhow!("{}: is there already; --force replaces it", path.display()));
    }
    Ok(Some((metadata, WriteLock::new(path)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let name =
            |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        folder.read_dir().unwrap().map(name).collect()
    }

    fn fill(file: &NewFile, text: &str) {
        std::fs::write(file.path(), text).unwrap();
    }

    #[test]
    fn a_file_is_complete_or_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new.img");
        let file = NewFile::create(&path, false).ok().unwrap();
        fill(&file, "half");
        assert!(!path.exists() && names(folder.path()).len() == 1);
        drop(file);
        assert!(names(folder.path()).is_empty());
        let file = NewFile::create(&path, false).ok().unwrap();
        fill(&file, "whole");
        file.finish().ok().unwrap();
        assert_eq!(
            (names(folder.path()), std::fs::read(&path).unwrap()),
            (vec!["new.img".into()], b"whole".into())
        );
    }

    #[test]
    fn only_force_replaces_a_file_and_keeps_its_mode_and_name() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("old.img"), folder.path().join("link"));
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("old.img", &link).unwrap();
        assert!(NewFile::create(&path, false).is_err_and(|failure| failure.status == 2));
        let file = NewFile::create(&link, true).ok().unwrap();
        fill(&file, "new");
        file.finish().ok().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o640);
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65534), Some(65533)).unwrap();
            let file = NewFile::create(&path, true).ok().unwrap();
            fill(&file, "new");
            file.finish().ok().unwrap();
            let replaced = path.metadata().unwrap();
            assert_eq!((replaced.uid(), replaced.gid(), replaced.mode() & 0o777), (65534, 65533, 0o640));
        } else {
            paravane_test_support::skip(
                "only_force_replaces_a_file_and_keeps_its_mode_and_name: owner",
                "not root",
            );
        }
        assert!(link.symlink_metadata().unwrap().is_symlink());
        // Not a file, and a file that another program makes meanwhile.
        assert!(NewFile::create(folder.path(), true).is_err_and(|failure| failure.status == 2));
        let late = folder.path().join("late.img");
        let file = NewFile::create(&late, false).ok().unwrap();
        std::fs::write(&late, "other").unwrap();
        assert!(file.finish().is_err_and(|failure| failure.status == 1));
        assert_eq!((std::fs::read(&late).unwrap(), names(folder.path()).len()), (b"other".into(), 3));
    }
}
