//! Writes the seeds of `fuzz/corpus`: one valid input of each sort, which a fuzzer would take long to find by itself.
//!
//! Run it in the root of the repository: `cargo run --manifest-path fuzz/Cargo.toml --example=seeds`.

use std::{fs, io, path::Path};

use partywall_files::{TensorInfo, safetensors_header};
use partywall_shm::{DType, TableBuilder};
use partywall_wire::{
    Access, Answer, BrokerHello, Call, ClientHello, Event, Name, Open, Refusal, Reply, Request, RequestId,
    frame::{self, HEAD},
    handshake::{self, Speaker},
    limits::{MAX_MESSAGE, PROTOCOL},
};
use serde::Serialize;

fn main() -> io::Result<()> {
    wire()?;
    table()?;
    files()?;
    // Each two bytes of the registry's inputs are the seed of a step, and each byte of those of control memory a
    // choice.
    let bytes: Vec<u8> = (0..=255_u8).map(|n| n.wrapping_mul(167).wrapping_add(13)).collect();
    seed("registry", "steps", &[&[77], &bytes[..]])?;
    for (object, name) in ["pool", "topic", "queue", "timeline", "traces"].into_iter().enumerate() {
        seed("control", name, &[&[object as u8], &bytes[..]])?;
    }
    Ok(())
}

fn wire() -> io::Result<()> {
    let open =
        Open { name: Name::new("weights").expect("it is a name"), version: Some(3), access: Access::Read, wait: true };
    let request = Request { id: RequestId(7), call: Call::Open(open) };
    let reply = Reply { id: RequestId(7), outcome: Ok(Answer::Done) };
    let refused =
        Reply { id: RequestId(7), outcome: Err(Refusal::BadName { name: String::new(), why: "it is empty".into() }) };
    let event = Event::Completion { ticket: RequestId(7), outcome: Ok(Answer::Done) };
    seed("wire", "request", &[&[0], &body(&request)])?;
    seed("wire", "reply", &[&[1], &body(&reply)])?;
    seed("wire", "refusal", &[&[1], &body(&refused)])?;
    seed("wire", "event", &[&[2], &body(&event)])?;
    let hello =
        ClientHello { command: "python train.py".into(), operator: false, simulated: true, resume: None, attempt: 0 };
    let refusal = BrokerHello { instance: 1, outcome: Err(Refusal::Protocol) };
    seed("wire", "client", &[&[3], &first(&hello)])?;
    seed("wire", "broker", &[&[4], &first(&refusal)])?;
    let message = frame::encode(&request, 0, MAX_MESSAGE).expect("it is short");
    seed("wire", "frames", &[&[5, 3], &frame::carrier(2), &message, &message])?;
    seed("wire", "point", &[&[6], b"0123456789abcdef-42"])?;
    seed("wire", "pattern", &[&[6], b"frames/*/left?\nframes/1/left2"])
}

fn table() -> io::Result<()> {
    let mut table = TableBuilder::new();
    table.add("weight", DType::F32, &[4, 8]).expect("it is possible");
    table.add_strided("fortran", DType::U8, &[2, 3], &[1, 2]).expect("it is possible");
    table.set_metadata("k", "v").expect("it is possible");
    let layout = table.layout(128, 4).expect("it is small");
    let chunks: Vec<u8> = layout.chunks.iter().flat_map(|bytes| (*bytes as u32).to_le_bytes()).collect();
    seed("table", "two", &[&[layout.chunks.len() as u8], &chunks, &layout.table])
}

fn files() -> io::Result<()> {
    let tensor = TensorInfo::contiguous("data", DType::F32, vec![2, 1]).expect("it is possible");
    let metadata = [("header".to_owned(), "00ff".to_owned())];
    let header = safetensors_header(&tensor, &metadata).expect("it is possible");
    seed("files", "message", &[&[0], &header, &[1; 8]])?;
    seed("files", "safetensors", &[&[1], &header, &[1; 8]])?;
    let npy = b"\x93NUMPY\x01\x00\x36\x00{'descr': '<f4', 'fortran_order': True, 'shape': (2,)}";
    seed("files", "npy", &[&[2], npy, &[1; 8]])?;
    let index = br#"{"metadata":{"total_size":8},"weight_map":{"a":"a.safetensors","b":"a.safetensors"}}"#;
    seed("files", "index", &[&[3], index])
}

fn body(message: &impl Serialize) -> Vec<u8> {
    frame::encode(message, 0, MAX_MESSAGE).expect("it is short").split_off(HEAD)
}

fn first(rest: &impl Serialize) -> Vec<u8> {
    let speaker = Speaker { protocol: PROTOCOL, pid: 7, version: "0.1.0".to_owned() };
    handshake::encode(&speaker, rest, 0).expect("it is short").split_off(HEAD)
}

fn seed(target: &str, name: &str, parts: &[&[u8]]) -> io::Result<()> {
    let folder = Path::new("fuzz/corpus").join(target);
    fs::create_dir_all(&folder)?;
    fs::write(folder.join(name), parts.concat())
}
