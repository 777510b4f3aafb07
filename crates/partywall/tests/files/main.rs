// Holds 300, 301.
//! Model files into memory and back, on real files; and every bad file gets its own error.
#![allow(clippy::unwrap_used, reason = "helpers of tests are outside #[test]")]

mod bad;
mod memory;
mod writing;

use std::{
    cell::Cell,
    collections::HashMap,
    fs::{self, File, FileTimes, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use partywall::files::{
    FileError, FileProblem, Format, Plan, SINGLE_TENSOR, TensorInfo, default_threads, write_to, write_to_path,
};
use partywall_shm::{DType, TableBuilder};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use tempfile::TempDir;

use memory::Memory;

// ---- helpers

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn go() -> AtomicBool {
    AtomicBool::new(false)
}

fn info(name: &str, dtype: DType, shape: &[u64], strides: &[u64]) -> TensorInfo {
    let bytes = dtype.bytes_for(shape.iter().product()).unwrap();
    TensorInfo { name: name.into(), dtype, shape: shape.to_vec(), strides: strides.to_vec(), bytes }
}

/// Bytes that differ everywhere.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

/// Returns a file of these tensors as the safetensors crate writes it.
fn crate_bytes(tensors: &[(&str, Dtype, &[usize])], metadata: &[(&str, &str)]) -> Vec<u8> {
    let data: Vec<_> = tensors
        .iter()
        .enumerate()
        .map(|(i, (_, dtype, shape))| noise(shape.iter().product::<usize>() * dtype.bitsize() / 8, i as u64))
        .collect();
    let views = tensors.iter().zip(&data);
    let views =
        views.map(|((name, dtype, shape), data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    let metadata: HashMap<_, _> = metadata.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    serialize(views, (!metadata.is_empty()).then_some(metadata)).unwrap()
}

fn model() -> Vec<u8> {
    let tensors: &[(&str, Dtype, &[usize])] = &[
        ("z.weight", Dtype::BF16, &[300, 700]),
        ("a.weight", Dtype::BF16, &[7]),
        ("scale", Dtype::F64, &[3]),
        ("flag", Dtype::BOOL, &[5]),
        ("fp8", Dtype::F8_E4M3, &[2, 33]),
        ("fp4", Dtype::F4, &[2, 32]),
        ("empty", Dtype::F32, &[0, 7]),
        ("empty too", Dtype::F32, &[7, 0]),
        ("scalar", Dtype::I64, &[]),
        ("ünï\"\\\n", Dtype::C64, &[1, 2]),
    ];
    crate_bytes(tensors, &[("format", "pt")])
}

fn put(dir: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

/// A safetensors file with this header and so many bytes after it.
fn forged(json: &str, data: usize) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes(), json.as_bytes(), &vec![1; data]].concat()
}

fn load(path: &Path) -> Memory {
    let plan = Plan::from_path(path).unwrap();
    let memory = Memory::of(&plan);
    let reported = AtomicU64::new(0);
    let progress = |bytes| {
        reported.fetch_add(bytes, Ordering::Relaxed);
    };
    plan.copy_to(&memory, 3, &progress, &go()).unwrap();
    assert_eq!(reported.into_inner(), plan.total_bytes());
    for (index, bytes) in memory.bytes.iter().enumerate() {
        assert_eq!(plan.read_tensor(index).unwrap(), *bytes.lock().unwrap());
    }
    memory
}

fn error(path: &Path) -> FileError {
    let error = Plan::from_path(path).unwrap_err();
    assert!(!error.problem.advice().is_empty());
    error
}

fn problem(path: &Path) -> FileProblem {
    error(path).problem
}

fn get(memory: &Memory, selection: Option<&str>, format: Format) -> Result<Vec<u8>, FileError> {
    let mut out = Vec::new();
    let reported = Cell::new(0);
    let written = write_to(memory, selection, format, &mut out, &|bytes| reported.set(reported.get() + bytes), &go())?;
    assert_eq!((written, reported.get()), (out.len() as u64, out.len() as u64));
    Ok(out)
}

fn write_path(memory: &Memory, selection: Option<&str>, path: &Path) -> Result<u64, FileError> {
    write_to_path(memory, selection, path, true, &|_| (), &go())
}

fn names(dir: &TempDir) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

// ---- there and back

#[test]
fn file_of_the_safetensors_library_round_trips_byte_for_byte() {
    let dir = folder();
    let model = model();
    let memory = load(&put(&dir, "m.safetensors", &model));
    assert!(memory.finished.load(Ordering::Relaxed) >= 1);
    let library = SafeTensors::deserialize(&model).unwrap();
    assert_eq!(memory.tensors.len(), library.len());
    for (name, view) in library.tensors() {
        assert_eq!(memory.bytes_of(&name), view.data(), "{name}");
    }
    assert_eq!(memory.metadata, [("format".into(), "pt".into())]);
    assert_eq!(get(&memory, None, Format::SafeTensors).unwrap(), model);

    let target = dir.path().join("again.SafeTensors");
    assert_eq!(write_path(&memory, None, &target).unwrap(), model.len() as u64);
    assert_eq!(fs::read(&target).unwrap(), model);
    assert_eq!(names(&dir), ["again.SafeTensors", "m.safetensors"]);
}

#[test]
fn several_pairs_of_metadata_come_back_byte_for_byte() {
    let dir = folder();
    let pairs: Vec<_> = (0..20).map(|i| (format!("key {i}"), format!("\"{i}\""))).collect();
    let pairs: Vec<_> = pairs.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    for tensors in [&[("t", Dtype::U8, &[4][..])][..], &[]] {
        let file = crate_bytes(tensors, &pairs);
        let memory = load(&put(&dir, "m.safetensors", &file));
        assert_eq!(get(&memory, None, Format::SafeTensors).unwrap(), file);
    }
    let nothing = crate_bytes(&[], &[]);
    let memory = load(&put(&dir, "m.safetensors", &nothing));
    assert_eq!(get(&memory, None, Format::SafeTensors).unwrap(), nothing);
}

#[test]
fn any_buffer_and_any_number_of_threads_give_the_same_bytes() {
    let dir = folder();
    let big = crate_bytes(&[("big", Dtype::U8, &[20_000_003]), ("small", Dtype::U8, &[1])], &[]);
    let path = put(&dir, "m.safetensors", &big);
    let plan = Plan::from_path(&path).unwrap();
    for (threads, buffer) in [(1, 1 << 20), (2, 12_345), (16, 9 << 20), (0, 4096)] {
        let memory = Memory { buffer_bytes: buffer, ..Memory::of(&plan) };
        plan.copy_to(&memory, threads, &|_| (), &go()).unwrap();
        assert!(get(&memory, None, Format::SafeTensors).unwrap() == big, "{threads} threads, {buffer} bytes");
    }
    assert!(default_threads() >= 1);
}

#[test]
fn single_tensor_can_be_written() {
    let dir = folder();
    let memory = load(&put(&dir, "m.safetensors", &model()));
    let alone = get(&memory, Some("scale"), Format::SafeTensors).unwrap();
    let library = SafeTensors::deserialize(&alone).unwrap();
    assert_eq!(library.names(), ["scale"]);
    assert_eq!(library.tensor("scale").unwrap().data(), memory.bytes_of("scale"));
    assert_eq!(get(&memory, Some("fp8"), Format::Raw).unwrap(), memory.bytes_of("fp8"));
    assert_eq!(get(&memory, Some("empty"), Format::Raw).unwrap(), b"");
    let error = get(&memory, Some("scales"), Format::Raw).unwrap_err();
    assert!(matches!(&error.problem, FileProblem::NoSuchTensor { tensor, .. } if tensor == "scales"), "{error}");
    let error = get(&memory, None, Format::Raw).unwrap_err();
    assert!(matches!(&error.problem, FileProblem::NotOneTensor { count: 10, .. }), "{error}");
    assert!(error.problem.advice().contains("NAME:TENSOR"));
}

#[test]
fn npy_keeps_type_shape_and_order() {
    let dir = folder();
    for (dtype, shape, strides) in [
        (DType::F32, &[3, 4][..], &[4, 1][..]),
        (DType::F32, &[3, 4], &[1, 3]),
        (DType::C128, &[2, 3, 4], &[1, 2, 6]),
        (DType::Bool, &[], &[]),
        (DType::I16, &[0, 5], &[5, 1]),
        (DType::U8, &[9], &[1]),
    ] {
        let tensor = info("some name", dtype, shape, strides);
        let bytes = noise(tensor.bytes as usize, 3);
        let memory = Memory::with(vec![(tensor.clone(), bytes.clone())]);
        let path = dir.path().join("t.npy");
        write_path(&memory, None, &path).unwrap();
        let back = load(&path);
        assert_eq!(back.tensors, [TensorInfo { name: SINGLE_TENSOR.into(), ..tensor }]);
        assert_eq!(back.bytes_of(SINGLE_TENSOR), bytes);
        let mut table = TableBuilder::new();
        Plan::from_path(&path).unwrap().add_to(&mut table).unwrap();
        assert_eq!(table.len(), 1);
        // What is read and written once more is the same file.
        assert_eq!(get(&back, None, Format::Npy).unwrap(), fs::read(&path).unwrap());
    }
}

#[test]
fn anything_else_is_raw_bytes() {
    let dir = folder();
    for bytes in [noise(100_001, 1), Vec::new()] {
        let memory = load(&put(&dir, "weights.bin", &bytes));
        assert_eq!(memory.tensors, [info(SINGLE_TENSOR, DType::U8, &[bytes.len() as u64], &[1])]);
        let target = dir.path().join("back.bin");
        write_path(&memory, None, &target).unwrap();
        assert_eq!(fs::read(&target).unwrap(), bytes);
    }
}

#[test]
fn stream_is_read_as_raw_bytes_up_to_its_limit() {
    let bytes = noise(3_000_000, 2);
    let plan = Plan::from_reader(&bytes[..], 3_000_000).unwrap();
    let memory = Memory::of(&plan);
    plan.copy_to(&memory, 2, &|_| (), &go()).unwrap();
    assert_eq!(memory.bytes_of(SINGLE_TENSOR), bytes);
    let error = Plan::from_reader(&bytes[..], 2_999_999).unwrap_err();
    assert!(matches!(error.problem, FileProblem::TooLong { limit: 2_999_999, .. }), "{error}");
    assert!(Plan::from_reader(io::repeat(1), 1 << 20).is_err());

    struct Broken;
    impl io::Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("unplugged"))
        }
    }
    assert!(matches!(Plan::from_reader(Broken, 10), Err(FileError { problem: FileProblem::Read(_), .. })));
}

#[test]
fn seventy_thousand_tensors_cost_little_each() {
    let dir = folder();
    let names: Vec<_> = (0..70_000).map(|i| format!("model.layers.{i}.weight")).collect();
    let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), Dtype::F16, &[3][..])).collect();
    let file = crate_bytes(&tensors, &[]);
    let path = put(&dir, "m.safetensors", &file);
    let plan = Plan::from_path(&path).unwrap();
    assert_eq!((plan.tensors().len(), plan.total_bytes()), (70_000, 420_000));
    let mut table = TableBuilder::new();
    plan.add_to(&mut table).unwrap();
    assert_eq!(table.len(), 70_000);
    let memory = load(&path);
    assert_eq!(memory.submits.load(Ordering::Relaxed), 420_000_usize.div_ceil(memory.buffer_bytes));
    assert!(get(&memory, None, Format::SafeTensors).unwrap() == file);
}

// ---- shards

fn index(dir: &TempDir, map: &[(&str, &str)]) -> PathBuf {
    let map: serde_json::Map<_, _> = map.iter().map(|(t, s)| (t.to_string(), (*s).into())).collect();
    let text = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string();
    put(dir, "model.safetensors.index.json", text.as_bytes())
}

fn two_shards() -> (TempDir, PathBuf) {
    let dir = folder();
    put(&dir, "1.safetensors", &crate_bytes(&[("a", Dtype::U8, &[5]), ("b", Dtype::F32, &[2])], &[("format", "pt")]));
    put(&dir, "2.safetensors", &crate_bytes(&[("c", Dtype::U8, &[9])], &[("format", "np")]));
    // The index leaves "b" out.
    let index = index(&dir, &[("c", "2.safetensors"), ("a", "1.safetensors")]);
    (dir, index)
}

#[test]
fn shards_are_one_set() {
    let (dir, _) = two_shards();
    let path = index(&dir, &[("c", "2.safetensors"), ("a", "1.safetensors"), ("b", "1.safetensors")]);
    put(&dir, "other.txt", b"does not matter");
    put(&dir, "consolidated.safetensors", b"does not matter either");
    for path in [&path, dir.path()] {
        let memory = load(path);
        assert_eq!(memory.tensors.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["b", "a", "c"]);
        assert_eq!(memory.metadata, [("format".into(), "pt".into())]);
        assert_eq!(memory.bytes_of("c"), noise(9, 0));
    }
    fs::remove_file(path).unwrap();
    fs::remove_file(dir.path().join("consolidated.safetensors")).unwrap();
    assert_eq!(load(dir.path()).tensors.len(), 3);
}

#[test]
fn tensor_missing_in_the_index_is_named() {
    let (dir, path) = two_shards();
    let error = error(dir.path());
    let FileProblem::ForeignTensor { index, tensor } = &error.problem else { panic!("{error}") };
    assert_eq!((index, &error.file, tensor.as_str()), (&path, &dir.path().join("1.safetensors"), "b"));
}

#[test]
fn tensor_missing_in_its_shard_is_named() {
    let (dir, _) = two_shards();
    let path =
        index(&dir, &[("a", "1.safetensors"), ("b", "1.safetensors"), ("c", "2.safetensors"), ("d", "2.safetensors")]);
    let missing = error(&path);
    let FileProblem::MissingTensor { tensor, .. } = &missing.problem else { panic!("{missing}") };
    assert_eq!((&missing.file, tensor.as_str()), (&dir.path().join("2.safetensors"), "d"));
    // In another shard than the index says.
    index(&dir, &[("a", "2.safetensors"), ("b", "1.safetensors"), ("c", "2.safetensors")]);
    assert!(matches!(problem(&path), FileProblem::MissingTensor { tensor, .. } if tensor == "a"));
}

#[test]
fn missing_shard_is_named() {
    let (dir, _) = two_shards();
    let path = index(&dir, &[("a", "1.safetensors"), ("x", "3.safetensors"), ("y", "3.safetensors")]);
    let error = error(&path);
    let FileProblem::MissingShard { tensor, .. } = &error.problem else { panic!("{error}") };
    assert_eq!((&error.file, tensor.as_str()), (&dir.path().join("3.safetensors"), "x"));
    assert!(std::error::Error::source(&error).is_some());
}

#[test]
fn tensor_in_two_shards_is_named() {
    let (dir, path) = two_shards();
    put(&dir, "2.safetensors", &crate_bytes(&[("a", Dtype::U8, &[9])], &[]));
    fs::remove_file(&path).unwrap();
    let without_index = error(dir.path());
    // An index that does not know the tensor does not decide.
    index(&dir, &[("b", "1.safetensors"), ("c", "2.safetensors")]);
    for error in [without_index, error(dir.path())] {
        let FileProblem::DuplicateTensor { tensor, first } = &error.problem else { panic!("{error}") };
        let shards = (&dir.path().join("1.safetensors"), &dir.path().join("2.safetensors"));
        assert_eq!((tensor.as_str(), (first, &error.file)), ("a", shards));
    }
}

/// An overlay replaces tensors of a base, which still has them.
// Holds 303.
#[test]
fn index_decides_between_copies_of_a_tensor() {
    let dir = folder();
    let names: Vec<_> = (0..9).map(|i| format!("t{i}")).collect();
    let base: Vec<_> = names.iter().map(|name| (name.as_str(), Dtype::U16, &[1000][..])).collect();
    put(&dir, "base.safetensors", &crate_bytes(&base, &[]));
    let old = load(&dir.path().join("base.safetensors"));
    // At the beginning, in the middle, two in a row, and at the end.
    let replaced = ["t0", "t3", "t5", "t6", "t8"];
    let overlay: Vec<_> = replaced.iter().map(|name| (*name, Dtype::U8, &[33][..])).collect();
    put(&dir, "overlay.safetensors", &crate_bytes(&overlay, &[]));
    let new = load(&dir.path().join("overlay.safetensors"));
    let shard = |name| if replaced.contains(&name) { "overlay.safetensors" } else { "base.safetensors" };
    index(&dir, &names.iter().map(|name| (name.as_str(), shard(name))).collect::<Vec<_>>());
    let memory = load(dir.path());
    let order = memory.tensors.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>();
    assert_eq!(order, ["t1", "t2", "t4", "t7", "t0", "t3", "t5", "t6", "t8"]);
    for name in order {
        let from = if replaced.contains(&name) { &new } else { &old };
        assert!(memory.bytes_of(name) == from.bytes_of(name), "{name}");
    }
    // All of the base is replaced.
    index(&dir, &replaced.map(|name| (name, "overlay.safetensors")));
    assert_eq!(load(dir.path()).tensors.len(), replaced.len());
}

/// macOS puts a `._NAME` beside each file on a file system that cannot hold the file's attributes.
// Holds 303.
#[test]
fn hidden_files_of_a_folder_are_left_out() {
    let (dir, _) = two_shards();
    index(&dir, &[("c", "2.safetensors"), ("a", "1.safetensors"), ("b", "1.safetensors")]);
    for name in ["._model.safetensors.index.json", "._1.safetensors", ".safetensors", "._2.safetensors"] {
        put(&dir, name, b"\0\x05\x16\x07\0\x02\0\0Mac OS X        ");
    }
    assert_eq!(load(dir.path()).tensors.len(), 3);
    fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    assert_eq!(load(dir.path()).tensors.len(), 3);
    fs::remove_file(dir.path().join("1.safetensors")).unwrap();
    fs::remove_file(dir.path().join("2.safetensors")).unwrap();
    assert!(matches!(problem(dir.path()), FileProblem::NoShards));
}

#[test]
fn index_cannot_leave_its_folder() {
    let (dir, path) = two_shards();
    for shard in ["../1.safetensors", "/etc/passwd", "x/../../y", "..", "", "a\0b"] {
        index(&dir, &[("a", shard)]);
        let error = error(&path);
        assert!(
            matches!(&error.problem, FileProblem::OutsideFolder { shard: s, .. } if s == shard),
            "{shard:?}: {error}"
        );
    }
}

// Holds 304.
#[test]
fn damaged_index_is_refused() {
    let (dir, path) = two_shards();
    let twice = r#"{"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "a": "2.safetensors"}}"#;
    for (text, says) in [
        ("", ""),
        ("{", ""),
        ("[]", ""),
        ("{}", "weight_map"),
        (r#"{"weight_map": []}"#, "an object"),
        (r#"{"weight_map": {"a": 1}}"#, r#""a": invalid type"#),
        ("\u{fffd}", ""),
        (twice, r#"it has the key "a" twice"#),
    ] {
        fs::write(&path, text).unwrap();
        let problem = problem(&path);
        assert!(matches!(problem, FileProblem::Malformed(_)), "{text}");
        assert!(problem.to_string().contains(says), "{text}: {problem}");
    }
    let second = put(&dir, "x.safetensors.index.json", b"{}");
    assert!(matches!(problem(dir.path()), FileProblem::TwoIndexes { .. }));
    File::create(second).unwrap().set_len(200_000_000).unwrap();
    assert!(matches!(problem(&dir.path().join("x.safetensors.index.json")), FileProblem::HeaderTooLarge { .. }));
}

// ---- files that change, sinks that fail

/// Copies `path` and calls `meanwhile` once, after the first bytes are read.
fn copy_while(path: &Path, meanwhile: impl Fn() + Sync) -> Result<(), FileError> {
    let plan = Plan::from_path(path).unwrap();
    let done = AtomicBool::new(false);
    let progress = |_| {
        if !done.swap(true, Ordering::Relaxed) {
            meanwhile();
        }
    };
    plan.copy_to(&Memory::of(&plan), 2, &progress, &go())
}

#[test]
fn change_during_the_copy_is_noticed() {
    let dir = folder();
    let big = noise(30 << 20, 5);
    let path = put(&dir, "m.bin", &big);
    let open = || OpenOptions::new().write(true).open(&path).unwrap();
    let old = FileTimes::new().set_modified(SystemTime::now() - Duration::from_secs(100));
    let changes: [(&str, &(dyn Fn() + Sync)); 5] = [
        ("shrinks", &|| open().set_len(1000).unwrap()),
        ("grows", &|| open().set_len(40 << 20).unwrap()),
        ("is written", &|| open().write_all_at(b"new", 20 << 20).unwrap()),
        ("is removed", &|| fs::remove_file(&path).unwrap()),
        ("is replaced", &|| {
            let other = put(&dir, "other", &big);
            fs::rename(other, &path).unwrap();
        }),
    ];
    for (what, change) in changes {
        fs::write(&path, &big).unwrap();
        open().set_times(old).unwrap();
        let error = copy_while(&path, change).expect_err(what);
        assert!(
            matches!(&error, FileError { file, problem: FileProblem::Changed { .. } } if *file == path),
            "{what}: {error}"
        );
    }
    fs::write(&path, &big).unwrap();
    copy_while(&path, || ()).unwrap();
}

#[test]
fn change_after_the_plan_is_noticed() {
    let dir = folder();
    let path = put(&dir, "m.bin", &noise(1000, 1));
    let plan = Plan::from_path(&path).unwrap();
    fs::write(&path, noise(1001, 1)).unwrap();
    let memory = Memory::of(&plan);
    assert!(matches!(
        plan.copy_to(&memory, 1, &|_| (), &go()),
        Err(FileError { problem: FileProblem::Changed { .. }, .. })
    ));
    assert_eq!(memory.submits.load(Ordering::Relaxed), 0);
}

#[test]
fn failing_sink_ends_the_copy() {
    let dir = folder();
    let path = put(&dir, "m.bin", &noise(20 << 20, 1));
    let plan = Plan::from_path(&path).unwrap();
    for memory in [Memory { fail_at: Some(7), ..Memory::of(&plan) }, Memory { buffer_bytes: 0, ..Memory::of(&plan) }] {
        let error = plan.copy_to(&memory, 2, &|_| (), &go()).unwrap_err();
        assert!(matches!(&error, FileError { file, problem: FileProblem::Sink(_) } if *file == path), "{error}");
        assert!(memory.submits.load(Ordering::Relaxed) < 20);
    }
}

#[test]
fn copy_can_be_cancelled() {
    let dir = folder();
    let path = put(&dir, "m.bin", &noise(20 << 20, 1));
    let plan = Plan::from_path(&path).unwrap();
    let cancel = go();
    let memory = Memory::of(&plan);
    let error = plan.copy_to(&memory, 2, &|_| cancel.store(true, Ordering::Relaxed), &cancel).unwrap_err();
    assert!(matches!(error.problem, FileProblem::Cancelled), "{error}");
    let written = write_to(&memory, None, Format::Raw, &mut io::sink(), &|_| (), &cancel);
    assert!(matches!(written, Err(FileError { problem: FileProblem::Cancelled, .. })));
}
