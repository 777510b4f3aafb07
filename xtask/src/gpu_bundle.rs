//! `cargo xtask gpu-bundle`: everything that a machine with a GPU needs to run the GPU tests.
//!
//! The bundle is a folder that can be copied anywhere: programs without debugging information, the
//! Python wheel with its GPU tests, and a script. The kernels are inside the programs and the driver is loaded at run time, so that
//! neither Rust nor CUDA has to be there. The C library must be at least as new as the one here.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::steps::Environment;
use crate::tools::Workspace;

const PROGRAMS: [(&str, &str); 3] = [
    ("partywall-cli", "partywall"),
    ("partywall-gpu-tests", "partywall-gpu-tests"),
    ("partywall-bench", "partywall-bench"),
];
/// Of the Python package, from `python/`: folders whose programs come along.
const PYTHON: [&str; 4] = ["tests", "tests/host", "tests/gpu", "examples"];
/// What stays, because it needs the repository. The others meet another Python there, and torch and jax on the CPU.
const STAYS: [&str; 3] = ["tests/host/test_errors.py", "tests/host/test_examples.py", "tests/host/test_package.py"];
const RUN: &str = include_str!("gpu_bundle_run.sh");

/// The profile of its programs, which leaves out debugging information.
const PROFILE: &str = "release";

/// What a bundle may weigh, so that it can be sent to a borrowed machine.
const MOST_BYTES: u64 = 40 << 20;

/// Builds the programs and packs them.
pub(crate) fn build(workspace: &Workspace) -> Result<(), String> {
    let mut command = workspace.cargo(["build", "--profile", PROFILE]);
    for (package, _) in PROGRAMS {
        command.args(["-p", package]);
    }
    workspace.run(&mut command)?;

    let bundle = workspace.target.join("gpu-bundle");
    let built = workspace.target.join(PROFILE);
    let failed = |error| format!("cannot pack {}: {error}", bundle.display());
    pack(&built, &bundle, &commit(workspace)).map_err(failed)?;
    pack_python(workspace, &bundle).map_err(failed)?;
    Environment::fresh(workspace)?.wheel(PROFILE, &bundle)?;
    weigh(&bundle)
}

/// Makes the folder anew: a program of an earlier bundle must not be run by mistake.
fn pack(built: &Path, bundle: &Path, commit: &str) -> std::io::Result<()> {
    if bundle.exists() {
        fs::remove_dir_all(bundle)?;
    }
    fs::create_dir_all(bundle)?;
    for (_, program) in PROGRAMS {
        fs::copy(built.join(program), bundle.join(program))?;
    }
    let script = bundle.join("run.sh");
    fs::write(&script, RUN.replace("@COMMIT@", commit))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))
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
    Ok(())
}

fn weigh(bundle: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot look at {}: {error}", bundle.display());
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
        return Err(format!("the bundle weighs {mib} MiB, {} are allowed; see what grew above", MOST_BYTES >> 20));
    }
    println!("copy the folder to a machine with an NVIDIA driver and start ./run.sh there");
    Ok(())
}

/// The commit that reports of the bundle will name, since git is not where it runs; empty where it
/// is not here either.
fn commit(workspace: &Workspace) -> String {
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
