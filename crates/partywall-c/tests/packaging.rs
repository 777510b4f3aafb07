//! Projects outside the repository find the installed library by CMake and pkg-config, and link it either way.
#![allow(clippy::unwrap_used)] // the outermost functions of tests

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    slice,
};

use partywall_harness::binary;

const PROGRAM: &str = r#"
#include <partywall/partywall.hpp>

int main() {
    partywall::domain_options options;
    options.socket = "/nonexistent/socket";
    options.no_start = 1;
    try {
        partywall::domain::connect(options);
    } catch (const partywall::unreachable &error) {
        std::puts(error.anchor());
        return 0;
    }
    return 1;
}
"#;

/// What the program prints: there is no broker.
const PRINTS: &str = "connection-refused";

const PROJECT: &str = "
cmake_minimum_required(VERSION 3.18)
project(outside CXX)
set(CMAKE_CXX_STANDARD 17)
@FIND@
add_executable(shared main.cpp)
target_link_libraries(shared PRIVATE partywall::partywall)
add_executable(static main.cpp)
target_link_libraries(static PRIVATE partywall::static)
add_library(plugin MODULE main.cpp)
target_link_libraries(plugin PRIVATE partywall::static)
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The directory with the libraries that Cargo has built for these tests.
fn libraries() -> PathBuf {
    env::current_exe().unwrap().parent().unwrap().to_owned()
}

fn runs(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out.trim().to_owned()
}

/// Installs the library into a folder, and moves that.
fn install(scratch: &Path) -> PathBuf {
    let first = scratch.join("first");
    let mut command = Command::new(env::var_os("CARGO").unwrap());
    command.args(["xtask", "c-install", "--libraries"]).arg(libraries()).arg("--prefix").arg(&first);
    runs(command.current_dir(root()));
    // A second installation replaces the first one.
    runs(&mut command);
    let moved = scratch.join("moved");
    fs::rename(first, &moved).unwrap();
    moved
}

/// Makes the archive of a release, and unpacks it in another place.
fn unpack(scratch: &Path) -> PathBuf {
    let (out, moved) = (scratch.join("out"), scratch.join("moved"));
    let mut command = Command::new(env::var_os("CARGO").unwrap());
    command.args(["xtask", "c-archive", "--libraries"]).arg(libraries()).arg("--program").arg(binary());
    runs(command.arg("--out").arg(&out).current_dir(root()));
    fs::create_dir(&moved).unwrap();
    let name = format!("partywall-c-{}-{}-linux", env!("CARGO_PKG_VERSION"), env::consts::ARCH);
    runs(Command::new("tar").arg("-xzf").arg(out.join(format!("{name}.tar.gz"))).arg("-C").arg(&moved));
    fs::remove_dir_all(out).unwrap();
    moved.join(name)
}

/// Builds the project with CMake and runs its programs.
fn build_and_run(scratch: &Path, find: &str, options: &[String]) {
    let (project, build) = (scratch.join("project"), scratch.join("build"));
    fs::create_dir_all(&project).unwrap();
    fs::write(project.join("main.cpp"), PROGRAM).unwrap();
    fs::write(project.join("CMakeLists.txt"), PROJECT.replace("@FIND@", find)).unwrap();
    runs(Command::new("cmake").arg("-S").arg(&project).arg("-B").arg(&build).args(options));
    runs(Command::new("cmake").arg("--build").arg(&build));
    for program in ["shared", "static"] {
        assert_eq!(runs(&mut Command::new(build.join(program))), PRINTS, "{program}");
    }
    let exported = runs(Command::new("nm").args(["-D", "--defined-only"]).arg(build.join("libplugin.so")));
    assert!(exported.contains(" main") && !exported.contains(" pw_"), "{exported}");
}

// Holds 374.
#[test]
fn needs_cmake_which_finds_the_moved_package_of_its_version() {
    let scratch = tempfile::tempdir().unwrap();
    let prefix = install(scratch.path());
    let at = format!("-DCMAKE_PREFIX_PATH={}", prefix.display());
    build_and_run(scratch.path(), "find_package(partywall 0.1 REQUIRED)", slice::from_ref(&at));

    for version in ["0.9", "1.0"] {
        let find =
            format!("project(x NONE)\nfind_package(partywall {version} QUIET)\nmessage(\"${{partywall_FOUND}}\")");
        let script = format!("cmake_minimum_required(VERSION 3.18)\n{find}\n");
        let project = scratch.path().join(version);
        fs::create_dir(&project).unwrap();
        fs::write(project.join("CMakeLists.txt"), script).unwrap();
        let output = Command::new("cmake")
            .arg(&at)
            .arg("-S")
            .arg(&project)
            .arg("-B")
            .arg(project.join("build"))
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr).trim(), "0", "{version}");
    }
}

// Holds 374.
#[test]
fn needs_cmake_which_fetches_the_content() {
    let scratch = tempfile::tempdir().unwrap();
    let root = root();
    let find = format!(
        "include(FetchContent)\nFetchContent_Declare(partywall SOURCE_DIR {} SOURCE_SUBDIR crates/partywall-c)\n\
         FetchContent_MakeAvailable(partywall)",
        root.display()
    );
    let libraries = format!("-DPARTYWALL_INSTALL_OPTIONS=--libraries;{}", libraries().display());
    build_and_run(scratch.path(), &find, &[libraries]);
}

// Holds 374.
#[test]
fn needs_cmake_and_pkg_config_which_find_the_unpacked_archive() {
    let scratch = tempfile::tempdir().unwrap();
    let prefix = unpack(scratch.path());
    let at = format!("-DCMAKE_PREFIX_PATH={}", prefix.display());
    build_and_run(scratch.path(), "find_package(partywall 0.1 REQUIRED)", &[at]);

    let source = scratch.path().join("main.cpp");
    fs::write(&source, PROGRAM).unwrap();
    let pkg_config = |options: &[&str]| {
        let mut command = Command::new("pkg-config");
        command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).args(options).arg("partywall");
        let said = runs(&mut command);
        said.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(pkg_config(&["--modversion"]), ["0.1.0"]);

    let shared = scratch.path().join("shared");
    let compile = |program: &Path| {
        let mut command = Command::new("g++");
        command.arg("-std=c++17").arg(&source).arg("-o").arg(program);
        command
    };
    runs(compile(&shared).args(pkg_config(&["--cflags", "--libs"])));
    let mut run = Command::new(&shared);
    assert_eq!(runs(run.env("LD_LIBRARY_PATH", prefix.join("lib"))), PRINTS);

    fs::remove_file(prefix.join("lib/libpartywall.so")).unwrap();
    let linked = scratch.path().join("static");
    let options = pkg_config(&["--static", "--cflags", "--libs"]);
    assert!(options.iter().any(|option| option == "-Wl,--exclude-libs,libpartywall.a"), "{options:?}");
    runs(compile(&linked).args(options));
    assert_eq!(runs(&mut Command::new(linked)), PRINTS, "without the shared library");

    let documents = prefix.join("share/doc/partywall");
    let versions = fs::read_to_string(documents.join("VERSIONS")).unwrap();
    assert!(versions.starts_with("partywall 0.1.0\nabi 0: libpartywall.so.0\nglibc 2."), "{versions}");
    let packages = fs::read_to_string(documents.join("PACKAGES")).unwrap();
    assert!(packages.contains("\nrustix 1."), "{packages}");
    for file in ["LICENSE-APACHE", "LICENSE-MIT"] {
        assert!(documents.join(file).exists());
    }
    assert!(fs::read_dir(documents.join("licences")).unwrap().count() > 20);
    let program = runs(Command::new(prefix.join("bin/partywall")).arg("--version"));
    assert!(program.contains("0.1.0"), "{program}");
}
