//! Finds the packages that have changed, for `cargo xtask check`.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::tools::Workspace;

/// Returns the packages with changed files, sorted: changed since the branch left `main`, or else in the last commit. A
/// change to the workspace's own manifest counts for all of them.
pub(crate) fn packages(workspace: &Workspace) -> Result<Vec<String>, String> {
    let base = git(workspace, &["merge-base", "HEAD", "main"])
        .or_else(|_| git(workspace, &["merge-base", "HEAD", "origin/main"]))
        .or_else(|_| git(workspace, &["rev-parse", "HEAD"]))?;
    let mut files = git(workspace, &["diff", "--name-only", base.trim()])?;
    files += &git(workspace, &["ls-files", "--others", "--exclude-standard"])?;
    if files.is_empty() {
        files = git(workspace, &["diff", "--name-only", "HEAD~1"])?;
    }
    Ok(packages_of(workspace, files.lines().map(Path::new)))
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
