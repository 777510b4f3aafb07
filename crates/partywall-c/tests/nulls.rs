// Holds 368.
//! Each exported function is called without arguments that mean anything: all null and zero, then with numbers in place
//! of handles, and those with texts also with bad ones and with bad sizes. Each handle is closed twice. None crashes, and
//! each says what is wrong.
#![allow(clippy::unwrap_used)] // tests

mod header_functions;

use std::{env, fmt::Write as _, fs, os::unix::fs::symlink, process::Command};

use header_functions::{Function, functions};
use partywall_harness::{World, binary};

/// Functions to which null is no mistake, and what they return.
fn answer(function: &Function) -> &'static str {
    match function.name.as_str() {
        // As `free`.
        name if name.ends_with("_close") => "PW_OK",
        "pw_error_status" => "PW_OK",
        _ => "PW_INVALID_ARGUMENT",
    }
}

/// The value of a parameter: null or zero, or a number in place of a handle.
fn argument(parameter: &str, handle: &str) -> String {
    let is_function = parameter.contains("(*");
    let is_pointer = parameter.contains('*');
    let is_handle = parameter.contains("pw_") && is_pointer && !parameter.contains("**");
    let is_struct = ["_options", "_info"].iter().any(|part| parameter.contains(part));
    match (is_function, is_pointer, is_handle && !is_struct && !parameter.contains("pw_error")) {
        (true, ..) | (_, true, false) => "NULL".to_owned(),
        (_, _, true) => handle.to_owned(),
        _ => "0".to_owned(),
    }
}

#[test]
fn each_function_refuses_null_and_numbers_in_place_of_handles() {
    let functions = functions();
    let mut program = String::from("#include \"check.h\"\nint main(void) {\n");
    let mut statuses = 0;
    for function in functions.iter().filter(|function| function.returns == "pw_status") {
        for handle in ["NULL", "(void *)(uintptr_t)0x4242"] {
            let arguments: Vec<_> = function.parameters.iter().map(|one| argument(one, handle)).collect();
            if handle != "NULL" && !arguments.iter().any(|argument| argument == handle) {
                continue;
            }
            let answer = if handle == "NULL" { answer(function) } else { "PW_INVALID_ARGUMENT" };
            let check = if answer == "PW_OK" { "OK(" } else { "FAILS(PW_INVALID_ARGUMENT, " };
            writeln!(program, "    {check}{}({}));", function.name, arguments.join(", ")).unwrap();
            statuses += 1;
        }
    }
    assert!(statuses > 300, "the header is read in another way than it is laid out");
    program.push_str(
        "    CHECK(pw_version() != NULL && pw_last_error() != NULL);\n    CHECK(*pw_error_message(NULL) == 0);\n    \
         CHECK(*pw_error_advice(NULL) == 0 && *pw_error_anchor(NULL) == 0 && pw_error_pid(NULL) == 0);\n    \
         CHECK(pw_dtype_name(0) == NULL || *pw_dtype_name(0) == 0);\n    return 0;\n}\n",
    );
    compile_and_run(&program, &World::new());
}

#[test]
fn each_handle_is_closed_once() {
    let mut program = String::from("#include \"every.h\"\nint main(void) {\n    open_every();\n");
    let functions = functions();
    let closing: Vec<_> =
        functions.iter().filter_map(|one| one.name.strip_prefix("pw_")?.strip_suffix("_close")).collect();
    assert!(closing.len() > 20, "the header is read in another way than it is laid out: {closing:?}");
    for of in closing {
        writeln!(program, "    OK(pw_{of}_close({of}));\n    FAILS(PW_INVALID_ARGUMENT, pw_{of}_close({of}));")
            .unwrap();
    }
    program.push_str("    return 0;\n}\n");
    compile_and_run(&program, &World::new());
}

/// The value of a parameter: a handle of `every.h`, the options that are tried, or something valid.
fn filled(parameter: &str, options: &str) -> String {
    let (of, name) = parameter.rsplit_once([' ', '*']).unwrap();
    let of = of.trim_start_matches("const ").trim_end_matches([' ', '*']);
    let value = match of.strip_prefix("pw_") {
        _ if parameter.contains("(*") => "NULL",
        _ if is_text(parameter) => "\"name\"",
        Some(_) if name == "options" => options,
        Some(of) if parameter.matches('*').count() == 1 && !of.ends_with("_info") && of != "ipc_handle" => of,
        _ if parameter.contains('*') => "(void *)room",
        _ => "1",
    };
    value.to_owned()
}

fn is_text(parameter: &str) -> bool {
    parameter.starts_with("const char *") && !parameter.contains("**")
}

#[test]
fn each_function_with_a_text_refuses_bad_texts_and_sizes() {
    let mut program = String::from(
        "#include \"every.h\"\nint main(void) {\n    static char endless[2 << 20];\n    memset(endless, 'n', sizeof \
         endless);\n    static uint64_t room[64];\n    static size_t small[64] = {3};\n    static size_t huge[64] = \
         {SIZE_MAX};\n    open_every();\n",
    );
    let mut tried = 0;
    for function in functions().iter().filter(|function| function.returns == "pw_status") {
        let texts = function.parameters.iter().enumerate().filter(|(_, one)| is_text(one)).map(|(at, _)| at);
        let mut cases: Vec<_> =
            texts.flat_map(|at| ["\"\\xff\"", "endless", "NULL"].map(|text| (Some((at, text)), "NULL"))).collect();
        if !cases.is_empty() && function.parameters.iter().any(|one| one.contains("_options *")) {
            cases.extend([(None, "(void *)small"), (None, "(void *)huge")]);
        }
        for (text, options) in cases {
            // Null asks for the first device.
            if text.is_some_and(|(at, text)| text == "NULL" && function.parameters[at].ends_with("*device")) {
                continue;
            }
            let mut arguments: Vec<_> = function.parameters.iter().map(|one| filled(one, options)).collect();
            if let Some((at, text)) = text {
                arguments[at] = text.to_owned();
            }
            writeln!(program, "    FAILS(PW_INVALID_ARGUMENT, {}({}));", function.name, arguments.join(", ")).unwrap();
            tried += 1;
        }
    }
    assert!(tried > 140, "the header is read in another way than it is laid out: {tried}");
    program.push_str("    return 0;\n}\n");
    compile_and_run(&program, &World::new());
}

fn compile_and_run(program: &str, world: &World) {
    let scratch = tempfile::tempdir().unwrap();
    let source = scratch.path().join("nulls.c");
    fs::write(&source, program).unwrap();
    let library = env::current_exe().unwrap().parent().unwrap().join("libpartywall_c.so");
    symlink(&library, scratch.path().join("libpartywall.so.0")).unwrap();
    let here = env!("CARGO_MANIFEST_DIR");
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
        .args([format!("-I{here}/include"), format!("-I{here}/tests/c")])
        .arg(&source)
        .arg(&library)
        .arg("-o")
        .arg(scratch.path().join("nulls"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let ran = Command::new(scratch.path().join("nulls"))
        .env("LD_LIBRARY_PATH", scratch.path())
        .env("PARTYWALL_SOCKET", world.socket())
        // The doctor starts a broker of its own.
        .env("PARTYWALL_BIN", binary())
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}: {}", ran.status, String::from_utf8_lossy(&ran.stderr));
}
