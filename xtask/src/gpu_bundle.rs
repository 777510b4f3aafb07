//! `cargo xtask gpu-bundle`: everything that a machine with a GPU needs to run the GPU tests.
//!
//! The bundle is a folder that can be copied anywhere: programs without debugging symbols and a
//! script. The kernels are inside the programs and the driver is loaded at run time, so that
//! neither Rust nor CUDA has to be there. The C library must be at least as new as the one here.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::tools::{Workspace, run};

const PROGRAMS: [(&str, &str); 3] = [
    ("partywall-cli", "partywall"),
    ("partywall-gpu-tests", "partywall-gpu-tests"),
    ("partywall-bench", "partywall-bench"),
];
const RUN: &str = include_str!("gpu_bundle_run.sh");

/// The release profile without symbols, under a name of its own: stripping the release build
/// itself would have cargo compile everything again each time that the two take turns.
const PROFILE: &str = "bundle";
const PROFILE_SETTINGS: [&str; 2] = ["profile.bundle.inherits=\"release\"", "profile.bundle.strip=\"symbols\""];

/// What a bundle may weigh, so that it can be sent to a borrowed machine.
const MOST_BYTES: u64 = 40 << 20;

/// Builds the programs and packs them.
pub(crate) fn build(workspace: &Workspace) -> Result<(), String> {
    let mut command = workspace.cargo(["build", "--profile", PROFILE]);
    for setting in PROFILE_SETTINGS {
        command.args(["--config", setting]);
    }
    for (package, _) in PROGRAMS {
        command.args(["-p", package]);
    }
    run(&mut command)?;

    let bundle = workspace.target.join("gpu-bundle");
    let built = workspace.target.join(PROFILE);
    pack(&built, &bundle, &commit(workspace)).map_err(|error| format!("cannot pack {}: {error}", bundle.display()))?;
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

fn weigh(bundle: &Path) -> Result<(), String> {
    let mut total = 0;
    println!("\n{}:", bundle.display());
    for name in PROGRAMS.map(|(_, program)| program).iter().chain(&["run.sh"]) {
        let path = bundle.join(name);
        let bytes = fs::metadata(&path).map_err(|error| format!("cannot look at {}: {error}", path.display()))?.len();
        println!("{:>8.1} KiB  {name}", bytes as f64 / 1024.0);
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
