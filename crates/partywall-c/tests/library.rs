//! The shared library as the dynamic linker sees it: its name, what it needs, what it exports.
#![allow(clippy::unwrap_used)] // tests

mod header_functions;

use std::{collections::BTreeSet, env, fs, path::Path, process::Command};

use header_functions::functions;

/// Returns what a tool of binutils prints about the library; `None`, with a word about it, where there is none.
fn tool(name: &str, arguments: &[&str]) -> Option<String> {
    let test = env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libpartywall_c.so");
    let Ok(output) = Command::new(name).args(arguments).arg(library).output() else {
        eprintln!("skipped: there is no {name}, of binutils");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

// Holds 371.
#[test]
fn library_needs_the_c_library_alone() {
    let Some(dynamic) = tool("readelf", &["-d", "-W"]) else { return };
    let of = |tag: &str| -> Vec<_> {
        let lines = dynamic.lines().filter(|line| line.contains(tag));
        lines.map(|line| line.split(['[', ']']).nth(1).unwrap().to_owned()).collect()
    };
    let needed = of("(NEEDED)");
    let loader = |name: &String| name.starts_with("ld-linux-");
    assert!(needed.iter().all(|name| name == "libc.so.6" || loader(name)), "{needed:?}");
    assert_eq!(of("(SONAME)"), ["libpartywall.so.0"]);
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
}

// Holds 371.
#[test]
fn exported_symbols_are_those_of_the_list_and_the_header() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("symbols.txt");
    let declared: BTreeSet<_> = functions().into_iter().map(|function| function.name).collect();
    if env::var_os("PARTYWALL_BLESS").is_some() {
        fs::write(&path, declared.iter().map(|name| format!("{name}\n")).collect::<String>()).unwrap();
    }
    let listed: BTreeSet<_> = fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect();
    assert_eq!(listed, declared, "PARTYWALL_BLESS=1 cargo test -p partywall-c");
    let Some(table) = tool("nm", &["-D", "--defined-only"]) else { return };
    let exported: BTreeSet<_> = table.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect();
    assert_eq!(exported, listed);
}
