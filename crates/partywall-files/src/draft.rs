//! Files that appear under their names when they are complete.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, PROC_SUPER_MAGIC, RenameFlags, linkat, open, renameat_with, statfs},
    io::Errno,
};

/// A file that is being written. It gets its name from [`publish`](Draft::publish); if it is dropped before, nothing is
/// left.
///
/// Until then it has no name, so nothing is left of a process that is killed either. Where the file system has no
/// unnamed files (NFS, FAT), and without `/proc`, it is a file `.partywall-PID-NUMBER` beside its target, which a
/// killed process leaves.
///
/// Pipes, devices and open files ([`is_in_place`]) have a name already: they are written directly.
#[derive(Debug)]
pub struct Draft {
    file: File,
    /// The file to create; none if the draft is written in place.
    target: Option<Target>,
}

#[derive(Debug)]
struct Target {
    path: PathBuf,
    replace: bool,
    /// The name until then, where a draft needs one.
    name: Option<TemporaryName>,
}

impl Draft {
    /// Begins a file. A link stays a link: its target is created or replaced, and a replaced file's permissions stay.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] for an existing file, unless `replace`; those of the kernel.
    pub fn create(path: &Path, replace: bool) -> io::Result<Self> {
        let found = fs::metadata(path);
        if found.as_ref().is_ok_and(fs::Metadata::is_dir) {
            return Err(Errno::ISDIR.into());
        }
        let Some(target) = resolve(path)? else {
            return Ok(Self { file: open_in_place(path)?, target: None });
        };
        match &found {
            Ok(found) if !found.is_file() => return Ok(Self { file: open_in_place(path)?, target: None }),
            Ok(_) if !replace => return Err(Errno::EXIST.into()),
            _ => {}
        }
        let (file, name) = match unnamed(folder(&target)) {
            Some(file) => (file, None),
            None => named(&target)?,
        };
        if let Ok(found) = found {
            file.set_permissions(found.permissions())?;
        }
        Ok(Self { file, target: Some(Target { path: target, replace, name }) })
    }

    /// Gives the file its name, and returns it. An existing file is replaced in one step: a process finds the old one
    /// or the new one, and one that has opened the old one keeps it.
    ///
    /// A kill between the two calls that replace a file leaves the complete new one beside it, as
    /// `.partywall-PID-NUMBER`.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if another process has created the file meanwhile, unless it may be replaced;
    /// those of the kernel.
    pub fn publish(self) -> io::Result<File> {
        let Self { file, target } = self;
        let Some(Target { path, replace, name }) = target else { return Ok(file) };
        match name {
            None => match link(&file, &path) {
                // A link replaces nothing; a rename does.
                Err(error) if replace && error.kind() == io::ErrorKind::AlreadyExists => {
                    let (name, ()) = TemporaryName::create(&path, |name| link(&file, name))?;
                    name.rename(&path)?;
                }
                linked => linked?,
            },
            Some(name) if replace => name.rename(&path)?,
            Some(name) => name.rename_if_absent(&path)?,
        }
        Ok(file)
    }
}

impl Write for Draft {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes a file that appears when it is complete; see [`Draft`].
///
/// # Errors
/// Those of [`Draft::create`] and [`Draft::publish`].
pub fn write_file(path: &Path, bytes: &[u8], replace: bool) -> io::Result<()> {
    let mut draft = Draft::create(path, replace)?;
    draft.write_all(bytes)?;
    draft.publish().map(drop)
}

/// Returns whether a path leads to something that is written in place: a pipe, a device, or an open file, such as
/// `/dev/stdout` and `/dev/fd/3`.
pub fn is_in_place(path: &Path) -> bool {
    let is_special = |found: fs::Metadata| !found.is_file() && !found.is_dir();
    fs::metadata(path).is_ok_and(is_special) || matches!(resolve(path), Ok(None))
}

/// Follows the links of `path`, also if its target does not exist. Returns `None` if they lead into `/proc`: a file
/// that is open may look like a regular file there, but has no name that could be given to another one.
fn resolve(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        if statfs(folder(&path))?.f_type == PROC_SUPER_MAGIC {
            return Ok(None);
        }
        let Ok(to) = fs::read_link(&path) else { return Ok(Some(path)) };
        path = folder(&path).join(to);
    }
    Err(Errno::LOOP.into())
}

fn open_in_place(path: &Path) -> io::Result<File> {
    // An open file may have been written already. Devices differ in what appending means to them.
    let append = fs::metadata(path).is_ok_and(|found| found.is_file());
    OpenOptions::new().write(true).append(append).open(path)
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Creates a file without a name, if the file system can do that and the file can be linked.
fn unnamed(folder: &Path) -> Option<File> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file: OwnedFd = open(folder, flags, Mode::from_raw_mode(0o666)).ok()?;
    fs::symlink_metadata(path_of(&file)).is_ok().then(|| file.into())
}

fn named(target: &Path) -> io::Result<(File, Option<TemporaryName>)> {
    let create = |name: &Path| OpenOptions::new().write(true).create_new(true).open(name);
    let (name, file) = TemporaryName::create(target, create)?;
    Ok((file, Some(name)))
}

/// Links a file without a name. By its descriptor alone only a privileged process could.
fn link(file: &File, to: &Path) -> io::Result<()> {
    Ok(linkat(CWD, path_of(file), CWD, to, AtFlags::SYMLINK_FOLLOW)?)
}

fn path_of(file: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// A name beside a target, which is removed unless the target has taken its file.
#[derive(Debug)]
struct TemporaryName(Option<PathBuf>);

impl TemporaryName {
    /// Calls `create` with names until one is free.
    fn create<T>(target: &Path, create: impl Fn(&Path) -> io::Result<T>) -> io::Result<(Self, T)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let mut name = OsString::from(".partywall-");
            name.push(format!("{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
            let path = target.with_file_name(name);
            match create(&path) {
                // Left by a killed process of the same pid, or used by one of another container.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                created => return created.map(|created| (Self(Some(path)), created)),
            }
        }
    }

    fn rename(self, target: &Path) -> io::Result<()> {
        self.take(|name| fs::rename(name, target))
    }

    fn rename_if_absent(self, target: &Path) -> io::Result<()> {
        let Some(name) = &self.0 else { return Ok(()) };
        match renameat_with(CWD, name, CWD, target, RenameFlags::NOREPLACE) {
            // NFS and some others have only links for this.
            Err(Errno::INVAL | Errno::NOSYS) => Ok(linkat(CWD, name, CWD, target, AtFlags::empty())?),
            renamed => self.take(|_| Ok(renamed?)),
        }
    }

    /// Forgets the name if `rename` has succeeded.
    fn take(mut self, rename: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        if let Some(name) = &self.0 {
            rename(name)?;
        }
        self.0 = None;
        Ok(())
    }
}

impl Drop for TemporaryName {
    fn drop(&mut self) {
        if let Some(name) = &self.0 {
            // A failure cannot be reported any more; the name contains the pid.
            let _ = fs::remove_file(name);
        }
    }
}

/// As many links as the kernel follows.
const MAX_LINKS: usize = 40;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// Begins a file, with a name or without.
    fn begin(path: &Path, replace: bool, has_name: bool) -> Draft {
        let mut draft = Draft::create(path, replace).unwrap();
        if has_name {
            let (file, name) = named(path).unwrap();
            draft = Draft { file, target: Some(Target { path: path.to_owned(), replace, name }) };
        }
        draft.write_all(b"new").unwrap();
        draft
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = entries.collect();
        names.sort();
        names
    }

    // Holds 305.
    #[test]
    fn file_appears_when_it_is_complete() {
        for has_name in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("f");
            let draft = begin(&path, false, has_name);
            assert!(!path.exists());
            assert_eq!(names(folder.path()).len(), usize::from(has_name));
            drop(draft);
            assert_eq!(names(folder.path()), [""; 0]);
            drop(begin(&path, false, has_name).publish().unwrap());
            assert_eq!((&fs::read(&path).unwrap()[..], names(folder.path())), (&b"new"[..], vec!["f".to_owned()]));
        }
    }

    // Holds 305.
    #[test]
    fn file_that_appears_meanwhile_is_replaced_only_on_request() {
        for has_name in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("f");
            for (replace, remains) in [(false, "old"), (true, "new")] {
                let _ = fs::remove_file(&path);
                let draft = begin(&path, replace, has_name);
                fs::write(&path, "old").unwrap();
                let published = draft.publish();
                assert_eq!(published.map(drop).map_err(|e| e.kind()).is_ok(), replace);
                assert_eq!((&fs::read_to_string(&path).unwrap()[..], names(folder.path()).len()), (remains, 1));
            }
            let refused = Draft::create(&path, false).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        }
    }

    #[test]
    fn links_stay_and_their_targets_are_written() {
        let folder = tempfile::tempdir().unwrap();
        let [old, link, new, dangling] = ["old", "link", "new", "dangling"].map(|name| folder.path().join(name));
        fs::write(&old, "old").unwrap();
        fs::set_permissions(&old, fs::Permissions::from_mode(0o640)).unwrap();
        symlink("old", &link).unwrap();
        symlink("new", &dangling).unwrap();
        write_file(&link, b"1", true).unwrap();
        write_file(&dangling, b"2", false).unwrap();
        assert_eq!((fs::read(&old).unwrap(), fs::read(&new).unwrap()), (b"1".to_vec(), b"2".to_vec()));
        assert_eq!(fs::metadata(&old).unwrap().permissions().mode() & 0o777, 0o640);
        assert!(fs::read_link(&link).is_ok() && fs::read_link(&dangling).is_ok());
        symlink("loop", folder.path().join("loop")).unwrap();
        assert!(write_file(&folder.path().join("loop"), b"3", true).is_err());
    }

    // Holds 306.
    #[test]
    fn open_files_pipes_and_devices_are_written_in_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let open = OpenOptions::new().append(true).create(true).open(&path).unwrap();
        (&open).write_all(b"before ").unwrap();
        let [by_proc, by_dev] =
            ["/proc/self/fd", "/dev/fd"].map(|of| PathBuf::from(format!("{of}/{}", open.as_raw_fd())));
        let link = folder.path().join("link");
        symlink(&by_dev, &link).unwrap();
        for path in [&by_proc, &by_dev, &link, Path::new("/dev/null")] {
            assert!(is_in_place(path), "{path:?}");
            write_file(path, b"x", false).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "before xxx");
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        assert!(!is_in_place(&path) && !is_in_place(folder.path()) && !is_in_place(&folder.path().join("none")));
        assert_eq!(names(folder.path()), ["f", "link"]);
    }
}
