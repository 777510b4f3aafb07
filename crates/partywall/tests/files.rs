//! Model files into memory and back, on real files; and every bad file gets its own error.
#![allow(clippy::unwrap_used, reason = "helpers of tests are outside #[test]")]

use std::{
    cell::Cell,
    collections::HashMap,
    fs::{self, File, FileTimes, OpenOptions},
    io::{self, Write},
    os::unix::{fs::FileExt, net::UnixListener},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use partywall::files::{
    Content, FileError, FileProblem, Format, Lane, Piece, Plan, SINGLE_TENSOR, Sink, SinkError, TensorInfo,
    default_threads, write_to, write_to_path,
};
use partywall_shm::{DType, TableBuilder};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use tempfile::TempDir;

// ---- host memory as sink and as content

/// A segment in host memory.
#[derive(Default)]
struct Memory {
    tensors: Vec<TensorInfo>,
    metadata: Vec<(String, String)>,
    bytes: Vec<Mutex<Vec<u8>>>,
    buffer_bytes: usize,
    submits: AtomicUsize,
    finished: AtomicUsize,
    /// Refuses from this submit on.
    fail_at: Option<usize>,
    /// Fails to read from this tensor.
    unreadable: Option<usize>,
}

struct MemoryLane<'a> {
    memory: &'a Memory,
    buffer: Vec<u8>,
}

impl Memory {
    fn of(plan: &Plan) -> Self {
        Self {
            tensors: plan.tensors().to_vec(),
            metadata: plan.metadata().to_vec(),
            bytes: plan.tensors().iter().map(|t| Mutex::new(vec![0xee; t.bytes as usize])).collect(),
            buffer_bytes: 1 << 16,
            ..Self::default()
        }
    }

    /// One that holds these.
    fn with(tensors: Vec<(TensorInfo, Vec<u8>)>) -> Self {
        let (tensors, bytes): (Vec<_>, Vec<_>) = tensors.into_iter().map(|(t, b)| (t, Mutex::new(b))).unzip();
        Self { tensors, bytes, ..Self::default() }
    }

    fn bytes_of(&self, name: &str) -> Vec<u8> {
        let index = self.tensors.iter().position(|t| t.name == name).unwrap();
        self.bytes[index].lock().unwrap().clone()
    }
}

impl Sink for Memory {
    type Lane<'a> = MemoryLane<'a>;

    fn lane(&self) -> Result<MemoryLane<'_>, SinkError> {
        Ok(MemoryLane { memory: self, buffer: vec![0; self.buffer_bytes] })
    }
}

impl Lane for MemoryLane<'_> {
    fn buffer(&mut self) -> Result<&mut [u8], SinkError> {
        Ok(&mut self.buffer)
    }

    fn submit(&mut self, pieces: &[Piece]) -> Result<(), SinkError> {
        let submit = self.memory.submits.fetch_add(1, Ordering::Relaxed);
        if self.memory.fail_at.is_some_and(|at| submit >= at) {
            return Err("the memory is gone".into());
        }
        let mut start = 0;
        for piece in pieces {
            assert_eq!(piece.start, start, "pieces follow each other");
            assert!(piece.len > 0);
            start += piece.len;
            let offset = piece.offset as usize;
            let mut tensor = self.memory.bytes[piece.tensor].lock().unwrap();
            tensor[offset..offset + piece.len].copy_from_slice(&self.buffer[piece.start..piece.start + piece.len]);
        }
        Ok(())
    }

    fn finish(self) -> Result<(), SinkError> {
        self.memory.finished.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Content for Memory {
    fn tensors(&self) -> Vec<TensorInfo> {
        self.tensors.clone()
    }

    fn metadata(&self) -> Vec<(String, String)> {
        self.metadata.clone()
    }

    fn read(&self, tensor: usize, offset: u64, out: &mut [u8]) -> Result<(), SinkError> {
        if self.unreadable == Some(tensor) {
            return Err("the memory is gone".into());
        }
        let bytes = self.bytes[tensor].lock().unwrap();
        out.copy_from_slice(&bytes[offset as usize..offset as usize + out.len()]);
        Ok(())
    }
}

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
    for (index, tensor) in plan.tensors().iter().enumerate() {
        assert_eq!(plan.read_tensor(index).unwrap(), memory.bytes_of(&tensor.name));
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
    write_to_path(memory, selection, path, &|_| (), &go())
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
fn npyz_reads_written_files() {
    let tensor = info("t", DType::I32, &[2, 3], &[1, 2]);
    let bytes: Vec<_> = (0..6_i32).flat_map(|i| i.to_le_bytes()).collect();
    let npy = get(&Memory::with(vec![(tensor, bytes)]), None, Format::Npy).unwrap();
    let read = npyz::NpyFile::new(&npy[..]).unwrap();
    assert_eq!((read.shape(), read.order()), (&[2, 3][..], npyz::Order::Fortran));
    assert_eq!(read.into_vec::<i32>().unwrap(), [0, 1, 2, 3, 4, 5]);
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
    for with_index in [true, false] {
        let error = error(dir.path());
        let FileProblem::DuplicateTensor { tensor, first } = &error.problem else { panic!("{error}") };
        let shards = (&dir.path().join("1.safetensors"), &dir.path().join("2.safetensors"));
        assert_eq!((tensor.as_str(), (first, &error.file)), ("a", shards));
        if with_index {
            fs::remove_file(&path).unwrap();
        }
    }
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

#[test]
fn damaged_index_is_refused() {
    let (dir, path) = two_shards();
    for text in ["", "{", "[]", "{}", r#"{"weight_map": []}"#, r#"{"weight_map": {"a": 1}}"#, "\u{fffd}"] {
        fs::write(&path, text).unwrap();
        assert!(matches!(problem(&path), FileProblem::Malformed(_)), "{text}");
    }
    let second = put(&dir, "x.safetensors.index.json", b"{}");
    assert!(matches!(problem(dir.path()), FileProblem::TwoIndexes { .. }));
    File::create(second).unwrap().set_len(200_000_000).unwrap();
    assert!(matches!(problem(&dir.path().join("x.safetensors.index.json")), FileProblem::HeaderTooLarge { .. }));
}

// ---- bad files

#[test]
fn irregular_file_is_refused() {
    let dir = folder();
    assert!(matches!(problem(&dir.path().join("none.safetensors")), FileProblem::Open(_)));
    assert!(matches!(problem(dir.path()), FileProblem::NoShards));
    assert!(matches!(problem(Path::new("/dev/zero")), FileProblem::NotRegular { kind: "a device", .. }));
    // Says that it is empty.
    assert!(matches!(problem(Path::new("/proc/self/status")), FileProblem::Changed { .. }));
    let _socket = UnixListener::bind(dir.path().join("socket")).unwrap();
    assert!(matches!(problem(&dir.path().join("socket")), FileProblem::NotRegular { kind: "a socket", .. }));
    for name in ["pipe", "pipe.npy", "pipe.safetensors"] {
        let pipe = dir.path().join(name);
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        assert!(matches!(problem(&pipe), FileProblem::NotRegular { kind: "a pipe", .. }), "{name}");
    }
    // A folder of which a shard is a pipe, or a folder.
    assert!(matches!(problem(dir.path()), FileProblem::NotRegular { .. }));
    fs::remove_file(dir.path().join("pipe.safetensors")).unwrap();
    fs::create_dir(dir.path().join("pipe.safetensors")).unwrap();
    assert!(matches!(problem(dir.path()), FileProblem::NotRegular { kind: "a folder", .. }));
}

#[test]
fn truncated_and_longer_files_are_refused() {
    let dir = folder();
    let tensor = info("t", DType::F64, &[5, 4], &[4, 1]);
    let npy = get(&Memory::with(vec![(tensor, noise(160, 1))]), None, Format::Npy).unwrap();
    for (name, whole) in [("t.safetensors", model()), ("t.npy", npy)] {
        for cut in (0..150).chain([whole.len() - 100, whole.len() - 1]) {
            let path = put(&dir, name, &whole[..cut]);
            let error = error(&path);
            let FileProblem::Truncated { expected, found } = &error.problem else { panic!("{name} {cut}: {error}") };
            assert_eq!((&error.file, *found), (&path, cut as u64));
            assert!(*expected > cut as u64 && *expected <= whole.len() as u64);
        }
        let path = put(&dir, name, &[&whole[..], b"x"].concat());
        let expected = whole.len() as u64;
        assert!(matches!(problem(&path), FileProblem::TrailingBytes { expected: e, .. } if e == expected));
    }
}

#[test]
fn lying_safetensors_header_is_refused() {
    let dir = folder();
    let path = put(&dir, "m.safetensors", &[&u64::MAX.to_le_bytes()[..], b"{}"].concat());
    assert!(matches!(problem(&path), FileProblem::HeaderTooLarge { bytes: u64::MAX, .. }));
    put(&dir, "m.safetensors", &[&100_000_000_u64.to_le_bytes()[..], b"{}"].concat());
    assert!(matches!(problem(&path), FileProblem::Truncated { expected: 100_000_008, .. }));
    put(&dir, "m.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n");
    assert!(matches!(problem(&path), FileProblem::LfsPointer));

    let one = |rest: &str| format!("{{\"t\":{{{rest}}}}}");
    for (json, data) in [
        ("", 0),
        ("{", 0),
        ("[]", 0),
        ("null", 0),
        ("{}x", 0),
        (&"[".repeat(100_000)[..], 0),
        (&one(r#""dtype":"F31","shape":[1],"data_offsets":[0,4]"#), 4),
        (&one(r#""dtype":"F32","shape":[1],"data_offsets":[0,8]"#), 8),
        (&one(r#""dtype":"F32","shape":[2],"data_offsets":[8,0]"#), 8),
        (&one(r#""dtype":"F32","shape":[1],"data_offsets":[4,8]"#), 8),
        (&one(r#""dtype":"F32","shape":[-1],"data_offsets":[0,4]"#), 4),
        (&one(r#""dtype":"F32","shape":[1.5],"data_offsets":[0,4]"#), 4),
        (&one(r#""dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,4]"#), 4),
        (&one(r#""dtype":"F4","shape":[3],"data_offsets":[0,1]"#), 1),
        (&one(r#""dtype":"U8","shape":[0,9223372036854775808,9223372036854775808],"data_offsets":[0,0]"#), 0),
        (&one(r#""dtype":"F32","shape":[1]"#), 4),
        (r#"{"__metadata__":{"a":1}}"#, 0),
        (r#"{"__metadata__":[]}"#, 0),
        // Overlapping.
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
            6,
        ),
        // The same bytes twice.
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            4,
        ),
        // A gap.
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}}"#,
            9,
        ),
    ] {
        put(&dir, "m.safetensors", &forged(json, data));
        let error = error(&path);
        assert!(
            matches!(&error, FileError { file, problem: FileProblem::Malformed(_) } if *file == path),
            "{json}: {error}"
        );
    }
    let huge = one(r#""dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]"#);
    put(&dir, "m.safetensors", &forged(&huge, 4));
    assert!(matches!(problem(&path), FileProblem::Malformed(_)));
    // Not UTF-8.
    put(&dir, "m.safetensors", &[&4_u64.to_le_bytes()[..], b"{\"\xff\""].concat());
    assert!(matches!(problem(&path), FileProblem::Malformed(_)));
}

#[test]
fn tensors_unfit_for_a_table_are_refused_with_the_file() {
    let dir = folder();
    let long = "x".repeat(2000);
    let path = put(&dir, "m.safetensors", &crate_bytes(&[(&long, Dtype::U8, &[1])], &[]));
    let failed = Plan::from_path(&path).unwrap().add_to(&mut TableBuilder::new()).unwrap_err();
    assert!(matches!(&failed, FileError { file, problem: FileProblem::Table(_) } if *file == path), "{failed}");
    let deep = vec![1; 65];
    put(&dir, "m.safetensors", &crate_bytes(&[("deep", Dtype::U8, &deep)], &[]));
    assert!(Plan::from_path(&path).unwrap().add_to(&mut TableBuilder::new()).is_err());
    put(&dir, "m.safetensors", &crate_bytes(&[], &[("k", &"v".repeat(2 << 20))]));
    assert!(Plan::from_path(&path).unwrap().add_to(&mut TableBuilder::new()).is_err());
}

/// A `.npy` file with this dictionary.
fn npy(descr: &str, rest: &str, data: usize) -> Vec<u8> {
    let text = format!("{{'descr': {descr}, 'fortran_order': False, {rest}}}\n");
    let length = (text.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\0", &length[..], text.as_bytes(), &vec![1; data]].concat()
}

#[test]
fn npy_elements_other_than_plain_numbers_are_refused() {
    let dir = folder();
    for descr in [
        "'>f4'",
        "'>i2'",
        "'|O'",
        "'|V2'",
        "'<V2'",
        "'|S7'",
        "'<U7'",
        "'<f16'",
        "'<M8[ns]'",
        "[('a', '<f4')]",
        "[('a', '<f4', (2, 3)), ('b', '|O')]",
    ] {
        let path = put(&dir, "t.npy", &npy(descr, "'shape': (1,), ", 16));
        let error = error(&path);
        assert!(matches!(error.problem, FileProblem::UnsupportedElements { .. }), "{descr}: {error}");
        assert!(error.problem.advice().contains("astype"));
    }
    assert_eq!(load(&put(&dir, "t.npy", &npy("'>u1'", "'shape': (16,), ", 16))).tensors[0].dtype, DType::U8);
}

#[test]
fn lying_npy_header_is_refused() {
    let dir = folder();
    for bytes in [
        b"not a numpy file at all".to_vec(),
        npy("'<f4'", "", 0),
        npy("'<f4'", "'shape': 3, ", 12),
        npy("'<f4'", "'shape': (-3,), ", 12),
        npy("'<f4'", "'shape': (9223372036854775808, 9223372036854775808), ", 12),
        npy("'<f4'", "'shape': (9223372036854775808, 4, 0), ", 0),
        npy("'<f4'", "'shape': (99999999999999999999999,), ", 0),
        npy("'<f4'", "'shape': (4611686018427387904,), ", 0),
        npy("'<f4'", "'shape': (0x10,), ", 64),
        npy("'<f4'", &format!("'shape': {}", "(".repeat(5000)), 64),
        npy("'\\N{x}'", "'shape': (1,), ", 4),
        npy("7", "'shape': (1,), ", 4),
    ] {
        let error = error(&put(&dir, "t.npy", &bytes));
        assert!(matches!(error.problem, FileProblem::Malformed(_)), "{}: {error}", String::from_utf8_lossy(&bytes));
    }
    let long = [b"\x93NUMPY\x02\0", &u32::MAX.to_le_bytes()[..], b"{}"].concat();
    assert!(matches!(problem(&put(&dir, "t.npy", &long)), FileProblem::HeaderTooLarge { .. }));
    let mut version = npy("'<f4'", "'shape': (1,), ", 4);
    version[6] = 9;
    assert!(Plan::from_path(&put(&dir, "t.npy", &version)).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn arbitrary_headers_never_panic(
        json in proptest::collection::vec(any::<u8>(), 0..200),
        suffix in "(safetensors|npy|safetensors\\.index\\.json)",
    ) {
        let dir = folder();
        let bytes = if suffix == "npy" {
            [b"\x93NUMPY\x01\0", &(json.len() as u16).to_le_bytes()[..], &json].concat()
        } else {
            [&(json.len() as u64).to_le_bytes()[..], &json].concat()
        };
        let _ = Plan::from_path(&put(&dir, &format!("m.{suffix}"), &bytes));
        let _ = Plan::from_path(&put(&dir, &format!("m.{suffix}"), &json));
    }

    /// Whatever is damaged: either it is refused, or what is copied stays in bounds.
    #[test]
    fn damaged_headers_never_panic(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let dir = folder();
        let mut bytes = crate_bytes(&[("a", Dtype::F32, &[2, 3]), ("b", Dtype::U8, &[4])], &[("k", "v")]);
        let header = bytes.len() - 28;
        for (index, byte) in edits {
            bytes[index.index(header)] = byte;
        }
        if cut.index(4) == 0 {
            bytes.truncate(cut.index(bytes.len()));
        }
        let path = put(&dir, "m.safetensors", &bytes);
        if let Ok(plan) = Plan::from_path(&path) {
            prop_assert!(plan.total_bytes() <= bytes.len() as u64);
            let memory = Memory::of(&plan);
            plan.copy_to(&memory, 2, &|_| (), &go()).unwrap();
        }
    }
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

// ---- what cannot be written

#[test]
fn formats_refuse_unsupported_tensors() {
    for dtype in DType::ALL {
        let memory = Memory::with(vec![(info("t", *dtype, &[8], &[1]), noise(dtype.bits() as usize, 1))]);
        let lacks = |format| {
            matches!(
                get(&memory, None, format),
                Err(FileError { problem: FileProblem::FormatLacksElements { .. }, .. })
            )
        };
        let small = dtype.name().contains("_e");
        assert_eq!(lacks(Format::Npy), small || *dtype == DType::BF16, "{dtype}");
        assert_eq!(lacks(Format::SafeTensors), *dtype == DType::C128, "{dtype}");
        assert!(get(&memory, None, Format::Raw).is_ok());
    }
    let bf16 = Memory::with(vec![(info("t", DType::BF16, &[8], &[1]), noise(16, 1))]);
    let error = get(&bf16, None, Format::Npy).unwrap_err();
    assert!(
        error.to_string().contains(".npy has no bfloat16") && error.problem.advice().contains(".safetensors"),
        "{error}"
    );

    let fortran = Memory::with(vec![(info("t", DType::F32, &[2, 3], &[1, 2]), noise(24, 1))]);
    let error = get(&fortran, None, Format::SafeTensors).unwrap_err();
    assert!(
        matches!(error.problem, FileProblem::FormatLacksStrides { .. }) && error.problem.advice().contains(".npy"),
        "{error}"
    );
    let gaps = TensorInfo { bytes: 36, ..info("t", DType::F32, &[2, 3], &[6, 1]) };
    let gaps = Memory::with(vec![(gaps, noise(36, 1))]);
    assert!(matches!(
        get(&gaps, None, Format::Npy),
        Err(FileError { problem: FileProblem::FormatLacksStrides { .. }, .. })
    ));
    assert_eq!(get(&gaps, None, Format::Raw).unwrap(), noise(36, 1));

    let reserved = Memory::with(vec![(info("__metadata__", DType::U8, &[8], &[1]), noise(8, 1))]);
    assert!(matches!(
        get(&reserved, None, Format::SafeTensors),
        Err(FileError { problem: FileProblem::ReservedName { .. }, .. })
    ));
    let none = Memory::default();
    assert!(matches!(
        get(&none, None, Format::Raw),
        Err(FileError { problem: FileProblem::NotOneTensor { count: 0, .. }, .. })
    ));
}

#[test]
fn failed_write_leaves_only_the_target() {
    let dir = folder();
    let target = put(&dir, "t.safetensors", b"precious");
    let mut memory = load(&put(&dir, "m.safetensors", &model()));
    memory.unreadable = memory.tensors.iter().position(|t| t.name == "fp8");
    let error = write_path(&memory, None, &target).unwrap_err();
    assert!(matches!(error.problem, FileProblem::Content { .. }), "{error}");
    assert_eq!(fs::read(&target).unwrap(), b"precious");
    assert_eq!(names(&dir), ["m.safetensors", "t.safetensors"]);
    memory.unreadable = None;
    write_path(&memory, None, &target).unwrap();
    assert_eq!(fs::read(&target).unwrap(), model());

    assert!(matches!(
        write_path(&memory, None, dir.path()),
        Err(FileError { problem: FileProblem::NotOneTensor { .. }, .. })
    ));
    assert!(matches!(
        write_path(&memory, Some("fp8"), dir.path()),
        Err(FileError { problem: FileProblem::IsFolder, .. })
    ));
    let nowhere = dir.path().join("none/t.safetensors");
    assert!(matches!(write_path(&memory, None, &nowhere), Err(FileError { problem: FileProblem::Write(_), .. })));
    assert_eq!(names(&dir), ["m.safetensors", "t.safetensors"]);
}

#[test]
fn links_and_permissions_of_a_target_stay() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = folder();
    let real = put(&dir, "real.bin", b"old");
    fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
    let link = dir.path().join("link.bin");
    symlink(&real, &link).unwrap();
    let memory = Memory::with(vec![(info("t", DType::U8, &[3], &[1]), b"new".to_vec())]);
    write_path(&memory, None, &link).unwrap();
    assert_eq!(fs::read_link(&link).unwrap(), real);
    assert_eq!(fs::read(&real).unwrap(), b"new");
    assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o640);
}

#[test]
fn full_disk_and_closed_pipe_are_different_errors() {
    let memory = Memory::with(vec![(info("t", DType::U8, &[3 << 20], &[1]), noise(3 << 20, 1))]);
    let error = write_path(&memory, None, Path::new("/dev/full")).unwrap_err();
    assert!(matches!(error.problem, FileProblem::Full(_)), "{error}");
    assert!(!fs::metadata("/dev/full").unwrap().is_file(), "the device is still there");
    write_path(&memory, None, Path::new("/dev/null")).unwrap();
    assert!(!fs::metadata("/dev/null").unwrap().is_file(), "the device is still there");
    let mut full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let error = write_to(&memory, None, Format::Raw, &mut full, &|_| (), &go()).unwrap_err();
    assert!(matches!(error.problem, FileProblem::Full(_)), "{error}");

    let (reader, mut writer) = io::pipe().unwrap();
    drop(reader);
    let error = write_to(&memory, None, Format::Raw, &mut writer, &|_| (), &go()).unwrap_err();
    assert!(matches!(error.problem, FileProblem::ClosedPipe(_)), "{error}");
}

/// Makes what follows root of a mount namespace of its own.
const NAMESPACE: [&str; 4] = ["unshare", "--user", "--map-root-user", "--mount"];

/// Set in the process that runs in such a namespace.
const IN_NAMESPACE: &str = "PARTYWALL_TEST_IN_NAMESPACE";

#[test]
fn needs_namespaces_full_file_system_leaves_only_the_target() {
    let launch = |arguments: &[&std::ffi::OsStr]| {
        let mut command = std::process::Command::new(NAMESPACE[0]);
        command.args(&NAMESPACE[1..]).args(arguments).env(IN_NAMESPACE, "1").output()
    };
    let can = launch(&["true".as_ref()]).is_ok_and(|output| output.status.success());
    assert!(can, "this machine does not let us make namespaces");
    let program = std::env::current_exe().unwrap();
    let output = launch(&[program.as_os_str(), "--exact".as_ref(), "in_a_namespace".as_ref()]).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Runs the process that the test above starts. It is no test itself.
#[test]
fn in_a_namespace() {
    if std::env::var_os(IN_NAMESPACE).is_none() {
        return;
    }
    let dir = folder();
    let mut mount = std::process::Command::new("mount");
    let status = mount.args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(dir.path()).status().unwrap();
    assert!(status.success(), "{mount:?}");
    let target = put(&dir, "t.bin", b"precious");
    let memory = Memory::with(vec![(info("t", DType::U8, &[3 << 20], &[1]), noise(3 << 20, 1))]);
    let error = write_path(&memory, None, &target).unwrap_err();
    assert!(matches!(error.problem, FileProblem::Full(_)), "{error}");
    assert_eq!((&fs::read(&target).unwrap()[..], names(&dir)), (&b"precious"[..], vec!["t.bin".to_owned()]));
}

/// A writer that notices a failure late must not get the report that everything is written.
#[test]
fn failed_flush_is_an_error() {
    struct Late;
    impl Write for Late {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Err(io::ErrorKind::StorageFull.into())
        }
    }
    let memory = Memory::with(vec![(info("t", DType::U8, &[3], &[1]), noise(3, 1))]);
    assert!(matches!(
        write_to(&memory, None, Format::Raw, &mut Late, &|_| (), &go()),
        Err(FileError { problem: FileProblem::Full(_), .. })
    ));
}
