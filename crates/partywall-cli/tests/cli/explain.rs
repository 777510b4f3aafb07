// Holds 313.
//! `partywall explain`, and what errors say beyond their message: entries, advice and suggestions.

use partywall::{DType, Place};
use partywall_harness::Sandbox;

#[test]
fn entry_that_an_error_names_is_explained() {
    let sandbox = Sandbox::new();
    let refused = sandbox.run(["get", "x", "-"]).expect(4).stderr;
    let line = refused.lines().last().unwrap().trim();
    let command = line.strip_prefix("more: partywall ").unwrap();
    let words: Vec<_> = command.split(' ').collect();
    let text = sandbox.run(&words).expect(0).text();
    assert!(text.starts_with("    no broker answers at …: …\n"), "{text}");
    assert!(text.contains("**Cause.**") && text.contains("**Fix.**") && !text.contains("###"), "{text}");
    assert_eq!(sandbox.json(&words)["text"].as_str().unwrap(), text.trim_end());
}

#[test]
fn entries_are_listed_and_suggested() {
    let sandbox = Sandbox::new();
    let page = include_str!("../../../../docs/troubleshooting.md");
    let headings: Vec<_> = page.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let listed = sandbox.json(["explain"]);
    let listed = listed["entries"].as_array().unwrap();
    let names: Vec<_> = listed.iter().map(|entry| entry["entry"].as_str().unwrap()).collect();
    assert_eq!(names, headings);
    for entry in listed {
        assert!(!entry["message"].as_str().unwrap().is_empty() && !entry["about"].as_str().unwrap().is_empty());
    }
    assert_eq!(sandbox.run(["explain"]).expect(0).text().lines().count(), headings.len() + 1);
    let near = sandbox.run(["explain", "topic-ful"]).expect(3).stderr;
    assert!(near.contains("there is no entry \"topic-ful\"") && near.contains("did you mean topic-full?"), "{near}");
    let unknown = sandbox.run(["explain", "x"]).expect(3).stderr;
    assert!(unknown.contains("`partywall explain` lists") && !unknown.contains("mean"), "{unknown}");
}

#[test]
fn misspelt_words_are_suggested() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let build = domain.create("x", Place::Host).tensor("weight", DType::U8, &[4]).tensor("bias", DType::U8, &[4]);
    let _segment = build.allocate().unwrap().commit().unwrap();
    for (arguments, code, meant) in [
        (&["put", "x", "y", "--device", "hots"][..], 2, "did you mean \"host\"?"),
        (&["topic", "pub", "t", "--dtype", "flaot32", "--shape", "3"], 2, "did you mean \"float32\"?"),
        (&["rm", "x", "--deadline", "3", "--then", "stael"], 2, "did you mean \"stale\"?"),
        (&["get", "x:wieght", "-"], 3, "did you mean \"weight\"?"),
        (&["lab", "vmmm"], 2, "'vmm'"),
    ] {
        let said = sandbox.run(arguments).expect(code).stderr;
        assert!(said.contains(meant), "{said}");
    }
}

#[test]
fn advice_fits_the_case() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let _topic = domain.topic("frames").max_bytes(64).place(Place::Host).create().unwrap();
    sandbox.file("x", "x");
    let long = "a".repeat(300);
    for (arguments, code, parts) in [
        (
            &["put", "x", "frames", "--device", "host"][..],
            5,
            &["\"frames\" already exists: it is a topic", "choose another name", "partywall topic echo frames"][..],
        ),
        (
            &["topic", "pub", "new", "--device", "host"],
            2,
            &["give --dtype and --shape, or --max-bytes if samples vary, or a file"],
        ),
        (
            &["topic", "pub", "frames", "--header", &long, "--count", "1"],
            2,
            &[
                "a header of 300 bytes is too long for a sample of topic \"frames\": the limit is 256 bytes",
                "shorten it",
            ],
        ),
        (&["lab", "vmm", "--device", "host"], 2, &["labs run on GPUs only", "--simulated"]),
        (&["show", "fraems"], 3, &["did you mean \"frames\"?"]),
    ] {
        let said = sandbox.run(arguments).expect(code).stderr;
        for part in parts {
            assert!(said.contains(part), "{part:?} is not in {said}");
        }
    }
}

#[test]
fn needs_no_gpu_whose_error_names_the_option_for_host_memory_once() {
    let sandbox = Sandbox::new();
    sandbox.file("x", "x");
    let said = sandbox.run(["put", "x", "x", "--device", "cuda"]).expect(6).stderr;
    assert_eq!(said.matches("--device host").count(), 1, "{said}");
    // What `auto` means is in the result; nothing is wrong.
    let put = sandbox.run(["put", "x", "x"]).expect(0);
    assert!(put.text().contains("on host") && put.stderr.is_empty(), "{put:?}");
}
