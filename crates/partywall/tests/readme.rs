//! The README shows the examples as they are, and the first page of the library what there is.
#![allow(clippy::unwrap_used)] // tests

const README: &str = include_str!("../../../README.md");

fn shows(example: &str) {
    let code = &example[example.find("\nuse ").expect("an example uses something") + 1..];
    assert!(
        README.contains(&format!("```rust\n{}\n```", code.trim_end())),
        "the README shows another example:\n{code}"
    );
}

#[test]
fn producer_in_the_readme_is_the_example() {
    shows(include_str!("../examples/producer.rs"));
}

#[test]
fn consumer_in_the_readme_is_the_example() {
    shows(include_str!("../examples/consumer.rs"));
}

/// The first page of the library says what the code looks for, and which features it has.
#[test]
fn crate_root_lists_environment_and_features() {
    let page = include_str!("../src/lib.rs");
    let sources = [include_str!("../src/domain/locate.rs"), include_str!("../../partywall-cuda/src/table.rs")].concat();
    let variables: Vec<_> = sources
        .split('"')
        .filter(|text| {
            text.starts_with("PARTYWALL_") && text.bytes().all(|byte| byte == b'_' || byte.is_ascii_uppercase())
        })
        .collect();
    assert!(variables.contains(&"PARTYWALL_BIN") && variables.contains(&"PARTYWALL_LIBCUDA"), "{variables:?}");
    for variable in variables {
        assert!(page.contains(&format!("| `{variable}` |")), "{variable}");
    }
    let manifest = include_str!("../Cargo.toml");
    let features = manifest.split("[features]").nth(1).and_then(|rest| rest.split("\n[").next()).unwrap();
    for line in features.lines().filter(|line| line.contains(" = [")) {
        let feature = line.split(' ').next().unwrap();
        assert!(page.contains(&format!("| `{feature}` |")), "{feature}");
    }
}
