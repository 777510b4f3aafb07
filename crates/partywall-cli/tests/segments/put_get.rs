// Holds 300, 301.
//! `put` and `get`: files come back byte for byte, also after deaths, and bad files are refused.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use partywall_harness::{Output, Running, Sandbox, Signal, device, eventually, kill, noise, place};
use serde_json::json;

/// Runs `partywall put` on [`device`].
fn put(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    sandbox.run([&["put", "--device", device()], arguments].concat())
}

/// Returns a file as the safetensors library writes it, if the tensors are in its order (by type, the widest first,
/// then by name).
fn safetensors(tensors: &[(&str, &str, &[usize], &[u8])]) -> Vec<u8> {
    let mut header = String::from("{");
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let separator = if data.is_empty() && header.len() == 1 { "" } else { "," };
        let start = data.len();
        let end = data.len() + bytes.len();
        header += &format!(
            r#"{separator}"{name}":{{"dtype":"{dtype}","shape":{},"data_offsets":[{start},{end}]}}"#,
            json!(shape)
        );
        data.extend_from_slice(bytes);
    }
    header.push('}');
    while header.len() % 8 != 0 {
        header.push(' ');
    }
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

fn model() -> Vec<u8> {
    let a = noise(300 * 700 * 4, 1);
    let b = noise(14, 2);
    let c = noise(3, 3);
    safetensors(&[
        ("a.weight", "F32", &[300, 700], &a),
        ("b", "BF16", &[7], &b),
        ("zero", "U8", &[0, 4], &[]),
        ("flag", "BOOL", &[3], &c),
    ])
}

/// Writes a folder of shards with an index, and returns each tensor's bytes.
fn shards(sandbox: &Sandbox, folder: &str) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    let mut map = serde_json::Map::new();
    for shard in 0..3 {
        let file = format!("model-{:05}-of-00003.safetensors", shard + 1);
        let tensors: Vec<_> =
            (0..20).map(|i| (format!("layers.{shard}.{i}"), noise(40_000 + 4 * i, (shard * 100 + i) as u64))).collect();
        let shapes: Vec<_> = tensors.iter().map(|(_, bytes)| [bytes.len() / 4]).collect();
        let views: Vec<_> = tensors
            .iter()
            .zip(&shapes)
            .map(|((name, bytes), shape)| (name.as_str(), "F32", &shape[..], &bytes[..]))
            .collect();
        sandbox.file(&format!("{folder}/{file}"), safetensors(&views));
        map.extend(tensors.iter().map(|(name, _)| (name.clone(), json!(file))));
        all.extend(tensors);
    }
    let index = json!({ "metadata": { "total_size": 0 }, "weight_map": map });
    sandbox.file(&format!("{folder}/model.safetensors.index.json"), index.to_string());
    sandbox.file(&format!("{folder}/config.json"), "{}");
    all
}

fn npy(dtype: &str, shape: &str, bytes: &[u8]) -> Vec<u8> {
    let mut header = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}");
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    [b"\x93NUMPY\x01\0", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), bytes].concat()
}

/// Fails unless nothing is committed and no memory is held.
#[track_caller]
fn nothing_is_there(sandbox: &Sandbox) {
    let status = sandbox.run(["status", "--json"]);
    // If the command was refused before it connected, there is no broker either.
    if status.code == Some(4) {
        return;
    }
    let status = status.expect(0).json();
    for key in ["names", "versions", "leases", "fds"] {
        assert_eq!(status[key], 0, "{key}: {status}");
    }
    assert_eq!((&status["bytes"], &status["members"]), (&json!([]), &json!([])), "{status}");
}

#[test]
fn every_format_comes_back_byte_for_byte() {
    let sandbox = Sandbox::new();
    let files = [
        ("m.safetensors", model()),
        ("array.npy", npy("<f4", "(3, 5)", &noise(60, 4))),
        ("weights.bin", noise(3_000_001, 5)),
        ("empty.bin", Vec::new()),
    ];
    for (file, bytes) in files {
        sandbox.file(file, &bytes);
        let text = put(&sandbox, &[file, "x"]).expect(0).text();
        assert!(text.starts_with("x@") && text.contains("GB/s"), "{text}");
        let back = format!("back-{file}");
        sandbox.run(["get", "x", &back]).expect(0);
        let found = fs::read(sandbox.path().join(&back)).unwrap();
        let differs = found.iter().zip(&bytes).position(|(a, b)| a != b);
        assert_eq!((found.len(), differs), (bytes.len(), None), "{file}");
        let format = Path::new(file).extension().unwrap().to_str().unwrap().replace("bin", "raw");
        let stream = sandbox.run(["get", "x", "-", "--format", &format]).expect(0);
        assert!(stream.stdout == bytes && stream.stderr.is_empty(), "{file}");
    }
    let report = sandbox.json(["put", "m.safetensors", "y", "--device", device(), "--threads", "3"]);
    for (key, value) in [
        ("name", json!("y")),
        ("version", json!(1)),
        ("place", json!(place().to_string())),
        ("tensors", json!(4)),
        ("lifetime", json!("kept")),
        ("existed", json!(false)),
    ] {
        assert_eq!(report[key], value, "{key}");
    }
    assert_eq!(report["bytes"], 300 * 700 * 4 + 14 + 3);
    assert!(report["seconds"].as_f64().unwrap() > 0.0 && report["bytes_per_second"].as_f64().unwrap() > 0.0);
    let report = sandbox.json(["get", "y", "out.safetensors"]);
    assert_eq!(
        (&report["format"], &report["version"], &report["tensor"]),
        (&json!("safetensors"), &json!(1), &json!(null))
    );
    assert_eq!(report["bytes"], fs::metadata(sandbox.path().join("out.safetensors")).unwrap().len());
}

// Holds 302.
#[test]
fn memory_for_put_and_get_does_not_grow_with_the_file() {
    const PRIVATE_KIB: u32 = 64 << 10;
    let sandbox = Sandbox::new();
    // The broker has no such limit.
    sandbox.broker();
    let tensor = noise(3 * PRIVATE_KIB as usize * 1024 / 2, 9);
    let lens = [tensor.len()];
    let file = safetensors(&[("a", "U8", &lens, &tensor), ("b", "U8", &lens, &tensor)]);
    sandbox.file("in.safetensors", &file);
    for arguments in [format!("put --device {} in.safetensors x", device()), "get x out.safetensors".to_owned()] {
        let shell = format!("ulimit -d {PRIVATE_KIB}; exec {} {arguments}", partywall_harness::binary().display());
        Running::spawn(sandbox.program("bash").args(["-c", &shell])).wait().expect(0);
    }
    assert!(fs::read(sandbox.path().join("out.safetensors")).unwrap() == file);
}

#[test]
fn standard_input_is_raw_bytes() {
    let sandbox = Sandbox::new();
    let bytes = noise(2_500_000, 6);
    let mut running = sandbox.spawn(["put", "-", "in", "--device", device()]);
    running.stdin().write_all(&bytes).unwrap();
    running.wait().expect(0);
    let show = sandbox.json(["show", "in"]);
    assert_eq!((&show["tensors"][0]["name"], &show["tensors"][0]["dtype"]), (&json!("data"), &json!("uint8")));
    assert!(sandbox.run(["get", "in", "-"]).expect(0).stdout == bytes);
}

#[test]
fn closed_pipe_of_a_reader_is_no_failure() {
    let sandbox = Sandbox::new();
    sandbox.file("weights.bin", noise(3_000_000, 5));
    put(&sandbox, &["weights.bin", "x"]).expect(0);
    let pipe = format!("set -o pipefail; {} get x - | head -c 10 | wc -c", partywall_harness::binary().display());
    let output = Running::spawn(sandbox.program("bash").args(["-c", &pipe])).wait().expect(0);
    assert_eq!((output.text().trim(), output.stderr.as_str()), ("10", ""));
}

/// The main use: one process puts a folder of shards, and another reads the same bytes after the first has ended.
#[test]
fn shards_outlive_the_process_that_put_them() {
    let sandbox = Sandbox::new();
    let tensors = shards(&sandbox, "model");
    for source in ["model", "model/model.safetensors.index.json"] {
        let text = put(&sandbox, &[source, "llm"]).expect(0).text();
        assert!(text.contains("60 tensors"), "{text}");
        // The process that put the shards has ended; this one opens them.
        let domain = sandbox.domain_of_running();
        let segment = domain.open("llm", Duration::ZERO).unwrap();
        for (name, bytes) in &tensors {
            assert!(segment.tensor(name).unwrap().to_vec().unwrap() == *bytes, "{name}");
        }
        drop(segment);
        for (name, bytes) in &tensors[..3] {
            assert!(sandbox.run(["get", &format!("llm:{name}"), "-"]).expect(0).stdout == *bytes, "{name}");
        }
    }
    // A process is killed right after it has committed a kept name: everything is still there.
    let mut killed = sandbox.spawn(["put", "model", "kept", "--device", device()]);
    killed.line();
    killed.kill();
    let domain = sandbox.domain_of_running();
    let segment = domain.open("kept", Duration::ZERO).unwrap();
    assert!(tensors.iter().all(|(name, bytes)| segment.tensor(name).unwrap().to_vec().unwrap() == *bytes));
    drop(segment);
    // The owner of an owned name is killed: the name ends, and readers continue.
    let mut holder = sandbox.spawn(["put", "model", "owned", "--device", device(), "--hold"]);
    holder.line();
    let segment = domain.open("owned", Duration::ZERO).unwrap();
    holder.kill();
    eventually("the name goes", || domain.open("owned", Duration::ZERO).is_err());
    assert!(tensors.iter().all(|(name, bytes)| segment.tensor(name).unwrap().to_vec().unwrap() == *bytes));
}

#[test]
fn versions_and_tensors_are_addressed() {
    let sandbox = Sandbox::new();
    let file = |value: u8| safetensors(&[("w", "U8", &[4], &[value; 4]), ("w@1", "U8", &[1], &[value + 100])]);
    sandbox.file("1.safetensors", file(1));
    sandbox.file("2.safetensors", safetensors(&[("w", "U8", &[4], &[2; 4]), ("a:b@x", "U8", &[1], &[9])]));
    put(&sandbox, &["1.safetensors", "m"]).expect(0);
    let domain = sandbox.domain_of_running();
    let _held = domain.open("m", Duration::ZERO).unwrap();
    let get = |address: &str| sandbox.run(["get", address, "-"]);
    assert_eq!(get("m:w@1").expect(0).stdout, [101], "a tensor of that name comes first");
    assert_eq!(get("m@1:w").expect(0).stdout, [1; 4]);
    put(&sandbox, &["2.safetensors", "m"]).expect(0);
    assert_eq!(get("m:w").expect(0).stdout, [2; 4]);
    assert_eq!(get("m:w@1").expect(0).stdout, [1; 4], "the latest version has no such tensor any more");
    assert_eq!(get("m:w@2").expect(0).stdout, [2; 4]);
    assert_eq!(get("m@1:w@1").expect(0).stdout, [101]);
    assert_eq!(get("m:a:b@x").expect(0).stdout, [9]);

    let missing = get("m:nope").expect(3);
    assert!(
        missing.stderr.contains("no tensor \"nope\"") && missing.stderr.contains("partywall show m"),
        "{missing:?}"
    );
    get("m@9:w").expect(3);
    get("m:w@9").expect(3);
    for address in ["m@x", "m:", ":w", "m@0"] {
        assert!(get(address).expect(2).stdout.is_empty());
    }
    let several = get("m").expect(2);
    assert!(several.stderr.contains("NAME:TENSOR"), "{several:?}");
    let refused = sandbox.run(["get", "m:w", "-", "--json"]).expect(2).json();
    assert_eq!(refused["error"]["code"], 2);
    sandbox.run(["get", "m:w", "out", "--format", "npy"]).expect(2);
}

#[test]
fn unsuitable_format_is_refused_with_advice() {
    let sandbox = Sandbox::new();
    sandbox.file("m.safetensors", model());
    put(&sandbox, &["m.safetensors", "m"]).expect(0);
    let refused = sandbox.run(["get", "m:b", "b.npy"]);
    assert!(matches!(refused.code, Some(2 | 5)), "{refused:?}");
    assert!(refused.stderr.contains("bfloat16") && refused.stderr.contains(".safetensors"), "{refused:?}");
    assert!(!sandbox.path().join("b.npy").exists());
    sandbox.run(["get", "m:b", "b.safetensors"]).expect(0);
    sandbox.run(["get", "m:b", "b.raw"]).expect(0);
    assert_eq!(fs::read(sandbox.path().join("b.raw")).unwrap(), noise(14, 2));
}

#[test]
fn get_waits_for_a_name_on_request() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "hello");
    let waiting = sandbox.spawn(["get", "soon", "out", "--wait", "60"]);
    eventually("a broker runs", || sandbox.run(["status"]).code == Some(0));
    put(&sandbox, &["f", "soon"]).expect(0);
    waiting.wait().expect(0);
    assert_eq!(fs::read(sandbox.path().join("out")).unwrap(), b"hello");
    let late = sandbox.run(["get", "never", "late", "--wait", "0.05"]).expect(7);
    assert!(late.stderr.contains("no process committed it within"), "{late:?}");
}

#[test]
fn full_disk_and_bad_targets_leave_no_file() {
    let sandbox = Sandbox::new();
    sandbox.file("weights.bin", noise(3_000_000, 7));
    put(&sandbox, &["weights.bin", "x"]).expect(0);
    let full = sandbox.run(["get", "x", "/dev/full"]).expect(5);
    assert!(full.stderr.contains("/dev/full cannot be written: there is no space"), "{full:?}");
    let shell = format!("{} get x - > /dev/full", partywall_harness::binary().display());
    let full = Running::spawn(sandbox.program("sh").args(["-c", &shell])).wait().expect(5);
    assert!(full.stderr.contains("no space"), "{full:?}");
    sandbox.run(["get", "x", "none/out"]).expect(3);
    sandbox.run(["get", "x", "."]).expect(2);
    // A file size limit stands for a full disk: the incomplete file is removed, and the old file is unchanged.
    sandbox.file("old", "precious");
    let shell =
        format!("trap '' XFSZ; ulimit -f 100; exec {} get x old --force", partywall_harness::binary().display());
    let limited = Running::spawn(sandbox.program("bash").args(["-c", &shell])).wait().expect(5);
    assert!(limited.stderr.contains("old"), "{limited:?}");
    assert_eq!(fs::read(sandbox.path().join("old")).unwrap(), b"precious");
    let drafts = fs::read_dir(sandbox.path())
        .unwrap()
        .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with(".partywall"));
    assert_eq!(drafts.count(), 0);
}

/// Standard output, open files, pipes and devices are written directly, and nothing is printed among the bytes.
// Holds 306.
#[test]
fn get_writes_streams_in_place() {
    let sandbox = Sandbox::new();
    let bytes = noise(300_000, 7);
    sandbox.file("weights.bin", &bytes);
    put(&sandbox, &["weights.bin", "x"]).expect(0);
    let run = |script: &str| {
        let script = script.replace("GET", &format!("{} get x", partywall_harness::binary().display()));
        Running::spawn(sandbox.program("bash").args(["-c", &script])).wait().expect(0)
    };
    for path in ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
        assert!(run(&format!("GET {path}")).stdout == bytes, "{path} is a pipe");
        // A file that is open already stays this file, at its place.
        run(&format!("(printf before; GET {path}; printf after) > out"));
        let all = fs::read(sandbox.path().join("out")).unwrap();
        assert!(all == [b"before", &bytes[..], b"after"].concat(), "{path} is a file of {} bytes", all.len());
        run(&format!("GET {path} | head -c 10"));
    }
    run("GET /dev/fd/7 7> out");
    assert!(fs::read(sandbox.path().join("out")).unwrap() == bytes);
    run("mkfifo pipe; cat pipe > out & GET ./pipe; wait");
    assert!(fs::read(sandbox.path().join("out")).unwrap() == bytes);
    run("head -c 10 pipe > out & GET ./pipe; wait; test -p pipe");
    run("GET /dev/null; test -c /dev/null");
    let shell = format!("{} get x /dev/stdout --json", partywall_harness::binary().display());
    Running::spawn(sandbox.program("sh").args(["-c", &shell])).wait().expect(2);
}

// Holds 305.
#[test]
fn interrupted_get_leaves_nothing() {
    let sandbox = Sandbox::new();
    fs::File::create(sandbox.path().join("sparse.bin")).unwrap().set_len(256 << 20).unwrap();
    sandbox.run(["put", "sparse.bin", "x", "--device", "host"]).expect(0);
    let files = || {
        let entries = fs::read_dir(sandbox.path()).unwrap().map(|entry| entry.unwrap().file_name());
        entries.filter(|name| name.to_string_lossy().contains("out") || name.to_string_lossy().contains(".partywall"))
    };
    for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::KILL] {
        let ended = loop {
            let running = sandbox.spawn(["get", "x", "out"]);
            let io = || fs::read_to_string(format!("/proc/{}/io", running.pid())).unwrap_or_default();
            let written = |io: String| io.lines().find_map(|line| line.strip_prefix("wchar: ")?.parse::<u64>().ok());
            eventually("it writes", || written(io()).is_none_or(|bytes| bytes > 1 << 20));
            running.signal(signal);
            let ended = running.wait();
            // It may have been faster than the signal.
            if ended.code != Some(0) {
                break ended;
            }
            fs::remove_file(sandbox.path().join("out")).unwrap();
        };
        assert_eq!(ended.code, None, "{signal:?}: {ended:?}");
        assert_eq!(files().count(), 0, "{signal:?}: {:?}", files().collect::<Vec<_>>());
    }
}

#[test]
fn bad_files_commit_nothing_and_leave_nothing() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let good = model();
    let mut lying = good.clone();
    lying.extend_from_slice(b"more");
    let overlap = br#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[4,12]}}"#;
    let overlap = [&(overlap.len() as u64).to_le_bytes()[..], overlap, &[0; 12]].concat();
    for (file, bytes, word) in [
        ("truncated.safetensors", &good[..good.len() - 1], "truncated"),
        ("header.safetensors", &good[..20], "truncated"),
        ("lying.safetensors", &lying[..], "tensors end at"),
        ("overlap.safetensors", &overlap[..], "damaged"),
        ("garbage.safetensors", &noise(1000, 9)[..], "header"),
        ("short.npy", &npy("<f4", "(9,)", &[0; 35])[..], "truncated"),
        ("object.npy", &npy("|O", "(1,)", &[0; 8])[..], "O"),
        ("lfs.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS"),
    ] {
        sandbox.file(file, bytes);
        let refused = put(&sandbox, &[file, "x"]);
        assert!(matches!(refused.code, Some(1 | 2 | 5)), "{file}: {refused:?}");
        assert!(refused.stderr.contains(word) && refused.stderr.contains(file), "{file}: {refused:?}");
        assert!(refused.stderr.contains("→"), "{file} has no advice: {refused:?}");
        let json = sandbox.run(["put", file, "x", "--json"]).json();
        assert_eq!(json["error"]["code"], refused.code.unwrap());
        nothing_is_there(&sandbox);
    }
    let missing = put(&sandbox, &["nofile", "x"]).expect(3);
    assert!(missing.stderr.contains("nofile"), "{missing:?}");
    put(&sandbox, &["lying.safetensors", "a b"]).expect(2);
    put(&sandbox, &["lying.safetensors", "../x"]).expect(2);
    put(&sandbox, &["/dev/null", "x"]);
    nothing_is_there(&sandbox);

    // Folders whose shards do not belong together.
    for (folder, spoil, word) in [
        (
            "missing",
            (|f: &Path| fs::remove_file(f.join("model-00002-of-00003.safetensors")).unwrap()) as fn(&Path),
            "is missing",
        ),
        (
            "duplicate",
            |f| {
                fs::remove_file(f.join("model.safetensors.index.json")).unwrap();
                fs::copy(f.join("model-00001-of-00003.safetensors"), f.join("z.safetensors")).unwrap();
            },
            "also in",
        ),
        (
            "foreign",
            |f| {
                fs::copy(f.join("model-00001-of-00003.safetensors"), f.join("model-00002-of-00003.safetensors"))
                    .unwrap();
            },
            "layers",
        ),
        (
            "none",
            |f| {
                for entry in fs::read_dir(f).unwrap() {
                    fs::remove_file(entry.unwrap().path()).unwrap();
                }
            },
            "no .safetensors",
        ),
    ] {
        shards(&sandbox, folder);
        spoil(&sandbox.path().join(folder));
        let refused = put(&sandbox, &[folder, "x"]);
        let code = if folder == "missing" { 3 } else { 5 };
        assert_eq!(refused.code, Some(code), "{folder}: {refused:?}");
        assert!(refused.stderr.contains(word), "{folder}: {refused:?}");
        nothing_is_there(&sandbox);
    }
}

const LARGE: u64 = 1 << 30;

/// Creates a large file that is old enough that a later write changes its time, and returns its path.
fn large(sandbox: &Sandbox) -> PathBuf {
    let path = sandbox.path().join("large.bin");
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path).unwrap();
    // The file is sparse, so it needs no disk space, but reading it takes time.
    file.set_len(LARGE).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(1000)).unwrap();
    path
}

/// Waits until a process has mapped the memory for the large file, which is a memfd on a simulated GPU too.
fn until_it_copies(running: &Running) {
    eventually("it copies", || {
        let memory = |fd: PathBuf| {
            let is_memfd = fs::read_link(&fd).is_ok_and(|link| link.to_string_lossy().contains("memfd:"));
            is_memfd && fs::metadata(&fd).is_ok_and(|file| file.len() >= LARGE)
        };
        let fds = fs::read_dir(format!("/proc/{}/fd", running.pid())).into_iter().flatten().flatten();
        running.has_ended() || fds.map(|fd| fd.path()).any(memory)
    });
}

#[test]
fn file_changed_during_put_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let path = large(&sandbox);
    let running = sandbox.spawn(["put", "large.bin", "x", "--device", device()]);
    until_it_copies(&running);
    OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    let refused = running.wait();
    assert!(refused.stderr.contains("has changed"), "{refused:?}");
    assert!(matches!(refused.code, Some(1 | 5)), "{refused:?}");
    nothing_is_there(&sandbox);
}

#[test]
fn ctrl_c_during_a_put_leaves_nothing() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    large(&sandbox);
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let running = sandbox.spawn(["put", "large.bin", "x", "--device", device()]);
        until_it_copies(&running);
        running.signal(signal);
        let ended = running.wait();
        // The handler is installed before the memory is created, so the signal never kills the process directly.
        // It ends by the signal, but only after it has undone its work.
        assert_eq!(ended.code, None, "{ended:?}");
        assert!(ended.stderr.contains("cancelled"), "{ended:?}");
        nothing_is_there(&sandbox);
    }
    let running = sandbox.spawn(["put", "large.bin", "x", "--device", device()]);
    until_it_copies(&running);
    running.kill();
    eventually("its death is proved", || sandbox.json(["status"])["members"] == json!([]));
    nothing_is_there(&sandbox);
}

#[test]
fn broker_killed_midway_is_a_clear_error_without_a_hang() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    large(&sandbox);
    let running = sandbox.spawn(["put", "large.bin", "x", "--device", device()]);
    until_it_copies(&running);
    sandbox.kill_broker();
    let ended = running.wait().expect(4);
    assert!(ended.stderr.contains("is gone") && ended.stderr.contains("→"), "{ended:?}");

    sandbox.broker();
    sandbox.file("f", "x");
    let mut holder = sandbox.spawn(["put", "f", "held", "--hold", "--device", device()]);
    holder.line();
    let waiting = sandbox.spawn(["get", "never", "out", "--wait", "100"]);
    eventually("both are there", || sandbox.json(["status"])["members"].as_array().unwrap().len() == 2);
    sandbox.kill_broker();
    assert!(holder.wait().expect(4).stderr.contains("is gone"));
    assert!(waiting.wait().expect(4).stderr.contains("is gone"));
}

#[test]
fn if_absent_does_nothing_for_an_existing_name() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "first");
    sandbox.file("g", "second");
    let first = put(&sandbox, &["f", "x", "--if-absent"]).expect(0);
    assert!(first.text().starts_with("x@1:"), "{first:?}");
    let second = put(&sandbox, &["g", "x", "--if-absent"]).expect(0);
    assert!(second.text().contains("x@1 already exists; nothing was done"), "{second:?}");
    assert_eq!(
        sandbox.json(["put", "g", "x", "--if-absent", "--device", device()]),
        json!({ "name": "x", "version": 1, "existed": true })
    );
    // Not even standard input is read.
    let mut stream = sandbox.spawn(["put", "-", "x", "--if-absent", "--device", device()]);
    let stdin = stream.stdin();
    assert!(stream.line().contains("already exists"));
    drop(stdin);
    stream.wait().expect(0);
    assert_eq!(sandbox.run(["get", "x", "-"]).expect(0).stdout, b"first");
    // If many run at the same time, exactly one creates the name.
    sandbox.run(["rm", "x"]).expect(0);
    let all: Vec<_> =
        (0..8).map(|_| sandbox.spawn(["put", "f", "x", "--if-absent", "--device", device(), "--json"])).collect();
    let made = all.into_iter().map(|one| one.wait().expect(0).json()).filter(|one| one["existed"] == false);
    assert_eq!(made.count(), 1);
    assert_eq!(sandbox.json(["show", "x"])["version"], sandbox.json(["ls"])["names"][0]["latest"]["version"]);
    // A removed name counts as absent, even while its memory is held.
    let domain = sandbox.domain_of_running();
    let held = domain.open("x", Duration::ZERO).unwrap();
    sandbox.run(["rm", "x"]).expect(0);
    let again = put(&sandbox, &["g", "x", "--if-absent"]).expect(0);
    assert!(again.text().contains("GB/s"), "{again:?}");
    drop(held);
}

#[test]
fn mutable_memory_is_written_by_others() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "hello");
    assert_eq!(sandbox.json(["put", "f", "x", "--mutable", "--device", device()])["mutable"], true);
    let domain = sandbox.domain_of_running();
    let segment = domain.opener("x").read_write().open().unwrap();
    segment.tensor("data").unwrap().write_at(0, b"J").unwrap();
    drop(segment);
    assert_eq!(sandbox.run(["get", "x", "-"]).expect(0).stdout, b"Jello");
    put(&sandbox, &["f", "frozen"]).expect(0);
    assert!(domain.opener("frozen").read_write().open().is_err());
}

#[test]
fn needs_no_gpu_auto_speaks_of_gpus_only_where_a_driver_is_and_cuda_fails_without_one() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "x");
    assert!(!partywall::gpu::devices().is_ok_and(|all| !all.is_empty()), "there is a GPU here");
    let auto = |more: &[&str], driver: &str| {
        let mut command = sandbox.command([&["put", "f", "x"][..], more].concat());
        Running::spawn(command.env("PARTYWALL_LIBCUDA", driver).env("CUDA_VISIBLE_DEVICES", "")).wait().expect(0)
    };
    // Host memory is what `auto` means without a driver, and the result names it.
    let without = auto(&[], "/missing/libcuda.so");
    assert!(without.stderr.is_empty() && without.text().contains(" on host "), "{without:?}");
    let hidden = auto(&["--json"], "simulated");
    assert_eq!((hidden.json()["place"].as_str(), hidden.stderr.lines().count()), (Some("host"), 1));
    assert!(hidden.stderr.contains("NO_DEVICE") && hidden.stderr.contains("partywall doctor"), "{hidden:?}");
    for device in ["cuda", "cuda:3", "GPU-12345678-1234-1234-1234-123456789abc"] {
        let refused = sandbox.run(["put", "f", "y", "--device", device]).expect(6);
        assert!(refused.stderr.contains("no GPU") && refused.stderr.contains("doctor"), "{refused:?}");
    }
    sandbox.run(["put", "f", "y", "--device", "toaster"]).expect(2);
    sandbox.run(["put", "f", "y", "--threads", "0"]).expect(2);
}

// Holds 83, 85.
#[test]
fn file_in_pinned_memory_is_listed_and_comes_back() {
    let sandbox = Sandbox::new();
    let file = sandbox.file("m.safetensors", model());
    let copy = sandbox.path().join("copy.safetensors");
    let run = |arguments: &[&str]| {
        let mut command = sandbox.command(arguments);
        Running::spawn(command.env("PARTYWALL_LIBCUDA", "simulated")).wait()
    };
    let put = run(&["put", "--json", "--device", "pinned:1", file.to_str().unwrap(), "m"]).expect(0).json();
    assert_eq!((&put["place"], &put["kind"]), (&json!("pinned:1"), &json!("pinned")));
    for listing in [&["show", "m"][..], &["ls"], &["status"]] {
        let text = run(listing).expect(0).text();
        assert!(text.contains("pinned:1"), "{listing:?}: {text}");
    }
    // The broker's next worker has the memory, too.
    kill(run(&["status", "--json"]).expect(0).json()["pid"].as_u64().unwrap().try_into().unwrap());
    run(&["get", "m", copy.to_str().unwrap()]).expect(0);
    assert_eq!(fs::read(&copy).unwrap(), model());
    let missing = run(&["put", "--device", "pinned:9", file.to_str().unwrap(), "m"]).expect(6);
    assert!(missing.stderr.contains("cannot use pinned memory"), "{}", missing.stderr);
    // A process that lacks the driver is told so, and `auto` never chooses it.
    let mut without = sandbox.command(["get", "m", copy.to_str().unwrap(), "--force"]);
    without.env("PARTYWALL_LIBCUDA", "simulated").env("CUDA_VISIBLE_DEVICES", "");
    let told = Running::spawn(&mut without).wait();
    assert!(told.code == Some(6) && told.stderr.contains("CUDA_ERROR_NO_DEVICE"), "{}", told.stderr);
    for other in [&["demo"][..], &["lab", "ring"], &["lab", "tour"], &["bench", "latency"]] {
        let refused = run(&[other, &["--device", "pinned"]].concat()).expect(2);
        assert!(refused.stderr.contains("choose --device host, cuda or cuda:N"), "{other:?}: {}", refused.stderr);
    }
}

// Holds 47.
#[test]
fn name_that_was_given_ends_with_its_owner() {
    let sandbox = Sandbox::new();
    let file = sandbox.file("f", b"given");
    let file = file.to_str().unwrap();
    let mut owner = sandbox.spawn(["put", file, "held", "--hold", "--device", device()]);
    owner.line();
    let token = sandbox.json(["ps"])["members"][0]["member"].to_string();
    let output = put(&sandbox, &[file, "given", "--owner", &token, "--json"]).expect(0);
    assert_eq!(output.json()["lifetime"], "owned");
    let names = |sandbox: &Sandbox| sandbox.json(["ls"])["names"].as_array().unwrap().len();
    assert_eq!(names(&sandbox), 2);
    owner.kill();
    eventually("both have ended with it", || names(&sandbox) == 0);
    let missing = put(&sandbox, &[file, "given", "--owner", &token]).expect(3);
    assert!(missing.stderr.contains(&token), "{}", missing.stderr);
    assert!(put(&sandbox, &[file, "given", "--owner", &token, "--hold"]).expect(2).stderr.contains("--hold"));
}

// Holds 86.
#[test]
fn pinned_memory_is_limited_on_each_node() {
    let sandbox = Sandbox::simulated(1);
    let mut serve = sandbox.spawn(["serve", "--max-pinned-bytes", "5MiB", "--max-pinned-bytes-per-uid", "5MiB"]);
    serve.line();
    assert_eq!(sandbox.json(["status"])["limits"]["pinned_bytes"], 5 << 20);
    sandbox.file("f", vec![1; 4 << 20]);
    let put = |name, device| sandbox.run(["put", "f", name, "--device", device]);
    put("a", "pinned:0").expect(0);
    put("b", "pinned:1").expect(0);
    put("c", "host").expect(0);
    for listing in ["ls", "status"] {
        let text = sandbox.run([listing]).expect(0).text();
        assert!(text.contains("pinned:1") && text.contains("MiB of 5 MiB"), "{text}");
    }
    let held = sandbox.json(["ls"])["bytes"].clone();
    assert!(held.as_array().unwrap().contains(&json!({ "place": "pinned:1", "bytes": 4 << 20 })), "{held}");
    let of_user = sandbox.json(["status"])["users"][0].clone();
    let on_nodes = ["pinned:0", "pinned:1"].map(|place| json!({ "place": place, "bytes": 4 << 20 }));
    assert_eq!((&of_user["pinned"], &of_user["limits"]["pinned_bytes"]), (&json!(on_nodes), &json!(5 << 20)));
    let metrics = sandbox.run(["metrics"]).expect(0).text();
    let uid = &of_user["uid"];
    for series in [
        format!("partywall_user_pinned_bytes{{uid=\"{uid}\",place=\"pinned:1\"}} 4194304"),
        format!("partywall_user_pinned_limit{{uid=\"{uid}\"}} 5242880"),
    ] {
        assert!(metrics.contains(&series), "{series} in {metrics}");
    }
    let refused = put("d", "pinned:1").expect(5);
    let stderr = &refused.stderr;
    assert!(stderr.contains("pinned memory on NUMA node 1 is 5242880, this needs 8388608"), "{stderr}");
    assert!(stderr.contains("--max-pinned-bytes") && stderr.contains("pinned:N"), "{stderr}");
    // A stream ends where the limit does.
    let mut command = sandbox.command(["put", "-", "d", "--device", "pinned:1"]);
    let mut stream = Running::spawn(&mut command);
    let _ = stream.stdin().write_all(&[0; 2 << 20]);
    assert_ne!(stream.wait().code, Some(0));
    let names =
        sandbox.json(["ls"])["names"].as_array().unwrap().iter().map(|row| row["name"].clone()).collect::<Vec<_>>();
    assert_eq!(names, ["a", "b", "c"]);
    sandbox.run(["rm", "b"]).expect(0);
    put("d", "pinned:1").expect(0);
    // The limit outlives a worker of the broker.
    kill(sandbox.json(["status"])["pid"].as_u64().unwrap().try_into().unwrap());
    put("e", "pinned:1").expect(5);
    for wrong in [&["--max-pinned-bytes", "0"][..], &["--max-pinned-bytes", "17TiB"]] {
        let refused = sandbox.run([&["serve", "--check"], wrong].concat());
        assert!(refused.code != Some(0) && refused.stderr.contains("--max-pinned-bytes"), "{}", refused.stderr);
    }
    sandbox.run(["stop", "--force"]).expect(0);
    serve.wait().expect(0);
}
