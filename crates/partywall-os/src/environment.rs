//! The variables of the environment that name a place: a directory, a socket, a program, a library or a domain.
//!
//! A variable that is set and empty counts as unset, as the specification of the `XDG_…` variables demands.
//!
//! A process that gained privileges when it was executed (by a set-user-ID or set-group-ID bit, or by file
//! capabilities) has the environment of a caller with fewer. There no variable counts, so the caller chooses neither a
//! program nor a library that runs with the privileges.
#![allow(unsafe_code)]

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

/// Returns the value of a variable that names a place. `None` if it is unset or empty, and in a
/// [privileged](is_privileged) process.
pub fn place(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty() && !is_privileged())
}

/// Returns the directory that a variable names, as [`place`]. A relative path counts as unset: the processes that meet
/// there have different working directories.
pub fn directory(name: &str) -> Option<PathBuf> {
    place(name).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Returns the directory for temporary files: `TMPDIR`, as [`directory`], else `/tmp`.
pub fn temporary_directory() -> PathBuf {
    directory("TMPDIR").unwrap_or_else(|| "/tmp".into())
}

/// Returns the directories in which Partywall's programs are looked for: that of the running executable, then `PATH`.
///
/// In a [privileged](is_privileged) process these are the usual directories of the system: its caller may have made
/// another link to the executable, in a directory of its own.
pub fn program_directories() -> Vec<PathBuf> {
    let program = env::current_exe().ok().filter(|_| !is_privileged());
    let mut directories: Vec<_> = program.iter().filter_map(|program| program.parent()).map(Path::to_owned).collect();
    if let Some(own) = directories.first()
        && (own.ends_with("examples") || own.ends_with("deps"))
    {
        // Cargo places examples and tests one level below the programs.
        directories.extend(own.parent().map(Path::to_owned));
    }
    directories.extend(env::split_paths(&place("PATH").unwrap_or_else(|| USUAL_PATH.into())));
    directories
}

/// Returns whether this process may execute the file at a path.
pub fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// Keeps the caller's environment from a program that a [privileged](is_privileged) process is about to start. Does
/// nothing in any other process. Variables that are set afterwards reach the program.
pub fn shield(command: &mut Command) -> &mut Command {
    if is_privileged() { command.env_clear().env("PATH", USUAL_PATH) } else { command }
}

/// Returns whether this process gained privileges when it was executed.
pub fn is_privileged() -> bool {
    // SAFETY: this reads the auxiliary vector, which the kernel has written before the process began and nothing
    // changes.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Directories that only an administrator can write.
const USUAL_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
