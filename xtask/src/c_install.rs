//! `cargo xtask c-install`: the library for C and C++ as other projects find it: headers, shared and static library,
//! and packages for pkg-config and CMake, all of which may be moved together.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::tools::Workspace;

/// The number of the ABI: that of the SONAME, which the build script of the crate sets.
pub(crate) const ABI: &str = "0";
/// The folder of the crate.
const CRATE: &str = "crates/partywall-c";

/// Installs into the folder after `--prefix`. `--debug` builds without optimisation; `--libraries` takes libraries that
/// are built already from a folder.
pub(crate) fn run(workspace: &Workspace, options: &[&str]) -> Result<(), String> {
    let (mut prefix, mut libraries, mut profile) = (None, None, "release");
    let mut options = options.iter();
    while let Some(option) = options.next() {
        match (*option, options.as_slice().first()) {
            ("--debug", _) => profile = "dev",
            ("--prefix", Some(folder)) => prefix = Some(PathBuf::from(folder)),
            ("--libraries", Some(folder)) => libraries = Some(PathBuf::from(folder)),
            (option, _) => return Err(format!("c-install has no option {option}, or it lacks a folder")),
        }
        if *option != "--debug" {
            options.next();
        }
    }
    let prefix = prefix.ok_or("c-install needs --prefix DIR")?;
    let libraries = match libraries {
        Some(folder) => folder,
        None => {
            // Cargo leaves link-time optimisation out of a library that it also builds as an `rlib`.
            let build =
                format!("rustc --locked --profile {profile} -p partywall-c --lib --crate-type cdylib,staticlib");
            workspace.run(&mut workspace.cargo(build.split(' ')))?;
            workspace.target.join(if profile == "dev" { "debug" } else { profile })
        }
    };
    install(workspace, &libraries, &prefix)?;
    println!("partywall {} for C and C++ is in {}", version(workspace)?, prefix.display());
    Ok(())
}

/// Returns the version of the library.
pub(crate) fn version(workspace: &Workspace) -> Result<&str, String> {
    let package = workspace.packages.iter().find(|package| package.name == "partywall-c");
    let version = package.and_then(|package| package.manifest["version"].as_str());
    version.ok_or_else(|| "cargo metadata names no version of partywall-c".to_owned())
}

/// Lays built libraries out below a folder.
pub(crate) fn install(workspace: &Workspace, libraries: &Path, prefix: &Path) -> Result<(), String> {
    let native = native_libraries(workspace)?;
    lay_out(&workspace.root.join(CRATE), libraries, prefix, version(workspace)?, &native)
        .map_err(|error| format!("cannot install into {}: {error}", prefix.display()))
}

/// Returns what a program needs that is linked with the static library, which contains the one of Rust. No other crate
/// in it links anything.
fn native_libraries(workspace: &Workspace) -> Result<String, String> {
    fs::create_dir_all(&workspace.target).map_err(|error| format!("cannot create a folder: {error}"))?;
    let name = format!("empty{}", std::process::id());
    let archive = workspace.target.join(format!("lib{name}.a"));
    let output = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--crate-type", "staticlib", "--crate-name", &name, "--print", "native-static-libs", "-o"])
        .args([archive.as_os_str(), "-".as_ref()])
        .current_dir(&workspace.root)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot start rustc: {error}"))?;
    let _ = fs::remove_file(archive);
    let said = String::from_utf8_lossy(&output.stderr);
    let named = said.lines().find_map(|line| line.split_once("native-static-libs: "));
    named.map(|(_, libraries)| libraries.trim().to_owned()).ok_or_else(|| format!("rustc names no libraries: {said}"))
}

fn lay_out(from: &Path, libraries: &Path, prefix: &Path, version: &str, native: &str) -> io::Result<()> {
    let header = prefix.join("include/partywall");
    let lib = prefix.join("lib");
    let pkg_config = lib.join("pkgconfig");
    let cmake = lib.join("cmake/partywall");
    for folder in [&header, &pkg_config, &cmake] {
        fs::create_dir_all(folder)?;
    }
    for entry in fs::read_dir(from.join("include/partywall"))? {
        let entry = entry?;
        fs::copy(entry.path(), header.join(entry.file_name()))?;
    }

    let shared = format!("libpartywall.so.{version}");
    replace(&libraries.join("libpartywall_c.so"), &lib.join(&shared))?;
    replace(&libraries.join("libpartywall_c.a"), &lib.join("libpartywall.a"))?;
    let soname = format!("libpartywall.so.{ABI}");
    for (link, target) in [(soname.as_str(), shared.as_str()), ("libpartywall.so", soname.as_str())] {
        let link = lib.join(link);
        if link.is_symlink() {
            fs::remove_file(&link)?;
        }
        symlink(target, link)?;
    }

    let fill = |template: &str, path: &Path| {
        let text = fs::read_to_string(from.join("packaging").join(template))?
            .replace("@VERSION@", version)
            .replace("@ABI@", ABI)
            .replace("@NATIVE_LIBS@", native)
            .replace("@NATIVE_LIBS_LIST@", &native.replace(' ', ";"));
        fs::write(path, text)
    };
    fill("partywall.pc.in", &pkg_config.join("partywall.pc"))?;
    fill("partywall-config.cmake.in", &cmake.join("partywall-config.cmake"))?;
    fill("partywall-config-version.cmake.in", &cmake.join("partywall-config-version.cmake"))
}

/// Copies a file to a place where programs may have mapped the one before, which stays as it is for them.
fn replace(from: &Path, to: &Path) -> io::Result<()> {
    if to.exists() {
        fs::remove_file(to)?;
    }
    fs::copy(from, to).map(drop).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", from.display())))
}
