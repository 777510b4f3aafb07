//! Programs in C and C++, compiled against the headers and the shared library, and run beside a broker.
#![allow(clippy::unwrap_used)] // the outermost functions of tests

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use partywall_harness::{World, binary, simulated_driver};

/// The directory with the libraries that Cargo has built for these tests.
fn libraries() -> PathBuf {
    let program = env::current_exe().unwrap();
    program.parent().unwrap().to_owned()
}

/// The environment of a program with the simulated GPU.
const SIMULATED: bool = true;
const HOST: bool = false;

/// Compiles a program with the sanitizers, if the compiler has their libraries.
fn sanitizers() -> &'static [&'static str] {
    const ARGUMENTS: [&str; 2] = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    static FOUND: LazyLock<bool> = LazyLock::new(|| {
        let scratch = tempfile::tempdir().unwrap();
        let source = scratch.path().join("empty.c");
        fs::write(&source, "int main(void) { return 0; }\n").unwrap();
        let compiled =
            Command::new("cc").args(ARGUMENTS).arg(source).arg("-o").arg(scratch.path().join("empty")).output();
        let found = compiled.unwrap().status.success();
        if !found {
            eprintln!("without sanitizers: cc has no libasan and libubsan");
        }
        found
    });
    if *FOUND { &ARGUMENTS } else { &[] }
}

/// Compiles a program of `tests` and runs it beside a broker of its own, and another one.
fn run_with(compiler: &str, options: &[&str], source: &str, simulated: bool) {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = tempfile::tempdir().unwrap();
    let program = scratch.path().join("program");
    let libraries = libraries();
    // Programs look for the library by its SONAME.
    symlink(libraries.join("libpartywall_c.so"), scratch.path().join("libpartywall.so.0")).unwrap();
    let output = Command::new(compiler)
        .args(options)
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g", "-pthread", "-I"])
        .arg(manifest.join("include"))
        .arg(manifest.join("tests").join(source))
        .arg(libraries.join("libpartywall_c.so"))
        .args(["-lm", "-ldl", "-o"])
        .arg(&program)
        .output()
        .unwrap();
    let how = format!("{source} by {compiler} {}", options.join(" "));
    assert!(output.status.success(), "{how}: {}", String::from_utf8_lossy(&output.stderr));

    let (world, other) = (World::new(), World::new());
    // A watchdog: a program that waits for ever would keep its broker, and this test.
    let mut command = Command::new("timeout");
    command.args(["--signal=ABRT", "600"]).arg(&program);
    command
        .env("PARTYWALL_SOCKET", world.socket())
        .env("PARTYWALL_OTHER_SOCKET", other.socket())
        .env("LD_LIBRARY_PATH", scratch.path())
        .env("PARTYWALL_LIBCUDA", "/absent/libcuda.so.1");
    command.env("PARTYWALL_BIN", binary());
    if simulated {
        command.env("PARTYWALL_LIBCUDA", simulated_driver());
    }
    let ran = command.output().unwrap();
    assert!(ran.status.success(), "{how}: {}: {}", ran.status, String::from_utf8_lossy(&ran.stderr));
}

/// Runs a program in C, with sanitizers.
fn run(source: &str, simulated: bool) {
    run_with("cc", &[&["-std=c11", "-D_GNU_SOURCE"], sanitizers()].concat(), &format!("c/{source}"), simulated);
}

/// Runs a program in C++ as both standards, with and without exceptions, by each compiler of this machine, and with
/// sanitizers.
fn run_cpp(source: &str) {
    let source = format!("cpp/{source}");
    run_with("g++", &[&["-std=c++17"], sanitizers()].concat(), &source, HOST);
    run_with("g++", &["-std=c++20", "-DPARTYWALL_NO_EXCEPTIONS"], &source, HOST);
    if Command::new("clang++").arg("--version").output().is_ok() {
        run_with("clang++", &["-std=c++17", "-fno-exceptions", "-fno-rtti"], &source, HOST);
        run_with("clang++", &["-std=c++20", "-O2"], &source, HOST);
    } else {
        eprintln!("not compiled by clang++, which is not installed");
    }
}

// Holds 370.
#[test]
fn memory_of_a_gpu_is_shared_in_cpp() {
    run_with("g++", &[&["-std=c++17"], sanitizers()].concat(), "cpp/gpu.cpp", SIMULATED);
    run_with("g++", &["-std=c++20", "-DPARTYWALL_NO_EXCEPTIONS"], "cpp/gpu.cpp", SIMULATED);
}

// Holds 368, 369.
#[test]
fn samples_go_through_a_topic_in_c() {
    run("topic.c", HOST);
}

// Holds 368.
#[test]
fn objects_of_two_domains_are_not_mixed_in_c() {
    run("foreign.c", HOST);
}

#[test]
fn segments_are_built_and_opened_in_c() {
    run("segment.c", HOST);
}

// Holds 370.
#[test]
fn memory_of_a_gpu_is_shared_in_c() {
    run("gpu.c", SIMULATED);
}

// Holds 370.
#[test]
fn pools_timelines_and_semaphores_are_used_in_c() {
    run("order.c", HOST);
}

#[test]
fn tasks_are_submitted_and_claimed_in_c() {
    run("queue.c", HOST);
}

#[test]
fn names_members_and_events_are_listed_in_c() {
    run("domain.c", HOST);
}

#[test]
fn machine_is_examined_in_c() {
    run("doctor.c", HOST);
}

#[test]
fn tensors_are_exchanged_by_dlpack_in_c() {
    run("dlpack.c", HOST);
}

// Holds 372.
#[test]
fn samples_go_through_a_topic_in_cpp() {
    run_cpp("topic.cpp");
}

// Holds 372.
#[test]
fn objects_are_used_in_cpp() {
    run_cpp("objects.cpp");
}

// Holds 373.
#[test]
fn library_shares_its_process_with_others() {
    run("process.c", HOST);
    run_with("cc", &["-std=c11", "-D_GNU_SOURCE"], "c/process.c", HOST);
}

// Holds 373.
#[test]
fn processes_and_threads_end_while_they_hold_something_in_c() {
    run("ends.c", HOST);
}

// Holds 373.
#[test]
fn static_objects_live_before_and_after_main_in_cpp() {
    run_cpp("statics.cpp");
}
