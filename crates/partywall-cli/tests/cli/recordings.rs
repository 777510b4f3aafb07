// Holds 207.
//! `partywall topic play` and files that other programs wrote, or that are damaged.

use std::{fs::File, io::Write, os::unix::fs::FileExt, path::Path, time::Duration};

use partywall_harness::{Running, Sandbox, Signal};

use super::topics::{message, messages, messages_of, play};

const LONG: Duration = Duration::from_secs(60);

#[test]
fn metadata_that_no_topic_can_have_is_ignored_and_named() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let path = sandbox.path().join("f.mcap");
    let sample = [("x", 0, message(&[1], "", &[0; 4]))];
    let fixed = [("dtype", "float32"), ("shape", "1")];
    for (facts, ignored) in [
        (&[("depth", "4097")][..], "ignored the metadata depth of"),
        (&[("depth", "0")], "ignored the metadata depth of"),
        (&[("depth", "many")], "ignored the metadata depth of"),
        (&[("max_bytes", "1099511627776"), ("depth", "-1")], "ignored the metadata max_bytes, depth of"),
        (&[("dtype", "uint8"), ("shape", "1,1,1,1,1,1,1,1,1,1")], "ignored the metadata dtype, shape of"),
        (&[("depth", "4096"), ("max_bytes", "64")], ""),
    ] {
        messages_of(&path, facts, &sample);
        let player = sandbox.spawn(play(&path, &["again", "--loop"]));
        let again = domain.topic("again").timeout(LONG).open().unwrap();
        assert_eq!(again.depth(), if ignored.is_empty() { 4096 } else { 4 }, "{facts:?}");
        player.signal(Signal::INT);
        let printed = player.wait().expect(0).stderr;
        assert!(printed.contains(ignored) && printed.contains("ignored") != ignored.is_empty(), "{facts:?}: {printed}");
    }
    // What decides nothing is not named: the type says how large samples are, and an option how many there are.
    messages_of(&path, &[&fixed[..], &[("max_bytes", "1099511627776"), ("depth", "5000")]].concat(), &sample);
    let printed = sandbox.run(play(&path, &["again", "--depth", "8"])).expect(0).stderr;
    assert!(!printed.contains("ignored"), "{printed}");
}

/// Writes the beginning of a file, and a record of so many bytes that take no room on the disk. Returns its end.
fn sparse(path: &Path, opcode: u8, bytes: u64) -> (File, u64) {
    let mut file = File::create(path).unwrap();
    file.write_all(mcap::MAGIC).unwrap();
    file.write_all(&[&[opcode][..], &bytes.to_le_bytes()].concat()).unwrap();
    let end = mcap::MAGIC.len() as u64 + 9 + bytes;
    file.set_len(end).unwrap();
    (file, end)
}

/// Drivers of GPUs reserve far more addresses than the limit.
#[test]
fn host_memory_that_a_large_file_would_take_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let limited = |path: &Path| {
        let mut limited = sandbox.program("sh");
        limited.args(["-c", "ulimit -v 2000000; exec \"$0\" \"$@\""]).arg(partywall_harness::binary());
        Running::spawn(limited.args(play(path, &["t"]))).wait()
    };
    let path = sandbox.path().join("f.mcap");
    for opcode in [mcap::records::op::CHUNK, mcap::records::op::CHANNEL, mcap::records::op::MESSAGE] {
        sparse(&path, opcode, 3 << 30);
        let refused = limited(&path).expect(5).stderr;
        assert!(refused.contains("do not fit into the memory") && refused.contains("ulimit -v"), "{refused}");
    }
    // What is not played is not read.
    let whole = sandbox.path().join("whole.mcap");
    messages(&whole, &[("x", 0, message(&[1], "", &[0; 4]))]);
    let whole = std::fs::read(&whole).unwrap();
    let (file, end) = sparse(&path, mcap::records::op::ATTACHMENT, 3 << 30);
    file.write_all_at(&whole[mcap::MAGIC.len()..], end).unwrap();
    assert!(limited(&path).expect(0).text().contains("played 1 sample"));

    // A file of an array, which `topic pub` reads as a whole.
    let shape = 3_u64 << 30;
    let header = format!("{:<69}\n", format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({shape},), }}"));
    let path = sandbox.path().join("f.npy");
    let mut file = File::create(&path).unwrap();
    file.write_all(&[&b"\x93NUMPY\x01\x00\x46\x00"[..], header.as_bytes()].concat()).unwrap();
    file.set_len(80 + shape).unwrap();
    let mut limited = sandbox.program("sh");
    limited.args(["-c", "ulimit -v 2000000; exec \"$0\" \"$@\""]).arg(partywall_harness::binary());
    let published = limited.args(["topic", "pub", "t", path.to_str().unwrap(), "--device", "host"]);
    let refused = Running::spawn(published).wait().expect(5).stderr;
    assert!(refused.contains("do not fit into the memory") && refused.contains("ulimit -v"), "{refused}");
}
