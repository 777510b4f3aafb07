//! `partywall put URL`, against servers that do what they should, and what they should not.
#![allow(clippy::unwrap_used, reason = "helpers of tests are outside #[test]")]

mod faults;
mod places;
mod programs;
mod server;
mod shared;

use std::process::Command;

use partywall_harness::{Output, Running, Sandbox};

/// Returns the command `partywall` without the variables of this machine that concern the network.
fn command(sandbox: &Sandbox, arguments: &[&str]) -> Command {
    let mut command = sandbox.command(arguments);
    for (name, _) in std::env::vars() {
        let lower = name.to_ascii_lowercase();
        let concerns = ["aws_", "azure_", "google_", "hf_", "ssl_cert", "hugging"].iter().any(|p| lower.starts_with(p));
        if concerns || lower.ends_with("_proxy") {
            command.env_remove(name);
        }
    }
    command
}

/// Runs `partywall put URL x` in host memory.
fn put(sandbox: &Sandbox, url: &str, options: &[&str]) -> Output {
    let arguments = [&["put", url, "x", "--device", "host"], options].concat();
    Running::spawn(&mut command(sandbox, &arguments)).wait()
}

/// Returns the bytes of the segment `x`, and removes it.
fn take(sandbox: &Sandbox) -> Vec<u8> {
    let file = sandbox.path().join("taken");
    let _ = std::fs::remove_file(&file);
    sandbox.run(["get", "x", file.to_str().unwrap()]).expect(0);
    sandbox.run(["rm", "x"]).expect(0);
    std::fs::read(file).unwrap()
}
