//! What all commands share: help, exit codes, and how much they say.
#![allow(clippy::unwrap_used, reason = "helpers of tests are outside #[test]")]

use partywall_harness::Sandbox;

#[test]
fn exit_codes_are_the_same_in_help_and_docs() {
    let help = Sandbox::new().run(["--help"]).expect(0).text();
    let (_, table) = help.split_once("Exit codes:\n").unwrap();
    let of_help: Vec<_> = table.lines().filter_map(|line| line.trim().split_once("  ")).collect();
    let docs = include_str!("../../../docs/cli.md");
    let rows = docs.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
    let of_docs: Vec<_> = rows.filter(|(code, _)| code.parse::<u8>().is_ok()).collect();
    assert_eq!(of_help, of_docs);
    assert_eq!(of_help.last(), Some(&("7", "timed out")));
}
