// Holds 371.
//! The ABI as a text, which is compared: signatures, the sizes of structs and the places of their members, constants.
//! Within one number of the SONAME functions, constants and members at the end of structs may be added, and nothing else
//! may change.
#![allow(clippy::unwrap_used)] // tests

mod header_functions;

use std::{env, fmt::Write as _, fs, path::Path, process::Command};

use header_functions::{functions, header};

/// A program that prints the sizes and offsets of structs, and the values of constants.
fn program(header: &str) -> String {
    let mut program = String::from("#include <partywall/partywall.h>\n#include <stdio.h>\nint main(void) {\n");
    let mut structs = 0;
    for part in header.split("typedef struct {").skip(1) {
        let (members, rest) = part.split_once('}').unwrap();
        let name = rest.split(';').next().unwrap().trim();
        writeln!(program, "printf(\"{name}: %zu bytes\\n\", sizeof({name}));").unwrap();
        for member in members.split(';').map(str::trim).filter(|member| !member.is_empty()) {
            let one = member.split_whitespace().collect::<Vec<_>>().join(" ");
            let field = one.rsplit([' ', '*']).next().unwrap().split('[').next().unwrap();
            writeln!(program, "printf(\"    %zu {one}\\n\", offsetof({name}, {field}));").unwrap();
        }
        structs += 1;
    }
    assert!(structs > 20, "the header is read in another way than it is laid out");
    let defined = header.lines().filter_map(|line| line.strip_prefix("#define ")?.split_once(' '));
    let enumerated = header.lines().filter_map(|line| line.trim().strip_suffix(',')?.split_once(" = "));
    for (name, _) in defined.chain(enumerated).filter(|(name, _)| name.starts_with("PW_") && !name.contains('(')) {
        writeln!(program, "printf(\"{name} = %lld\\n\", (long long){name});").unwrap();
    }
    program.push_str("return 0;\n}\n");
    program
}

#[test]
fn abi_is_that_of_the_list() {
    let mut abi = String::new();
    for function in functions() {
        writeln!(abi, "{} {}({})", function.returns, function.name, function.parameters.join(", ")).unwrap();
    }
    let scratch = tempfile::tempdir().unwrap();
    let (source, binary) = (scratch.path().join("abi.c"), scratch.path().join("abi"));
    fs::write(&source, program(&header())).unwrap();
    let include = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/include");
    let compiled = Command::new("cc").args(["-std=c11", include]).arg(source).arg("-o").arg(&binary).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    abi.push_str(&String::from_utf8(Command::new(binary).output().unwrap().stdout).unwrap());

    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("abi.txt");
    if env::var_os("PARTYWALL_BLESS").is_some() {
        fs::write(&path, &abi).unwrap();
    }
    let listed = fs::read_to_string(&path).unwrap();
    let differs = abi.lines().zip(listed.lines()).find(|(now, before)| now != before);
    assert!(abi == listed, "the ABI is not that of abi.txt: PARTYWALL_BLESS=1 cargo test -p partywall-c; {differs:?}");
}
