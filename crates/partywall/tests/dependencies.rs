//! What a program that uses the library has to build.

use std::{collections::BTreeSet, env, process::Command};

/// Raise the limit only for a crate that is worth its build time to every user.
#[test]
fn library_depends_on_at_most_fifty_crates() {
    let cargo = env::var_os("CARGO").expect("cargo runs the tests");
    let tree = "tree --locked --offline -p partywall -e normal,build --prefix none";
    let output = Command::new(cargo).args(tree.split(' ')).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: BTreeSet<&str> = text.lines().collect();
    assert!(
        lines.contains(&format!("partywall v{0} ({1})", env!("CARGO_PKG_VERSION"), env!("CARGO_MANIFEST_DIR"))[..])
    );
    assert!(lines.len() <= 50, "{}: {lines:#?}", lines.len());
}
