//! The header is what cbindgen makes of the sources, and compiles alone as C and C++.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

fn at(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[test]
fn header_is_that_of_the_sources() {
    let config = cbindgen::Config::from_file(at("cbindgen.toml")).unwrap();
    let bindings = cbindgen::Builder::new().with_config(config).with_crate(at("")).generate().unwrap();
    let mut header = Vec::new();
    bindings.write(&mut header);
    let header = String::from_utf8(header).unwrap();
    let path = at("include/partywall/partywall.h");
    if std::env::var_os("PARTYWALL_BLESS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &header).unwrap();
    }
    let stored = fs::read_to_string(&path).unwrap();
    assert!(stored == header, "partywall.h is not that of the sources: PARTYWALL_BLESS=1 cargo test -p partywall-c");
}

/// The compilers of this machine; a machine for development has one of them at least.
fn compilers(c: &'static str, other: &'static str) -> Vec<&'static str> {
    let has = |name: &&str| Command::new(name).arg("--version").output().is_ok();
    let found: Vec<_> = [c, other].into_iter().filter(has).collect();
    assert!(!found.is_empty(), "install gcc or clang");
    found
}

// Holds 372.
#[test]
fn header_compiles_alone() {
    let languages: [(_, _, &[&str]); 2] =
        [("c", ["gcc", "clang"], &["c11", "c17"]), ("c++", ["g++", "clang++"], &["c++17", "c++20"])];
    for (language, [one, other], standards) in languages {
        for compiler in compilers(one, other) {
            for standard in standards {
                let output = Command::new(compiler)
                    .args(["-x", language, &format!("-std={standard}"), "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
                    .args(["-Wno-unused-function", "-fsyntax-only", "-I"])
                    .arg(at("include"))
                    .arg(at("tests/c/alone.h"))
                    .output()
                    .unwrap();
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{compiler} as {standard}:\n{said}");
            }
        }
    }
}

#[test]
fn header_for_cpp_says_what_it_needs() {
    for (language, standard) in [("c++", "-std=c++14"), ("c", "-std=c11")] {
        let output = Command::new("cc")
            .args(["-x", language, standard, "-fsyntax-only", "-I"])
            .arg(at("include"))
            .arg(at("include/partywall/partywall.hpp"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().find(|line| line.contains("error")).unwrap_or_default();
        assert!(first.contains("partywall.hpp needs C++17"), "{language}: {said}");
    }
}
