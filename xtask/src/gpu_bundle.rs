//! `cargo xtask gpu-bundle`: everything that a machine with a GPU needs to run the GPU tests.
//!
//! The bundle is a folder that can be copied anywhere: programs without debugging information, the Python wheel with
//! its GPU tests, the library for C with the sources of its tests and examples, and scripts. The kernels are inside the
//! programs and the driver is loaded at run time, so the machine needs neither Rust nor CUDA. Its C library must be at least as new as the one of the machine that builds the
//! bundle.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::steps::Environment;
use crate::tools::Workspace;

/// The packages of the programs, their names, and those in the bundle. `partywall-render` is `partywall-lab` with one
/// more lab, so that one program serves for both.
const PROGRAMS: [(&str, &str, &str); 5] = [
    ("partywall-cli", "partywall", "partywall"),
    ("partywall-render", "partywall-render", "partywall-lab"),
    ("partywall-gpu-tests", "partywall-gpu-tests", "partywall-gpu-tests"),
    ("partywall-gpu-tests", "pipeline_gpu", "pipeline_gpu"),
    ("partywall-harness", "partywall-hostile", "partywall-hostile"),
];
/// The rival that is not in Python, in a workspace of its own, and its program.
const RIVAL: [&str; 2] = ["crates/partywall-lab/peers/iceoryx2/Cargo.toml", "partywall-peer-iceoryx2"];
/// The folders of `python/` whose programs are part of the bundle.
const PYTHON: [&str; 4] = ["tests", "tests/host", "tests/gpu", "examples"];
/// Programs that are left out, because they need the repository. The others run there with another Python, and with
/// torch and jax on the CPU.
const STAYS: [&str; 5] = [
    "tests/host/test_errors.py",
    "tests/host/test_examples.py",
    "tests/host/test_guard.py",
    "tests/host/test_package.py",
    "tests/host/test_spares.py",
];
/// The program in C that one of them compiles.
const C_EXAMPLE: &str = "crates/partywall/examples/descriptors.c";
/// The library for C, as it is built and in the bundle, and the folders that its programs are compiled from.
const C_LIBRARY: [&str; 2] = ["libpartywall_c.so", "libpartywall.so.0"];
const C_SOURCES: [(&str, &str); 4] = [
    ("crates/partywall-c/include/partywall", "c/include/partywall"),
    ("crates/partywall-c/tests/c", "c/tests/c"),
    ("crates/partywall-c/tests/cpp", "c/tests/cpp"),
    ("examples/c", "c/examples"),
];
const RUN: &str = include_str!("gpu_bundle_run.sh");
const RUN_C: &str = include_str!("gpu_bundle_c.sh");

/// The profile of its programs: that of what a release ships.
const PROFILE: &str = "dist";

/// The largest size of a bundle, so that it can be sent to a borrowed machine.
const MOST_BYTES: u64 = 48 << 20;

/// Builds the programs and packs them into the bundle.
pub(crate) fn build(workspace: &Workspace) -> Result<(), String> {
    // With the extension: alone, it would select other features of shared dependencies, and compile them again.
    let packages: String = PROGRAMS.iter().map(|(package, ..)| format!(" -p {package}")).collect();
    let build = format!("build --locked --profile {PROFILE}{packages} -p partywall-python");
    workspace.run(&mut workspace.cargo(build.split(' ')))?;
    // As `c-install` does, because Cargo would leave out link-time optimisation.
    let library = format!("rustc --locked --profile {PROFILE} -p partywall-c --lib --crate-type cdylib");
    workspace.run(&mut workspace.cargo(library.split(' ')))?;
    // The folder in which the benchmarks build it, too.
    let rival = workspace.target.join("iceoryx2");
    let mut command = workspace.cargo(["build", "--release", "--locked", "--manifest-path", RIVAL[0], "--target-dir"]);
    workspace.run(command.arg(&rival))?;

    let bundle = workspace.target.join("gpu-bundle");
    let built = workspace.target.join(PROFILE);
    let failed = |error| format!("cannot pack {}: {error}", bundle.display());
    pack(&built, &bundle, &commit(workspace)).map_err(failed)?;
    fs::copy(rival.join("release").join(RIVAL[1]), bundle.join(RIVAL[1])).map_err(failed)?;
    pack_python(workspace, &bundle).map_err(failed)?;
    pack_c(workspace, &built, &bundle).map_err(failed)?;
    let programs = PROGRAMS.map(|(.., name)| name);
    let symbols = programs.iter().chain([&RIVAL[1], &C_LIBRARY[1]]).map(|name| bundle.join(name));
    workspace.run(Command::new("strip").arg("--strip-unneeded").args(symbols))?;
    Environment::fresh(workspace)?.wheel("./python", PROFILE, &build, &bundle)?;
    weigh(&bundle)
}

/// Creates the folder again, so that no program of an earlier bundle is run by mistake.
fn pack(built: &Path, bundle: &Path, commit: &str) -> std::io::Result<()> {
    if bundle.exists() {
        fs::remove_dir_all(bundle)?;
    }
    fs::create_dir_all(bundle)?;
    for (_, program, name) in PROGRAMS {
        fs::copy(built.join(program), bundle.join(name))?;
    }
    for (name, text) in [("run.sh", RUN.replace("@COMMIT@", commit)), ("c.sh", RUN_C.to_owned())] {
        let script = bundle.join(name);
        fs::write(&script, text)?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn pack_c(workspace: &Workspace, built: &Path, bundle: &Path) -> std::io::Result<()> {
    fs::copy(built.join(C_LIBRARY[0]), bundle.join(C_LIBRARY[1]))?;
    for (from, to) in C_SOURCES {
        fs::create_dir_all(bundle.join(to))?;
        for entry in fs::read_dir(workspace.root.join(from))? {
            let entry = entry?;
            fs::copy(entry.path(), bundle.join(to).join(entry.file_name()))?;
        }
    }
    Ok(())
}

fn pack_python(workspace: &Workspace, bundle: &Path) -> std::io::Result<()> {
    let root = workspace.root.join("python");
    for folder in PYTHON {
        fs::create_dir_all(bundle.join(folder))?;
        for entry in fs::read_dir(root.join(folder))? {
            let file = Path::new(folder).join(entry?.file_name());
            let stays = STAYS.iter().any(|stays| file == Path::new(stays));
            if !stays && file.extension().is_some_and(|extension| extension == "py") {
                fs::copy(root.join(&file), bundle.join(&file))?;
            }
        }
    }
    fs::copy(workspace.root.join(C_EXAMPLE), bundle.join("examples/descriptors.c"))?;
    Ok(())
}

fn weigh(bundle: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot read {}: {error}", bundle.display());
    let mut total = 0;
    println!("\n{}:", bundle.display());
    for entry in fs::read_dir(bundle).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let bytes = entry.metadata().map_err(failed)?.len();
        println!("{:>8.1} KiB  {}", bytes as f64 / 1024.0, entry.file_name().display());
        total += bytes;
    }
    if total > MOST_BYTES {
        let mib = total >> 20;
        return Err(format!(
            "the bundle has {mib} MiB, but at most {} MiB are allowed; compare the sizes above",
            MOST_BYTES >> 20
        ));
    }
    println!("copy the folder to a machine with an NVIDIA driver and start ./run.sh there");
    Ok(())
}

/// Returns the commit, for what runs where git is not available; empty if git is not available here.
pub(crate) fn commit(workspace: &Workspace) -> String {
    let output = Command::new("git")
        .args(["describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=-modified"])
        .current_dir(&workspace.root)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    match output {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => String::new(),
    }
}
