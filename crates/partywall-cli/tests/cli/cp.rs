// Holds 88.
//! `cp`: a segment at another place, under another name.

use partywall_harness::{Sandbox, noise};
use serde_json::{Value, json};

/// Returns the file that `get` writes.
#[track_caller]
fn got(sandbox: &Sandbox, address: &str) -> Vec<u8> {
    let file = sandbox.path().join("got");
    sandbox.run(["get", address, file.to_str().unwrap(), "--force"]).expect(0);
    std::fs::read(file).unwrap()
}

#[test]
fn segment_is_copied_to_each_place_on_the_simulated_gpu() {
    let sandbox = Sandbox::simulated(2);
    let first = noise(5 << 20, 1);
    let second = noise(300, 2);
    sandbox.file("first", &first);
    sandbox.file("second", &second);
    sandbox.run(["put", "first", "llm", "--device", "host"]).expect(0);
    let mut source = "llm@1".to_owned();
    for (name, device, kind) in [
        ("on-gpu", "cuda:1", "vmm"),
        ("pinned", "pinned", "pinned"),
        ("other-gpu", "cuda:0", "vmm"),
        ("back", "host", "host"),
    ] {
        let copied = sandbox.json(["cp", &source, name, "--device", device]);
        let facts = ["name", "version", "kind", "lifetime", "bytes", "existed"].map(|key| copied[key].clone());
        assert_eq!(facts, [json!(name), json!(1), json!(kind), json!("kept"), json!(5 << 20), json!(false)]);
        assert_eq!(copied["source"], source.split('@').next().unwrap());
        assert!(got(&sandbox, name) == first, "{name}");
        name.clone_into(&mut source);
    }
    // The latest version, as the next version of a name.
    sandbox.run(["put", "second", "llm", "--device", "host"]).expect(0);
    let text = sandbox.run(["cp", "llm", "back", "--device", "pinned:1"]).expect(0).text();
    assert!(text.contains("llm@2 → back@2") && text.contains("pinned:1"), "{text}");
    assert_eq!(got(&sandbox, "back"), second);
    sandbox.run(["rm", "llm", "on-gpu", "pinned", "other-gpu", "back"]).expect(0);
}

#[test]
fn only_a_whole_segment_is_copied() {
    let sandbox = Sandbox::new();
    sandbox.file("x", noise(300, 1));
    sandbox.run(["put", "x", "x", "--device", "host"]).expect(0);
    let domain = sandbox.domain();
    let _pool = domain.pool("frames").block_bytes(64).blocks(2).create().unwrap();
    for (arguments, code, sentence) in [
        (["frames", "y"], 2, "\"frames\" is a pool, not a segment"),
        (["x:data", "y"], 2, "x:data names one tensor, and a copy has all tensors of a segment"),
        (["missing", "y"], 3, "is named \"missing\" in the domain"),
        (["x@7", "y"], 3, "\"x\" has no version 7 (the latest is 1)"),
        (["x", "y@2"], 2, "cannot be chosen"),
    ] {
        let output = sandbox.run([&["cp", "--device", "host"], &arguments[..]].concat()).expect(code);
        assert!(output.stderr.contains(sentence), "{}", output.stderr);
    }
    let existing = sandbox.run(["cp", "x", "x", "--if-absent", "--device", "host"]).expect(0);
    assert!(existing.text().contains("x@1 already exists"), "{existing:?}");
    assert_eq!(sandbox.json(["ls"])["names"].as_array().unwrap().len(), 2, "the pool and the source");
    drop(domain);
    sandbox.run(["rm", "x"]).expect(0);
}

#[test]
fn copy_is_mutable_or_shared_if_asked_and_its_source_is_awaited() {
    let sandbox = Sandbox::new();
    let waiting = sandbox.spawn(["cp", "x", "mutable", "--mutable", "--device", "host", "--wait", "60", "--json"]);
    sandbox.file("x", noise(300, 1));
    sandbox.run(["put", "x", "x", "--device", "host"]).expect(0);
    let facts = |copied: &Value| ["mutable", "shared", "existed"].map(|key| copied[key].clone());
    let copied = waiting.wait().expect(0).json();
    assert_eq!(facts(&copied), [json!(true), json!(false), json!(false)], "{copied}");
    let copied = sandbox.json(["cp", "x", "shared", "--shared", "--device", "host"]);
    assert_eq!(facts(&copied), [json!(false), json!(true), json!(false)], "{copied}");
    let both = sandbox.run(["cp", "x", "y", "--shared", "--mutable", "--device", "host"]).expect(2);
    assert!(both.stderr.contains("cannot be used with"), "{}", both.stderr);
    let never = sandbox.run(["cp", "never", "y", "--wait", "0.05", "--device", "host"]).expect(7);
    assert!(never.stderr.contains("never"), "{}", never.stderr);
    sandbox.run(["rm", "x", "mutable", "shared"]).expect(0);
}
