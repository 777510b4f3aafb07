//! What hosts send each other, and names of theirs that users write: decoding, and agreement with encoding.
#![no_main]

use std::{fmt::Debug, path::Path, sync::Arc};

use blake3::{
    Hash, Hasher,
    hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root},
};
use libfuzzer_sys::{
    arbitrary::{Result, Unstructured},
    fuzz_target,
};
use partywall::{
    TableBuilder,
    files::{FileProblem, FileReader, Plan, StoredFile},
};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    manifest::Manifest,
    message::{Asked, Assembly, ExportedName, HostInfo, HostView, Proof, Refusal, Unanswered, decode, encode, parts},
    name::{RemoteName, RemotePattern},
    record::BridgeRecord,
    wire::{Message, ToOrigin, ToReceiver},
};

// The decoders alone: the rest of the bridge has 250 crates, which take long to compile.
#[allow(dead_code, reason = "the bridge uses the rest")]
#[path = "../../crates/partywall-bridge/src/content.rs"]
mod content;
#[allow(dead_code, reason = "the bridge uses the rest")]
#[path = "../../crates/partywall-bridge/src/manifest.rs"]
mod manifest;
#[allow(dead_code, reason = "the bridge uses the rest")]
#[path = "../../crates/partywall-bridge/src/message.rs"]
mod message;
#[path = "../../crates/partywall-bridge/src/name.rs"]
mod name;
#[path = "../../crates/partywall-bridge/src/record.rs"]
mod record;
#[allow(dead_code, reason = "the bridge uses the rest")]
#[path = "../../crates/partywall-bridge/src/topic/wire.rs"]
mod wire;

/// As the module of the messages of topics knows it.
pub(crate) const PIECE_BYTES: u64 = message::PIECE_BYTES as u64;

fuzz_target!(|input: &[u8]| {
    let Some((decoder, body)) = input.split_first() else { return };
    let mut choices = Unstructured::new(body);
    match decoder % 8 {
        0 => {
            value::<HostInfo>(body);
            value::<Vec<HostView>>(body);
            value::<Vec<ExportedName>>(body);
            value::<Proof>(body);
            value::<Refusal>(body);
            value::<String>(body);
        }
        1 => version(body),
        2 => drop(answer(&mut choices)),
        3 => question(body),
        4 => drop(piece(&mut choices)),
        5 => {
            sample::<ToOrigin>(body);
            sample::<ToReceiver>(body);
        }
        6 => name(body),
        _ => record(body),
    }
});

/// Decodes a value, encodes it, and decodes that again: both must be the same.
fn value<T: Serialize + DeserializeOwned + PartialEq + Debug>(body: &[u8]) {
    if let Ok(value) = decode::<T>(body) {
        assert_eq!(decode(&encode(&value)).as_ref(), Ok(&value));
    }
}

/// Reads a manifest and plans to pull the version, as far as that needs no memory.
fn version(body: &[u8]) {
    struct Content(u64);

    impl StoredFile for Content {
        fn length(&self) -> u64 {
            self.0
        }

        fn reader<'a>(&'a self, _: &'a dyn Fn() -> bool) -> std::result::Result<Box<dyn FileReader + 'a>, FileProblem> {
            Err(FileProblem::Cancelled)
        }

        fn check(&self) -> std::result::Result<(), FileProblem> {
            Ok(())
        }
    }

    let Ok((manifest, table)) = Manifest::read(body) else { return };
    let (spans, length) = content::spans(&table);
    let end = spans.iter().fold(0_u64, |end, span| {
        assert_eq!(span.start, end);
        end.saturating_add(span.bytes)
    });
    assert_eq!((end, length), (length, manifest.length));
    let file = Arc::new(Content(length));
    if let Ok(plan) = Plan::from_content(Path::new("//a/x@1"), file, &table, Vec::new()) {
        let mut again = TableBuilder::new();
        plan.add_to(&mut again).expect("tensors of a table are those of one");
        assert_eq!(again.views().count(), table.len());
    }
}

/// Puts an answer together of parts that come in any order, and of some that do not belong to it.
fn answer(choices: &mut Unstructured<'_>) -> Result<()> {
    const LIMIT: usize = 4 * message::PIECE_BYTES;
    let count = choices.int_in_range(1..=5_u32)?;
    let payloads = (0..count).map(|_| choices.arbitrary::<[u8; 3]>()).collect::<Result<Vec<_>>>()?;
    let whole = payloads.concat();
    let digest = *blake3::hash(&whole).as_bytes();
    let mut missing: Vec<_> = (0..count).collect();
    let mut assembly = Assembly::default();
    while !choices.is_empty() {
        let number = u32::from(choices.arbitrary::<u8>()? % 6);
        let payload = payloads.get(number as usize).copied().unwrap_or_default();
        let mut wrong = digest;
        wrong[0] ^= 1;
        let (head, is_right) = match choices.arbitrary::<u8>()? {
            0 => (encode(&(number, count + 1, digest)), false),
            1 => (encode(&(number, count, wrong)), false),
            2 => (choices.arbitrary::<[u8; 40]>()?.to_vec(), false),
            _ => (encode(&(number, count, digest)), missing.contains(&number)),
        };
        missing.retain(|left| *left != number);
        match assembly.take(&head, payload[..].into(), LIMIT) {
            Ok(Some(found)) => {
                assert!(is_right && missing.is_empty() && found == whole);
                break;
            }
            Ok(None) if is_right => assert!(!missing.is_empty()),
            Ok(None) => break,
            Err(error) => {
                assert!(!is_right && error != Unanswered::Silent);
                break;
            }
        }
    }
    let (head, payload) = parts(&whole).next().expect("it is not empty");
    assert_eq!(Assembly::default().take(&head, payload.into(), LIMIT), Ok(Some(whole.clone())));
    Ok(())
}

fn question(body: &[u8]) {
    let Ok(key) = std::str::from_utf8(body) else { return };
    let again = match Asked::parse(key) {
        Some(Asked::Host) => "host/h/i".to_owned(),
        Some(Asked::View) => "view/h/i".to_owned(),
        Some(Asked::Names) => "names/h/i".to_owned(),
        Some(Asked::Manifest { name, version }) => format!("manifest/h/i/{version}/{name}"),
        Some(Asked::Content(root)) => format!("content/h/i/{}", root.to_hex()),
        Some(Asked::Piece { root, piece }) => format!("piece/h/i/{}/{piece}", root.to_hex()),
        None => return,
    };
    assert_eq!(Asked::parse(&format!("pw1/r/{again}")), Asked::parse(key));
}

/// Proves pieces of contents of any length, whose other pieces are hashes of nothing.
fn piece(choices: &mut Unstructured<'_>) -> Result<()> {
    const MIB: u64 = 1 << 20;
    let (root, length, piece) = (Hash::from_bytes(choices.arbitrary()?), choices.arbitrary()?, choices.arbitrary()?);
    let shift = choices.int_in_range(20..=63_u32)?;
    let count = (choices.arbitrary::<u64>()? >> shift).max(1);
    let tail = choices.int_in_range(1..=64_u64)?;
    let is_last = count == 1 || choices.arbitrary::<u8>()? > 8;
    let index = if is_last { count - 1 } else { choices.int_in_range(0..=count - 2)? };
    let mut bytes = vec![choices.arbitrary()?; if is_last { tail } else { MIB } as usize];
    let mut path = choices.arbitrary::<Vec<[u8; 32]>>()?;
    assert!(!content::is_piece(root, length, piece, [&bytes[..]], &path));

    let sides = sides(count, index);
    path.resize(sides.len(), [count as u8; 32]);
    let length = (count - 1) * MIB + tail;
    let root = root_of(&bytes, index, &sides, &path);
    let middle = bytes.len() / 2;
    let is_piece = |length, index, bytes: &[u8], path: &[ChainingValue]| {
        content::is_piece(root, length, index, [&bytes[..middle], &bytes[middle..]], path)
    };
    assert!(is_piece(length, index, &bytes, &path));
    assert!(!is_piece(length, index + 1, &bytes, &path));
    assert!(!is_piece(length, index, &bytes, &[&path[..], &[[0; 32]]].concat()));
    assert!(path.is_empty() || !is_piece(length, index, &bytes, &path[1..]));
    let at = choices.arbitrary::<usize>()?;
    let (in_bytes, bit) = (at % bytes.len(), choices.arbitrary::<u8>()? % 8);
    bytes[in_bytes] ^= 1 << bit;
    assert!(!is_piece(length, index, &bytes, &path));
    bytes[in_bytes] ^= 1 << bit;
    if !path.is_empty() {
        let step = at % path.len();
        path[step][at % 32] ^= 1 << bit;
        assert!(!is_piece(length, index, &bytes, &path));
    }
    Ok(())
}

/// Returns the sides on which a piece's way to the root has other hashes, from below: true for the left one.
fn sides(mut count: u64, mut index: u64) -> Vec<bool> {
    let mut sides = Vec::new();
    while count > 1 {
        // The left half of a tree is complete.
        let left = count.next_power_of_two() / 2;
        let is_right = index >= left;
        sides.push(is_right);
        (count, index) = if is_right { (count - left, index - left) } else { (left, index) };
    }
    sides.reverse();
    sides
}

fn root_of(bytes: &[u8], index: u64, sides: &[bool], path: &[ChainingValue]) -> Hash {
    if sides.is_empty() {
        return blake3::hash(bytes);
    }
    let mut hasher = Hasher::new();
    hasher.set_input_offset(index << 20);
    let mut hash = hasher.update(bytes).finalize_non_root();
    for (step, (is_right, beside)) in sides.iter().zip(path).enumerate() {
        let (left, right) = if *is_right { (beside, &hash) } else { (&hash, beside) };
        if step + 1 == sides.len() {
            return merge_subtrees_root(left, right, Mode::Hash);
        }
        hash = merge_subtrees_non_root(left, right, Mode::Hash);
    }
    unreachable!("the last step returns")
}

fn sample<T: Message + PartialEq + Debug>(body: &[u8]) {
    if let Ok(message) = T::decode(body) {
        let encoded = message.encode();
        assert!(encoded.len() <= T::MOST);
        assert_eq!(T::decode(&encoded), Ok(message));
    }
}

fn name(body: &[u8]) {
    let Ok(text) = std::str::from_utf8(body) else { return };
    if let Ok(name) = text.parse::<RemoteName>() {
        assert!(partywall::check_name(&name.name).is_ok() && name::check_host(&name.host).is_ok());
        assert_eq!(name.to_string().parse().as_ref(), Ok(&name));
        assert!(partywall::check_name(text).is_err(), "no local name looks like that");
    }
    if let Ok(pattern) = text.parse::<RemotePattern>() {
        assert_eq!(pattern.to_string(), text);
    }
}

/// Reads the metadata of a bridge's name: a key and a value a line.
fn record(body: &[u8]) {
    let Ok(text) = std::str::from_utf8(body) else { return };
    let find = |key: &str| text.lines().find_map(|line| line.split_once('=').filter(|(found, _)| *found == key));
    let Some(record) = BridgeRecord::read(|key| find(key).map(|(_, value)| value)) else { return };
    let metadata = record.to_metadata();
    let again = BridgeRecord::read(|key| metadata.iter().find(|(of, _)| *of == key).map(|(_, value)| value.as_str()));
    assert_eq!(again, Some(record));
}
