//! The README shows the examples as they are.

const README: &str = include_str!("../../../README.md");

fn shows(example: &str) {
    let code = &example[example.find("\nuse ").expect("an example uses something") + 1..];
    assert!(
        README.contains(&format!("```rust\n{}\n```", code.trim_end())),
        "the README shows another example:\n{code}"
    );
}

#[test]
fn the_producer_is_the_example() {
    shows(include_str!("../examples/producer.rs"));
}

#[test]
fn the_consumer_is_the_example() {
    shows(include_str!("../examples/consumer.rs"));
}
