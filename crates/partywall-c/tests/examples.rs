//! The examples in C and C++ are built by CMake against an installed library, and run as they stand.
#![allow(clippy::unwrap_used)] // the outermost functions of tests

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use partywall_broker::{Broker, Config};
use partywall_harness::simulated_driver;

fn runs(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out.trim().to_owned()
}

/// Installs the library and builds the examples.
fn build(scratch: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let prefix = scratch.join("prefix");
    let built = scratch.join("build");
    let libraries = env::current_exe().unwrap().parent().unwrap().to_owned();
    let mut install = Command::new(env::var_os("CARGO").unwrap());
    install.args(["xtask", "c-install", "--libraries"]).arg(libraries).arg("--prefix").arg(&prefix);
    runs(install.current_dir(&root));
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(root.join("examples/c")).arg("-B").arg(&built);
    runs(
        configure
            .args(["-DCMAKE_C_FLAGS=-Werror", "-DCMAKE_CXX_FLAGS=-Werror"])
            .arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())),
    );
    runs(Command::new("cmake").arg("--build").arg(&built).arg("-j2"));
    built
}

#[test]
fn needs_cmake_to_build_the_examples_which_run() {
    let scratch = tempfile::tempdir().unwrap();
    let built = build(scratch.path());
    let socket = scratch.path().join("sockets/c.sock");
    let broker = Broker::bind(Config::new(&socket, "c", partywall::VERSION)).unwrap();
    let stop = broker.stop_handle().unwrap();
    let broker = std::thread::spawn(move || broker.run());
    let example = |name: &str| {
        // A watchdog: an example that waits for ever would keep its broker, and this test.
        let mut command = Command::new("timeout");
        command
            .args(["--signal=ABRT", "600"])
            .arg(built.join(name))
            .env("PARTYWALL_SOCKET", &socket)
            .env_remove("PARTYWALL_LIBCUDA");
        command
    };
    assert_eq!(runs(&mut example("textbook")), "262144 of 262144 integers are right, in host memory");
    let mut publisher = example("frames").args(["publish", "300"]).spawn().unwrap();
    assert_eq!(runs(example("frames").arg("subscribe")), "300 frames, 300 of them right");
    assert!(publisher.wait().unwrap().success());
    assert_eq!(runs(&mut example("epoll")), "examples/epoll/left: 50 samples\nexamples/epoll/right: 50 samples");
    assert_eq!(runs(&mut example("pipeline")), "100 of 100 spots are right");
    assert_eq!(runs(&mut example("ring")), "40 samples received, 40 of them whole, 0 missed");
    assert_eq!(runs(&mut example("square_roots")), "100 of 100 results are right");
    assert_eq!(runs(&mut example("semaphore")), "3 of 4 processes ended by themselves; both permits are free");
    assert_eq!(runs(&mut example("crash")), "a producer was killed\na producer has ended\n30 samples are whole");
    stop.stop();
    broker.join().unwrap().unwrap();

    let socket = scratch.path().join("simulated/c.sock");
    let broker = Broker::bind(Config::new(&socket, "c", partywall::VERSION)).unwrap();
    let stop = broker.stop_handle().unwrap();
    let broker = std::thread::spawn(move || broker.run());
    let mut textbook = Command::new(built.join("textbook"));
    textbook.arg("cuda:0").env("PARTYWALL_SOCKET", &socket).env("PARTYWALL_LIBCUDA", simulated_driver());
    assert_eq!(runs(&mut textbook), "262144 of 262144 integers are right, in vmm memory");
    stop.stop();
    broker.join().unwrap().unwrap();
}
