//! The steps that pack the crates as a release publishes them.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::{fs, io};

use serde_json::Value;

use super::Outcome;
use crate::tools::{Package, Workspace, cannot_read};

/// Fields that the page of a published crate shows, as cargo names them.
const FIELDS: [&str; 7] =
    ["description", "license", "readme", "keywords", "categories", "documentation", "rust_version"];
const LICENCES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];

/// The manifest of a package that selects the features of what macros are made with as the dependencies of tests select
/// them. Otherwise cargo would compile all macros and what uses them again. The features of what the packages themselves
/// use stay as they are, because those of build dependencies are selected apart.
const MACROS: &str = r#"
package = { name = "macros", edition = "2024" }
lib.path = "lib.rs"

[build-dependencies]
proc-macro2 = { version = "1", features = ["span-locations"] }
syn = { version = "2", features = ["extra-traits", "fold", "full", "visit"] }
syn-3 = { package = "syn", version = "3", features = ["extra-traits", "full", "visit-mut"] }
"#;

/// Packs all published crates, after two checks that cargo does not make: the crates describe themselves, and the
/// oldest supported Rust is the one that every test uses.
pub(super) fn pack(workspace: &Workspace) -> Outcome {
    let check = || {
        for package in published(workspace) {
            let missing = missing(&workspace.root, &package.manifest);
            if !missing.is_empty() {
                return Err(format!("{} lacks {}; see docs/releasing.md", package.name, missing.join(", ")));
            }
        }
        oldest_rust_is_pinned(workspace)?;
        write(workspace)
    };
    check().into()
}

/// Compiles each crate from its package.
///
/// `cargo publish --dry-run` would compile all dependencies once more for that. In a workspace of the unpacked
/// packages, with the profiles of this one and [`MACROS`], cargo finds those that clippy has checked. Nothing is linked:
/// what a package lacks is missed before.
pub(super) fn compile(workspace: &Workspace) -> Outcome {
    let folder = workspace.root.join("target/packages");
    let check = || {
        write(workspace)?;
        remove(&folder)?;
        fs::create_dir_all(folder.join("macros"))
            .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
        let mut patches = String::from("[patch.crates-io]\n");
        for package in published(workspace) {
            let unpacked = format!("{}-{}", package.name, package.manifest["version"].as_str().unwrap_or_default());
            let mut unpack = Command::new("tar");
            unpack.arg("-xzf").arg(workspace.root.join(format!("target/package/{unpacked}.crate")));
            workspace.run(unpack.arg("-C").arg(&folder))?;
            let _ = writeln!(patches, "{} = {{ path = \"{unpacked}\" }}", package.name);
        }
        let read = |name: &str| {
            let path = workspace.root.join(name);
            fs::read_to_string(&path).map_err(|error| cannot_read(&path, &error))
        };
        let manifest = read("Cargo.toml")?;
        let profiles = manifest.find("[profile.").map_or("", |start| &manifest[start..]);
        let manifest = format!("[workspace]\nresolver = \"3\"\nmembers = [\"*\"]\n\n{patches}\n{profiles}");
        let macros = [("macros/Cargo.toml", MACROS.to_owned()), ("macros/lib.rs", String::new())];
        for (name, text) in [("Cargo.toml", manifest), ("Cargo.lock", read("Cargo.lock")?)].into_iter().chain(macros) {
            let path = folder.join(name);
            fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        }
        let mut command = workspace.cargo(["check", "--offline", "--quiet", "--workspace", "--manifest-path"]);
        command.arg(folder.join("Cargo.toml")).arg("--target-dir").arg(&workspace.target);
        workspace.run(&mut command)?;
        remove(&folder)
    };
    check().into()
}

/// The packages that are not for this repository alone.
fn published(workspace: &Workspace) -> impl Iterator<Item = &Package> {
    workspace.packages.iter().filter(|package| !package.manifest["publish"].as_array().is_some_and(Vec::is_empty))
}

/// Writes the packages. Uncommitted changes are allowed, because a developer may want to test them. The build of
/// `xtask` has asked the registry for everything.
fn write(workspace: &Workspace) -> Result<(), String> {
    let mut command = workspace.cargo(["package", "--no-verify", "--allow-dirty", "--offline"]);
    for package in published(workspace) {
        command.args(["--package", &package.name]);
    }
    workspace.run(&mut command)
}

fn remove(folder: &Path) -> Result<(), String> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {error}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Returns the missing fields of a package that will be published.
fn missing(root: &Path, package: &Value) -> Vec<String> {
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
