// Holds 157.
//! Files of tensors: a file is refused, or all its tensors can be read.
#![no_main]

use std::{
    fs,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use libfuzzer_sys::fuzz_target;
use partywall_files::{
    FileProblem, Lane, Piece, Plan, Sink, SinkError, TensorInfo, safetensors_header, safetensors_message,
};
use tempfile::TempDir;

fuzz_target!(|input: &[u8]| {
    let Some((format, bytes)) = input.split_first() else { return };
    match format % 4 {
        0 => message(bytes),
        1 => plan("m.safetensors", bytes),
        2 => plan("m.npy", bytes),
        _ => {
            fs::write(folder().path().join("a.safetensors"), shard()).expect("the folder can be written");
            plan("m.safetensors.index.json", bytes);
        }
    }
});

fn message(bytes: &[u8]) {
    let Ok(message) = safetensors_message(bytes) else { return };
    assert_eq!(message.bytes.len() as u64, message.tensor.bytes);
    let again = match safetensors_header(&message.tensor, &message.metadata) {
        Ok(header) => [&header, message.bytes].concat(),
        // Metadata in JSON's escapes is shorter to read than to write.
        Err(FileProblem::HeaderTooLarge { .. } | FileProblem::ReservedName { .. }) => return,
        Err(problem) => panic!("what was read cannot be written: {problem}"),
    };
    assert_eq!(safetensors_message(&again).expect("our own message is read"), message);
}

fn plan(name: &str, bytes: &[u8]) {
    let path = folder().path().join(name);
    fs::write(&path, bytes).expect("the folder can be written");
    let Ok(plan) = Plan::from_path(&path) else { return };
    let there = bytes.len().max(shard().len()) as u64;
    assert!(plan.total_bytes() <= there, "{} bytes of a file of {there}", plan.total_bytes());
    let sink = Count { tensors: plan.tensors(), copied: AtomicU64::new(0) };
    plan.copy_to(&sink, 1, &|_| (), &AtomicBool::new(false)).expect("the tensors of a plan can be copied");
    assert_eq!(sink.copied.into_inner(), plan.total_bytes());
    for (index, tensor) in plan.tensors().iter().enumerate() {
        let read = plan.read_tensor(index).expect("the tensors of a plan can be read");
        assert_eq!(read.len() as u64, tensor.bytes);
    }
}

/// Checks that all pieces lie within their tensors.
struct Count<'a> {
    tensors: &'a [TensorInfo],
    copied: AtomicU64,
}

struct CountLane<'a>(&'a Count<'a>, Vec<u8>);

impl Sink for Count<'_> {
    type Lane<'a>
        = CountLane<'a>
    where
        Self: 'a;

    fn lane(&self) -> Result<CountLane<'_>, SinkError> {
        Ok(CountLane(self, vec![0; 512]))
    }
}

impl Lane for CountLane<'_> {
    fn buffer(&mut self) -> Result<&mut [u8], SinkError> {
        Ok(&mut self.1)
    }

    fn submit(&mut self, pieces: &[Piece]) -> Result<(), SinkError> {
        for piece in pieces {
            assert!(piece.start + piece.len <= self.1.len());
            assert!(piece.offset + piece.len as u64 <= self.0.tensors[piece.tensor].bytes);
            self.0.copied.fetch_add(piece.len as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    fn finish(self) -> Result<(), SinkError> {
        Ok(())
    }
}

/// A shard that an index can name.
fn shard() -> &'static [u8] {
    const HEADER: &[u8] =
        br#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[],"data_offsets":[4,8]}}"#;
    static SHARD: OnceLock<Vec<u8>> = OnceLock::new();
    SHARD.get_or_init(|| [&(HEADER.len() as u64).to_le_bytes(), HEADER, &[7; 8]].concat())
}

fn folder() -> &'static TempDir {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| tempfile::tempdir().expect("a folder can be created"))
}
