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
    bridge()?;
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

/// The messages of bridges, whose types are not public: tuples are encoded as they are.
fn bridge() -> io::Result<()> {
    const WIRE: u32 = 1;
    let mut table = TableBuilder::new();
    table.add("w", DType::F32, &[4]).expect("it is possible");
    table.add_view("v", DType::F32, &[2], &[2], "w", 0).expect("it is possible");
    let layout = table.layout(128, 4).expect("it is small");
    let root = [7_u8; 32];
    let host = ("0.1.0", ["tcp/127.0.0.1:7447"].as_slice(), 5_u64);
    let view = ("b", "c0ffee", Some(3_u64), Some(host), None::<u32>);
    let name = ("llm", "segment", 3_u64, "host memory", 16_u64, 1_u64);
    let manifest = ("llm", 3_u64, "host memory", 16_u64, root, &layout.chunks, &layout.table);
    seed("bridge", "host", &[&[0], &plain(&(WIRE, host))])?;
    seed("bridge", "view", &[&[0], &plain(&(WIRE, [view].as_slice()))])?;
    seed("bridge", "names", &[&[0], &plain(&(WIRE, [name].as_slice()))])?;
    seed("bridge", "manifest", &[&[1], &plain(&(WIRE, manifest))])?;
    seed("bridge", "answer", &[&[2, 3], &[9; 15], &[0, 9, 2, 9, 1, 9, 3, 9]])?;
    seed("bridge", "question", &[&[3], b"pw1/r/piece/h/i/", "07".repeat(32).as_bytes(), b"/12"])?;
    seed("bridge", "piece", &[&[4], &[77; 120]])?;
    // The version of the messages of topics, a stream, and the index of a message.
    let stream = (1_u128, 2_u128, 3_u64);
    let sample = (4_u64, 5_u64, 6_u64, 0_u64, "f32", [4_u64].as_slice(), 16_u64, b"head".as_slice(), false);
    let join = (0_u32, Some(8_u32), (8_u32, 1_u64 << 20), Some((9_u128, 4_u64)));
    seed("bridge", "first", &[&[5, 1], &plain(&(stream, 1_u32, (0_u64, sample)))])?;
    seed("bridge", "join", &[&[5, 1], &plain(&(stream, 0_u32, join))])?;
    seed("bridge", "name", &[&[6], b"//cam-1.lan/frames/left@12"])?;
    seed("bridge", "pattern", &[&[6], b"//a/frames/*"])?;
    let record = b"host=a\ninstance=c0ffee\nendpoints=tcp/127.0.0.1:7447\ninsecure=false\ntls=";
    seed("bridge", "record", &[&[7], record])
}

fn plain(value: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(value).expect("it is plain")
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
