//! Bad files, each with its own error.

use std::{fs, os::unix::net::UnixListener, path::Path};

use partywall::files::{FileError, FileProblem, Format, Plan};
use partywall_shm::{DType, TableBuilder};
use proptest::prelude::*;
use safetensors::tensor::Dtype;

use super::{Memory, crate_bytes, error, folder, forged, get, go, info, load, model, noise, problem, put};

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

    let one = |rest: &str| format!("{{\"t\":{{{rest}}}}}");
    for (json, data) in [
        ("", 0),
        ("{", 0),
        ("[]", 0),
        ("null", 0),
        ("{}x", 0),
        (&"[".repeat(100_000)[..], 0),
        (&one(r#""dtype":31,"shape":[1],"data_offsets":[0,4]"#), 4),
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

// Holds 303.
#[test]
fn pointers_of_git_lfs_are_recognised_in_every_format() {
    let dir = folder();
    let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 12345\n", "4d7a".repeat(16));
    for name in ["m.safetensors", "m.NPY", "m.safetensors.index.json", "m.bin"] {
        let path = put(&dir, name, pointer.as_bytes());
        assert!(matches!(problem(&path), FileProblem::LfsPointer), "{name}");
    }
    // Of a folder, the index and a shard.
    assert!(matches!(problem(dir.path()), FileProblem::LfsPointer));
    put(&dir, "m.safetensors.index.json", br#"{"weight_map": {"a": "m.safetensors"}}"#);
    let shard = error(dir.path());
    assert!(matches!(shard.problem, FileProblem::LfsPointer) && shard.file.ends_with("m.safetensors"), "{shard}");
    // Text about pointers is no pointer.
    let text = load(&put(&dir, "m.txt", pointer.repeat(20).as_bytes()));
    assert_eq!(text.tensors[0].bytes, 20 * pointer.len() as u64);
}

// Holds 304.
#[test]
fn wrong_tensor_of_a_header_is_named() {
    let dir = folder();
    let a = r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let b = |rest: &str| format!("{{{a},\"b\":{{{rest}}}}}");
    for (json, says) in [
        (format!("{{{a},{a}}}"), r#"it has the key "a" twice"#),
        (format!(r#"{{{a},"__metadata__":{{"k":"1","k":"2"}}}}"#), r#""__metadata__": it has the key "k" twice"#),
        (b(r#""dtype":"F32","dtype":"U8","shape":[2],"data_offsets":[8,16]"#), r#""b": duplicate field `dtype`"#),
        (b(r#""dtype":"F32","shape":[-2],"data_offsets":[8,16]"#), r#""b": invalid value"#),
        (b(r#""dtype":"F32","shape":[2]"#), r#""b": missing field `data_offsets`"#),
        (
            b(r#""dtype":"F32","shape":[3],"data_offsets":[8,16]"#),
            r#"tensor "b" has 8 bytes, and its shape [3] of F32 needs 12"#,
        ),
        (
            b(r#""dtype":"F32","shape":[2],"data_offsets":[4,12]"#),
            r#"tensor "b" is at 4 to 12, and the tensors before it end at 8"#,
        ),
        (
            b(r#""dtype":"F4","shape":[3],"data_offsets":[8,16]"#),
            r#"tensor "b" has the shape [3], which is impossible"#,
        ),
    ] {
        let error = error(&put(&dir, "m.safetensors", &forged(&json, 16)));
        assert!(matches!(error.problem, FileProblem::Malformed(_)), "{json}: {error}");
        assert!(error.to_string().contains(says), "{json}: {error}");
    }
}

/// A file that a newer library has written is not damaged.
// Holds 304.
#[test]
fn type_that_is_not_known_is_named() {
    let dir = folder();
    let json = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"I4","shape":[4],"data_offsets":[8,10]}}"#;
    let error = error(&put(&dir, "m.safetensors", &forged(json, 10)));
    let FileProblem::UnknownElements { tensor, dtype } = &error.problem else { panic!("{error}") };
    assert_eq!((tensor.as_str(), dtype.as_str()), ("b", "I4"));
    assert!(error.to_string().contains(partywall::VERSION) && error.problem.advice().contains("upgrade"), "{error}");
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
    let newer = problem(&put(&dir, "t.npy", &version));
    assert!(matches!(&newer, FileProblem::UnknownVersion { version } if version == "9.0"), "{newer}");
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
    // Holds 157.
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
