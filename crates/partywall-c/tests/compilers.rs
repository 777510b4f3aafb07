// Holds 372.
//! The tests and examples in C and C++ compile without a warning by each compiler of this machine, as each standard, and
//! the tests in C++ without exceptions and run-time types, too.
#![allow(clippy::unwrap_used)] // tests

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

fn sources(folder: &str, extension: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let found: Vec<_> = entries.filter(|path| path.extension().is_some_and(|its| its == extension)).collect();
    assert!(found.len() > 1, "there are none");
    found
}

/// Compiles without linking, by each of the compilers that is installed. With optimisation compilers see more.
fn compile(compilers: [&str; 2], source: &Path, options: &[&str]) {
    let mut by = 0;
    for compiler in compilers {
        if Command::new(compiler).arg("--version").output().is_err() {
            continue;
        }
        let mut command = Command::new(compiler);
        command.args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-c", "-o", "/dev/null"]).args(options);
        let output = command.arg(concat!("-I", env!("CARGO_MANIFEST_DIR"), "/include")).arg(source).output().unwrap();
        assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
        by += 1;
    }
    assert!(by > 0, "install gcc or clang");
}

#[test]
fn each_program_in_c_compiles_by_each_compiler_as_each_standard() {
    for source in sources("tests/c", "c").iter().chain(&sources("../../examples/c", "c")) {
        for standard in ["-std=c11", "-std=c17"] {
            compile(["gcc", "clang"], source, &[standard, "-D_GNU_SOURCE"]);
        }
    }
}

#[test]
fn needs_minutes_each_program_in_cpp_compiles_by_each_compiler_as_each_standard() {
    for standard in ["-std=c++17", "-std=c++20"] {
        for source in sources("tests/cpp", "cpp") {
            compile(["g++", "clang++"], &source, &[standard]);
            let without = [standard, "-DPARTYWALL_NO_EXCEPTIONS", "-fno-exceptions", "-fno-rtti"];
            compile(["g++", "clang++"], &source, &without);
        }
        for source in sources("../../examples/c", "cpp") {
            compile(["g++", "clang++"], &source, &[standard]);
        }
    }
}

/// What the lines of pages use.
const AROUND: &str = "#include <partywall/partywall.hpp>
typedef CUstream_st *cudaStream_t;
template <typename... T> void kernel(T &&...);
template <typename... T> void produce(T &&...);
template <typename... T> void consumer(T &&...);
template <typename... T> void consume(T &&...);
template <typename... T> void infer(T &&...);
";

/// A function around the lines of a page, with the objects that they use.
const FUNCTION: &str =
    "void NAME(partywall::domain &domain, partywall::publisher &publisher, partywall::subscriber &subscriber,
          cudaStream_t stream, std::vector<float> &values, std::uint64_t height, std::uint64_t width,
          OPTIONS &options) {
#line 1 \"NAME\"
LINES
}
";

/// Removes what nvcc alone reads: `<<<…>>>`.
fn without_launches(lines: &str) -> String {
    let mut parts = lines.split("<<<");
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |text, part| text + part.split_once(">>>").unwrap().1)
}

#[test]
fn needs_minutes_lines_in_cpp_of_pages_compile() {
    let scratch = tempfile::tempdir().unwrap();
    let compile_as = |name: &str, program: &str| {
        let source = scratch.path().join(name);
        fs::write(&source, program).unwrap();
        compile(["g++", "clang++"], &source, &["-std=c++17", "-Wno-unused-parameter"]);
    };
    // One program for all lines: most of the time goes into the header.
    let mut all = AROUND.to_owned();
    let mut count = 0;
    for page in ["c", "from-cuda-ipc"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page).with_extension("md");
        let text = fs::read_to_string(path).unwrap();
        let blocks = text.split("```cpp\n").skip(1).map(|block| block.split("```").next().unwrap());
        // The others show what is written by hand.
        for lines in blocks.filter(|lines| lines.contains("partywall::")) {
            count += 1;
            let name = format!("{}_{count}", page.replace('-', "_"));
            let lines = without_launches(lines);
            if lines.contains("int main") {
                compile_as(&format!("{name}.cpp"), &lines);
            } else {
                let options = if lines.contains("domain.build") { "segment_options" } else { "topic_options" };
                let function = FUNCTION.replace("NAME", &name).replace("OPTIONS", &format!("partywall::{options}"));
                all += &function.replace("LINES", &lines);
            }
        }
    }
    assert!(count > 5, "the pages are read in another way than they are laid out");
    compile_as("lines.cpp", &all);
}
