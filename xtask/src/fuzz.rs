//! `cargo xtask fuzz` and the step `fuzz`: the fuzz targets, compiled for libFuzzer and the address sanitizer.
//!
//! cargo-fuzz would do the same, but it asks for a nightly toolchain. The pinned one has the sanitizer's library and
//! accepts the flags with `RUSTC_BOOTSTRAP`.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::tools::{Workspace, cannot_read};

/// The platform of the sanitizer's library.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// What cargo-fuzz passes to the compiler: libFuzzer's counters and compared values, and the sanitizer.
const FLAGS: [&str; 7] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "--cfg fuzzing",
    "-Zsanitizer=address",
];

/// How long the step `fuzz` runs each target.
const SMOKE: Duration = Duration::from_secs(5);

/// Longer inputs find little that shorter ones do not, and take longer.
const LONGEST_INPUT: &str = "-max_len=2048";

/// Returns what a machine lacks to compile and run the targets, and how to get it.
pub(crate) fn lacks() -> Option<String> {
    if !cfg!(all(target_arch = "x86_64", target_env = "gnu")) {
        return Some(format!("it is set up for {PLATFORM} alone"));
    }
    // libFuzzer is C++, compiled by its crate.
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let works = Command::new(compiler).arg("--version").stdin(Stdio::null()).output();
    let works = works.is_ok_and(|output| output.status.success());
    (!works).then(|| "there is no C++ compiler here: apt-get install g++".to_owned())
}

/// Runs each target for a few seconds.
pub(crate) fn run_all(workspace: &Workspace) -> Result<(), String> {
    compile(workspace, &["--bins"])?;
    let folder = workspace.root.join("fuzz/fuzz_targets");
    let mut targets: Vec<String> = fs::read_dir(&folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>())
        .map_err(|error| cannot_read(&folder, &error))?
        .iter()
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    targets.sort();
    for target in &targets {
        fuzz(workspace, target, SMOKE)?;
    }
    Ok(())
}

/// Runs one target.
pub(crate) fn run(workspace: &Workspace, target: &str, seconds: &str) -> Result<(), String> {
    let seconds: u64 =
        seconds.parse().map_err(|_| format!("{seconds:?} is no number of seconds: cargo xtask fuzz wire 60"))?;
    if let Some(advice) = lacks() {
        return Err(format!("cannot fuzz: {advice}"));
    }
    compile(workspace, &["--bin", target])?;
    fuzz(workspace, target, Duration::from_secs(seconds))
}

fn compile(workspace: &Workspace, which: &[&str]) -> Result<(), String> {
    let manifest = workspace.root.join("fuzz/Cargo.toml");
    let mut command = workspace.cargo(["build", "--locked", "--target", PLATFORM, "--manifest-path"]);
    command.arg(manifest).arg("--target-dir").arg(workspace.target.join("fuzz")).args(which);
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", FLAGS.join(" "));
    workspace.run(&mut command)
}

/// Runs a compiled target, beginning with its seeds and with the inputs that earlier runs have kept.
fn fuzz(workspace: &Workspace, target: &str, time: Duration) -> Result<(), String> {
    let kept = workspace.target.join("fuzz/corpus").join(target);
    let artifacts = workspace.root.join("fuzz/artifacts").join(target);
    for folder in [&kept, &artifacts] {
        fs::create_dir_all(folder).map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    }
    let mut command = Command::new(workspace.target.join("fuzz").join(PLATFORM).join("debug").join(target));
    command.current_dir(&workspace.root);
    command.arg(format!("-max_total_time={}", time.as_secs()));
    // An input that takes longer hangs.
    command.args(["-timeout=20", LONGEST_INPUT, "-print_final_stats=1", "-print_funcs=0", "-verbosity=0"]);
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    // New inputs go to the first folder.
    command.arg(kept).arg(workspace.root.join("fuzz/corpus").join(target));
    workspace.run(&mut command).map_err(|message| {
        format!(
            "{message}; the input is in fuzz/artifacts/{target}: run the program with its path as the only argument"
        )
    })
}
