//! `cargo xtask c-archive`: the library for C and C++ as a release offers it for download, with the program that is its
//! broker, the licences of all that is in them, and the oldest C library that they work with.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::c_install::{self, ABI};
use crate::gpu_bundle::commit;
use crate::tools::{Workspace, output_of};

/// The profile of what a release ships.
const PROFILE: &str = "dist";
/// Where documents are, below the prefix.
const DOCUMENTS: &str = "share/doc/partywall";

/// Makes `partywall-c-VERSION-x86_64-linux.tar.gz` in `target/c-archive`, or in the folder after `--out`. `--libraries`
/// and `--program` take what is built already.
pub(crate) fn run(workspace: &Workspace, options: &[&str]) -> Result<(), String> {
    let built = workspace.target.join(PROFILE);
    let (mut out, mut libraries, mut program) = (workspace.target.join("c-archive"), None, None);
    let mut options = options.iter();
    while let Some(option) = options.next() {
        let value = options.next().map(PathBuf::from);
        match (*option, value) {
            ("--out", Some(folder)) => out = folder,
            ("--libraries", Some(folder)) => libraries = Some(folder),
            ("--program", Some(file)) => program = Some(file),
            (option, _) => return Err(format!("c-archive has no option {option}, or it lacks a value")),
        }
    }
    if libraries.is_none() || program.is_none() {
        let words = ["build", "--locked", "--profile", PROFILE, "-p", "partywall-c", "-p", "partywall-cli"];
        workspace.run(&mut workspace.cargo(words))?;
    }
    let libraries = libraries.unwrap_or_else(|| built.clone());
    let program = program.unwrap_or_else(|| built.join("partywall"));

    let version = c_install::version(workspace)?;
    let name = format!("partywall-c-{version}-{}-linux", std::env::consts::ARCH);
    let prefix = out.join(&name);
    let failed = |error: io::Error| format!("cannot pack {}: {error}", prefix.display());
    if prefix.exists() {
        fs::remove_dir_all(&prefix).map_err(failed)?;
    }
    c_install::install(workspace, &libraries, &prefix)?;
    let documents = prefix.join(DOCUMENTS);
    fs::create_dir_all(prefix.join("bin")).and_then(|()| fs::create_dir_all(&documents)).map_err(failed)?;
    fs::copy(program, prefix.join("bin/partywall")).map_err(failed)?;
    let shared = prefix.join(format!("lib/libpartywall.so.{version}"));
    let linked = [prefix.join("bin/partywall"), shared];
    workspace.run(Command::new("strip").arg("--strip-unneeded").args(&linked))?;
    workspace.run(Command::new("strip").arg("--strip-debug").arg(prefix.join("lib/libpartywall.a")))?;
    licences(workspace, &documents)?;

    let oldest = oldest_glibc(&linked)?;
    let about = format!(
        "partywall {version}\nabi {ABI}: libpartywall.so.{ABI}\nglibc {oldest} or later\ncommit {}\n",
        commit(workspace)
    );
    fs::write(documents.join("VERSIONS"), &about).map_err(failed)?;
    let archive = out.join(format!("{name}.tar.gz"));
    // The same files make the same archive.
    let mut pack = Command::new("tar");
    pack.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "-C"]).arg(&out);
    workspace.run(pack.args(["-czf".as_ref(), archive.as_os_str(), name.as_ref()]))?;
    println!("{about}{}", archive.display());
    Ok(())
}

/// Writes which packages are in the library and the program, and the texts of their licences.
fn licences(workspace: &Workspace, documents: &Path) -> Result<(), String> {
    let failed = |error: io::Error| format!("cannot write into {}: {error}", documents.display());
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        fs::copy(workspace.root.join(name), documents.join(name)).map_err(failed)?;
    }
    let tree = "tree --locked -p partywall-c -p partywall-cli -e normal --prefix none --format {p}|{l}";
    let tree = output_of(&mut workspace.cargo(tree.split(' ')))?;
    let metadata = output_of(&mut workspace.cargo(["metadata", "--locked", "--format-version", "1"]))?;
    let metadata: Value = serde_json::from_str(&metadata).map_err(|error| format!("cargo metadata: {error}"))?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata names no packages")?;
    let mut list = String::from("Packages in libpartywall and in the program partywall, with their licences:\n\n");
    for line in tree.lines().collect::<BTreeSet<_>>() {
        let Some((package, licence)) = line.split_once('|') else { continue };
        let mut words = package.split(' ');
        let (name, version) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let version = version.trim_start_matches('v');
        if name.starts_with("partywall") || list.contains(&format!("{name} {version}: ")) {
            continue;
        }
        let _ = writeln!(list, "{name} {version}: {}", licence.trim_end_matches(" (*)"));
        let is_it = |package: &&Value| package["name"] == name && package["version"] == version;
        let manifest = packages.iter().find(is_it).and_then(|package| package["manifest_path"].as_str());
        let source = manifest.and_then(|manifest| Path::new(manifest).parent());
        let source = source.ok_or_else(|| format!("cargo metadata does not say where {name} {version} is"))?;
        copy_licences(source, &documents.join("licences").join(format!("{name}-{version}"))).map_err(failed)?;
    }
    fs::write(documents.join("PACKAGES"), list).map_err(failed)
}

fn copy_licences(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        let is_licence = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];
        if is_licence.iter().any(|start| name.starts_with(start)) && entry.file_type()?.is_file() {
            fs::create_dir_all(to)?;
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Returns the oldest release of the C library that has all functions which these files need.
fn oldest_glibc(files: &[PathBuf]) -> Result<String, String> {
    let symbols = output_of(Command::new("objdump").arg("-T").args(files))?;
    let newest = newest_glibc(&symbols).ok_or("objdump names no function of the C library")?;
    Ok(format!("{}.{}", newest.0, newest.1))
}

/// Returns the newest version among those of symbols, in a table of objdump.
fn newest_glibc(symbols: &str) -> Option<(u32, u32)> {
    let versions = symbols.split("GLIBC_").skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(rest.len());
        let (major, minor) = rest[..end].split_once('.')?;
        let minor = minor.split('.').next()?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    });
    versions.max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_version_of_the_c_library_counts() {
        let table = "0000 DF *UND* 0000 (GLIBC_2.2.5) read\n0000 DF *UND* 0000 (GLIBC_2.34) dlsym\n\
                     0000 DF *UND* 0000 (GLIBC_2.9) pipe2\n0000 g DF .text 0001 Base pw_version\n";
        assert_eq!(newest_glibc(table), Some((2, 34)));
        assert_eq!(newest_glibc("0000 g DF .text 0001 Base pw_version\n"), None);
    }
}
