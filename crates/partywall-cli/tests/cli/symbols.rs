//! The symbols that the program exports to the linker.

use std::process::Command;

use partywall_harness::binary;

/// A library that the program loads would use such symbols instead of the vendor's.
#[test]
fn program_has_no_symbol_of_the_vendors_driver() {
    let symbols = |flag: &str| {
        let output = Command::new("nm").args([flag, "--defined-only"]).arg(binary()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    for flag in ["--extern-only", "--dynamic"] {
        let text = symbols(flag);
        let names = text.lines().filter_map(|line| line.split_whitespace().last());
        let drivers: Vec<_> = names
            .filter(|name| {
                name.starts_with("simcuda") || (name.starts_with("cu") && name[2..].starts_with(char::is_uppercase))
            })
            .collect();
        assert_eq!(drivers, [""; 0], "{flag}");
    }
    // The functions exist under other names.
    assert!(
        symbols("--extern-only").contains("cuStreamWaitEvent") || symbols("--debug-syms").contains("cuStreamWaitEvent")
    );
}
