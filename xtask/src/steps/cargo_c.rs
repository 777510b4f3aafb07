//! The step that compares what packagers install by cargo-c with what `cargo xtask c-install` does.

use std::collections::BTreeSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::{Command, Stdio};

use super::Outcome;
use crate::c_install;
use crate::tools::{Workspace, cannot_read, entries, output_of};

pub(super) fn compare(workspace: &Workspace) -> Outcome {
    let version = workspace.cargo(["cinstall", "--version"]).stdin(Stdio::null()).output();
    if !version.is_ok_and(|output| output.status.success()) {
        return Outcome::Skipped("there is no cargo-c here: cargo install --locked cargo-c".to_owned());
    }
    // Our own cargo has read the manifest, so one that cannot is too old, as in Debian's cargo-c 0.9.14.
    let probe = workspace.cargo(["cinstall", "--locked", "-p", "no-such-package"]).stdin(Stdio::null()).output();
    if probe.is_ok_and(|output| String::from_utf8_lossy(&output.stderr).contains("failed to parse manifest")) {
        let why = "the cargo in the cargo-c here is older than edition 2024: cargo install --locked cargo-c";
        return Outcome::Skipped(why.to_owned());
    }
    both(workspace).into()
}

fn both(workspace: &Workspace) -> Result<(), String> {
    let folder = workspace.target.join("cargo-c");
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(|error| format!("cannot remove {}: {error}", folder.display()))?;
    }
    let [ours, theirs] = ["ours", "theirs"].map(|name| folder.join(name));
    c_install::run(workspace, &["--debug", "--prefix", &ours.to_string_lossy()])?;
    let mut install = workspace.cargo(["cinstall", "--locked", "--profile", "dev", "-p", "partywall-c"]);
    workspace.run(install.arg("--prefix").arg(&theirs).arg("--libdir").arg(theirs.join("lib")))?;
    let (ours, theirs) = (facts(&ours)?, facts(&theirs)?);
    let differ: Vec<_> = ours.symmetric_difference(&theirs).map(String::as_str).collect();
    if differ.is_empty() { Ok(()) } else { Err(format!("only one of both installs\n{}", differ.join("\n"))) }
}

/// What is installed below a folder: the names of files, the headers, what pkg-config says, and the SONAME. cargo-c
/// makes no package for CMake, and writes no options of the linker.
fn facts(prefix: &Path) -> Result<BTreeSet<String>, String> {
    let mut facts = BTreeSet::new();
    collect(prefix, prefix, &mut facts)?;
    let shown = fs::canonicalize(prefix).map_err(|error| cannot_read(prefix, &error))?;
    for options in [&["--modversion"][..], &["--cflags"], &["--libs"], &["--static", "--libs"]] {
        let mut command = Command::new("pkg-config");
        command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).args(options).arg("partywall");
        for word in output_of(&mut command)?.split_whitespace().filter(|word| !word.starts_with("-Wl,")) {
            // Paths may be written in several ways.
            let option = word.get(..2).filter(|option| ["-I", "-L"].contains(option));
            let path = option.and_then(|option| fs::canonicalize(&word[option.len()..]).ok());
            let word = match (option, path.as_deref().and_then(|path| path.strip_prefix(&shown).ok())) {
                (Some(option), Some(path)) => format!("{option}PREFIX/{}", path.display()),
                _ => word.to_owned(),
            };
            facts.insert(format!("pkg-config {}: {word}", options.join(" ")));
        }
    }
    let dynamic = output_of(Command::new("readelf").args(["-d", "-W"]).arg(prefix.join("lib/libpartywall.so")))?;
    let soname = dynamic.lines().filter(|line| line.contains("(SONAME)"));
    facts.extend(soname.filter_map(|line| line.split(['[', ']']).nth(1)).map(|name| format!("SONAME: {name}")));
    Ok(facts)
}

fn collect(prefix: &Path, folder: &Path, facts: &mut BTreeSet<String>) -> Result<(), String> {
    for path in entries(folder)? {
        let name = path.strip_prefix(prefix).unwrap_or(&path).to_path_buf();
        if name.starts_with("lib/cmake") {
            continue;
        }
        if path.is_dir() {
            collect(prefix, &path, facts)?;
            continue;
        }
        let mut fact = name.display().to_string();
        if name.starts_with("include") {
            let mut hash = DefaultHasher::new();
            fs::read(&path).map_err(|error| cannot_read(&path, &error))?.hash(&mut hash);
            fact += &format!(" with the hash {:x}", hash.finish());
        }
        facts.insert(fact);
    }
    Ok(())
}
