//! Finds what has changed: the packages for `cargo xtask check`, the files for `cargo xtask test`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::tools::Workspace;

/// Returns the packages with changed files, sorted: changed since the branch left `main`, or else in the last commit. A
/// change to the workspace's own manifest counts for all of them.
pub(crate) fn packages(workspace: &Workspace) -> Result<Vec<String>, String> {
    let mut changed = files(workspace).or_else(|_| files_since(workspace, "HEAD"))?;
    if changed.is_empty() {
        changed = paths(&git(workspace, &["diff", "--name-only", "HEAD~1"])?);
    }
    Ok(packages_of(workspace, changed.iter().map(PathBuf::as_path)))
}

/// Returns the files that differ from those where the branch left `main`, whether they are committed or not. What is
/// not pushed to `origin` has left its `main`.
pub(crate) fn files(workspace: &Workspace) -> Result<Vec<PathBuf>, String> {
    let base = git(workspace, &["merge-base", "HEAD", "origin/main"])
        .or_else(|_| git(workspace, &["merge-base", "HEAD", "main"]))?;
    files_since(workspace, base.trim())
}

fn files_since(workspace: &Workspace, commit: &str) -> Result<Vec<PathBuf>, String> {
    // A file that was renamed has changed in both places.
    let changed = git(workspace, &["diff", "--name-only", "--no-renames", commit])?;
    let new = git(workspace, &["ls-files", "--others", "--exclude-standard"])?;
    Ok(paths(&(changed + &new)))
}

fn paths(lines: &str) -> Vec<PathBuf> {
    lines.lines().map(PathBuf::from).collect()
}

fn packages_of<'a>(workspace: &Workspace, files: impl Iterator<Item = &'a Path>) -> Vec<String> {
    let mut changed = Vec::new();
    for file in files {
        let all = ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml"].iter().any(|name| file == Path::new(name));
        let packages = workspace.packages.iter().filter(|package| all || file.starts_with(&package.folder));
        changed.extend(packages.map(|package| package.name.clone()));
    }
    changed.sort_unstable();
    changed.dedup();
    changed
}

fn git(workspace: &Workspace, words: &[&str]) -> Result<String, String> {
    let mut command = Command::new("git");
    command.args(words).current_dir(&workspace.root).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("cannot start git: {error}"))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(format!("git {}: {reason}", words.join(" ")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
