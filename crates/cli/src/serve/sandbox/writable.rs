//! Which files the daemon could write from within its sandbox.
use super::paths::{AllowedPaths, real};
use super::user::Target;
use crate::kinds::checked::directory_of;
use landlock::AccessFs;
use nix::unistd::{Gid, Uid};
use rustix::thread::{CapabilitySet, capabilities};
use std::fs::Metadata;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The path by which a daemon in this sandbox could change `file`, or put another one in its place.
///
/// `user`: whom it will become. A link on the way to the file is followed.
pub(crate) fn way_to_write(allowed: &AllowedPaths, file: &Path, user: Option<&Target>) -> Option<PathBuf> {
    let real = real(file);
    let folders = [file, &real].map(directory_of);
    if let Some(way) = folders.into_iter().find_map(|folder| allowed.above(folder, AccessFs::MakeReg)) {
        return Some(way.to_owned());
    }
    let way = allowed.above(&real, AccessFs::WriteFile)?;
    // A file that cannot be examined counts as writable.
    let may = real.metadata().map_or(true, |file| may_write(&file, user));
    may.then(|| way.to_owned())
}

fn may_write(file: &Metadata, user: Option<&Target>) -> bool {
    let overrides =
        || capabilities(None).is_ok_and(|now| now.effective.contains(CapabilitySet::DAC_OVERRIDE));
    let (uid, groups) = match user {
        Some(user) => user.ids(),
        None if overrides() => return true,
        None => {
            let mut groups = nix::unistd::getgroups().unwrap_or_default();
            groups.push(Gid::effective());
            (Uid::effective(), groups)
        }
    };
    let mode = file.permissions().mode();
    // The owner can change the mode.
    file.uid() == uid.as_raw()
        || mode & 0o002 != 0
        || mode & 0o020 != 0 && groups.iter().any(|group| group.as_raw() == file.gid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_writable_where_images_or_the_cache_are() {
        let folder = tempfile::tempdir().unwrap();
        let [images, other, cache] = ["images", "other", "cache"].map(|name| folder.path().join(name));
        [&images, &other, &cache].into_iter().for_each(|path| std::fs::create_dir(path).unwrap());
        let image = images.join("a.img");
        std::fs::write(&image, "").unwrap();
        let mut allowed = AllowedPaths::default();
        allowed.image(&image, super::super::paths::ImageAccess::Write, true);
        allowed.cache(&cache);
        allowed.socket(&other.join("s"));
        let way = |file: &Path| way_to_write(&allowed, file, None);
        let [beside, apart, cached] = [&images, &other, &cache].map(|folder| folder.join("d.toml"));
        [&beside, &apart, &cached].into_iter().for_each(|file| std::fs::write(file, "").unwrap());
        assert_eq!(way(&beside), Some(images.canonicalize().unwrap()));
        assert_eq!(way(&cached), Some(cache.clone()));
        assert_eq!(way(&apart), None, "sockets can be removed, and files not be made");
        // By links in either direction.
        let [to, from] = [other.join("link"), cache.join("link")];
        std::os::unix::fs::symlink(&beside, &to).unwrap();
        std::os::unix::fs::symlink(&apart, &from).unwrap();
        assert_eq!(way(&to), Some(images.canonicalize().unwrap()));
        assert_eq!(way(&from), Some(cache.clone()), "the link can be replaced");
    }
}
