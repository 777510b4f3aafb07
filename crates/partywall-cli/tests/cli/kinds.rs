//! Each kind of name with each command that takes a name.

use partywall_harness::{Sandbox, place};

#[test]
fn every_kind_works_with_every_command_or_says_why_not() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let _timeline = domain.timeline("timeline").unwrap();
    let _semaphore = domain.semaphore("semaphore", 2).unwrap();
    let _pool = domain.pool("pool").blocks(4).block_bytes(4096).place(place()).create().unwrap();
    let _topic = domain.topic("topic").max_bytes(64).depth(16).place(place()).create().unwrap();
    let kinds = ["timeline", "semaphore", "pool", "topic"];
    for kind in kinds {
        let shown = sandbox.run(["show", kind]).expect(0).text();
        assert!(shown.lines().next().unwrap().split_whitespace().eq([kind, kind]), "{shown}");
        // The tensors and chunks of a pool or topic are internal.
        assert!(!shown.contains("tensor") && !shown.contains("chunks") && !shown.contains("\nversion "), "{shown}");
        let listed = sandbox.run(["ls", kind]).expect(0).text();
        assert!(listed.starts_with(&kind.to_uppercase()), "{listed}");
    }
    for kind in ["semaphore", "pool", "topic"] {
        let refused = sandbox.run(["abandon", kind]).expect(2);
        assert!(refused.stderr.contains(&format!("\"{kind}\" is a {kind}, not a timeline")), "{refused:?}");
    }
    for kind in ["timeline", "semaphore"] {
        let refused = sandbox.run(["rm", kind]).expect(5);
        assert!(refused.stderr.contains(&format!("{kind} \"{kind}\" cannot be removed")), "{refused:?}");
    }
    for kind in ["pool", "topic"] {
        sandbox.run(["rm", kind]).expect(0);
    }
}

#[test]
fn mistaken_versions_and_numbers_are_explained() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "hello");
    sandbox.run(["put", "f", "a", "--device", "host"]).expect(0);
    for (arguments, code, parts) in [
        (&["show", "a@x"][..], 2, &["\"x\" is not a version of \"a\"", "`partywall show a` lists"][..]),
        (&["get", "a@x", "out"], 2, &["\"x\" is not a version of \"a\""]),
        (&["put", "f", "a@2"], 2, &["\"2\" of \"a\" cannot be chosen", "`partywall put FILE a`"]),
        (&["rm", "a@1"], 2, &["\"a@1\" is not a name", "`partywall rm a` removes all of it"]),
        (&["evict", "abc"], 2, &["\"abc\" is not a process id", "partywall ps"]),
        (&["rm", "--unproven", "abc"], 2, &["\"abc\" is not a process id"]),
        (&["evict", "--member", "abc"], 2, &["\"abc\" is not a whole number"]),
        (&["serve", "--max-names", "4k"], 2, &["\"4k\" is not a whole number"]),
        (&["put", "f", "a", "--threads", "0"], 2, &["use 1 to 256"]),
        (&["logs", "-n", "all"], 2, &["\"all\" is not a whole number"]),
    ] {
        let refused = sandbox.run(arguments).expect(code);
        for part in parts {
            assert!(refused.stderr.contains(part), "{part}: {refused:?}");
        }
        assert!(!refused.stderr.contains("invalid digit"), "{refused:?}");
    }
    sandbox.run(["rm", "a"]).expect(0);
}
