//! The steps that pack the crates as a release publishes them.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use serde_json::Value;

use super::Outcome;
use crate::tools::{Workspace, cannot_read};

/// Fields that the page of a published crate shows, as cargo names them.
const FIELDS: [&str; 7] =
    ["description", "license", "readme", "keywords", "categories", "documentation", "rust_version"];
const LICENCES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];

/// Packs all published crates, after two checks that cargo does not make: the crates describe themselves, and the
/// oldest supported Rust is the one that every test uses.
pub(super) fn pack(workspace: &Workspace) -> Outcome {
    let check = || {
        for package in &workspace.packages {
            let missing = missing(&workspace.root, &package.manifest);
            if !missing.is_empty() {
                return Err(format!("{} lacks {}; see docs/releasing.md", package.name, missing.join(", ")));
            }
        }
        oldest_rust_is_pinned(workspace)?;
        publish(workspace, &["--no-verify"])
    };
    check().into()
}

/// Compiles each crate from its package.
///
/// Cargo treats packages with the same name and version as the same package: it would compile, or use, the unpacked
/// package of an earlier state of this checkout. Unpacked packages are therefore removed before and afterwards.
pub(super) fn compile(workspace: &Workspace) -> Outcome {
    let target = workspace.root.join("target/packages");
    let clean = || unpacked()?.iter().chain([&target]).try_for_each(|folder| remove(folder));
    let check = || {
        clean()?;
        let published = publish(workspace, &["--target-dir", &target.to_string_lossy()]);
        published.and(clean())
    };
    check().into()
}

/// Returns the folders into which cargo has unpacked packages of this project. Cargo names the folder of a registry
/// without a host by a hash alone.
fn unpacked() -> Result<Vec<PathBuf>, String> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| env::home_dir().map(|home| home.join(".cargo")));
    let sources = home.ok_or("there is no home directory")?.join("registry/src");
    let entries = match fs::read_dir(&sources) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(cannot_read(&sources, &error)),
    };
    let is_ours = |folder: &Path| {
        let has_no_host = folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with('-'));
        let mut packages = fs::read_dir(folder).into_iter().flatten().flatten();
        has_no_host && packages.all(|package| package.file_name().to_string_lossy().starts_with("partywall"))
    };
    Ok(entries.flatten().map(|entry| entry.path()).filter(|folder| is_ours(folder)).collect())
}

fn remove(folder: &Path) -> Result<(), String> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {error}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// A dry run uploads nothing. Uncommitted changes are allowed, because a developer may want to test them.
fn publish(workspace: &Workspace, options: &[&str]) -> Result<(), String> {
    let mut command = workspace.cargo(["publish", "--workspace", "--dry-run", "--allow-dirty"]);
    workspace.run(command.args(options))
}

/// Returns the missing fields of a package that will be published: one that does not set `publish = false`.
fn missing(root: &Path, package: &Value) -> Vec<String> {
    if package["publish"].as_array().is_some_and(Vec::is_empty) {
        return Vec::new();
    }
    let is_empty =
        |value: &Value| value.as_str().is_none_or(str::is_empty) && value.as_array().is_none_or(Vec::is_empty);
    let mut missing: Vec<_> =
        FIELDS.iter().filter(|field| is_empty(&package[**field])).map(|field| (*field).to_owned()).collect();
    if package["metadata"]["docs"]["rs"].is_null() {
        missing.push("package.metadata.docs.rs".to_owned());
    }
    let folder = package["manifest_path"].as_str().map(Path::new).and_then(Path::parent).unwrap_or(root);
    missing.extend(LICENCES.iter().filter(|file| !folder.join(file).is_file()).map(|file| (*file).to_owned()));
    missing
}

fn oldest_rust_is_pinned(workspace: &Workspace) -> Result<(), String> {
    let path = workspace.root.join("rust-toolchain.toml");
    let text = fs::read_to_string(&path).map_err(|error| cannot_read(&path, &error))?;
    let pinned = pinned(&text).ok_or("rust-toolchain.toml names no channel")?;
    for package in &workspace.packages {
        let oldest = package.manifest["rust_version"].as_str().unwrap_or_default();
        if !is_release_of(pinned, oldest) {
            let name = &package.name;
            return Err(format!("{name} says rust-version {oldest:?}, but rust-toolchain.toml pins {pinned}"));
        }
    }
    Ok(())
}

/// Returns the channel that a `rust-toolchain.toml` names.
fn pinned(text: &str) -> Option<&str> {
    text.lines().find_map(|line| {
        line.strip_prefix("channel")?.trim().strip_prefix('=')?.trim().strip_prefix('"')?.strip_suffix('"')
    })
}

/// Returns whether two versions are the same, such as `1.95.0` and `1.95`.
fn is_release_of(release: &str, version: &str) -> bool {
    let rest = release.strip_prefix(version);
    !version.is_empty() && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn private_package_lacks_nothing() {
        assert!(missing(Path::new("/"), &json!({ "publish": [] })).is_empty());
    }

    #[test]
    fn published_package_needs_every_field() {
        let package = json!({ "publish": null, "description": "", "keywords": ["a"], "metadata": null });
        let missing = missing(Path::new("/nowhere"), &package);
        assert!(
            missing.contains(&"description".to_owned()) && missing.contains(&"LICENSE-MIT".to_owned()),
            "{missing:?}"
        );
        assert!(missing.contains(&"package.metadata.docs.rs".to_owned()), "{missing:?}");
        assert!(!missing.contains(&"keywords".to_owned()), "{missing:?}");
    }

    #[test]
    fn pinned_toolchain_is_compared_with_the_oldest_rust() {
        assert_eq!(pinned("[toolchain]\nchannel = \"1.95.0\"\n"), Some("1.95.0"));
        assert!(is_release_of("1.95.0", "1.95") && is_release_of("1.95.0", "1.95.0"));
        assert!(!is_release_of("1.95.0", "1.9") && !is_release_of("1.95.0", "1.96") && !is_release_of("1.95.0", ""));
    }
}
