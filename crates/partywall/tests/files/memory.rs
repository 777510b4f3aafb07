//! Host memory as sink and as content.

use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use partywall::files::{Content, Lane, Piece, Plan, Sink, SinkError, TensorInfo};

/// A segment in host memory.
#[derive(Default)]
pub(super) struct Memory {
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) metadata: Vec<(String, String)>,
    pub(super) bytes: Vec<Mutex<Vec<u8>>>,
    pub(super) buffer_bytes: usize,
    pub(super) submits: AtomicUsize,
    pub(super) finished: AtomicUsize,
    /// Refuses from this submit on.
    pub(super) fail_at: Option<usize>,
    /// Fails to read from this tensor.
    pub(super) unreadable: Option<usize>,
}

pub(super) struct MemoryLane<'a> {
    memory: &'a Memory,
    buffer: Vec<u8>,
}

impl Memory {
    pub(super) fn of(plan: &Plan) -> Self {
        Self {
            tensors: plan.tensors().to_vec(),
            metadata: plan.metadata().to_vec(),
            bytes: plan.tensors().iter().map(|t| Mutex::new(vec![0xee; t.bytes as usize])).collect(),
            buffer_bytes: 1 << 16,
            ..Self::default()
        }
    }

    /// One that holds these.
    pub(super) fn with(tensors: Vec<(TensorInfo, Vec<u8>)>) -> Self {
        let (tensors, bytes): (Vec<_>, Vec<_>) = tensors.into_iter().map(|(t, b)| (t, Mutex::new(b))).unzip();
        Self { tensors, bytes, ..Self::default() }
    }

    pub(super) fn bytes_of(&self, name: &str) -> Vec<u8> {
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
