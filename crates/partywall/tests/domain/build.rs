//! Building and committing.

use std::time::Duration;

use partywall::{
    DType, Error, Place,
    error::{Denied, InvalidArgument, LimitReached, Mismatch, NotFound},
    gpu::Gpu,
};
use partywall_harness::place;

use super::world::{World, commit, value};

// Holds 1.
#[test]
fn version_is_invisible_before_its_commit() {
    let world = World::new();
    let ours = world.connect();
    let theirs = world.connect();
    let build = ours.create("x", place()).tensor("x", DType::U32, &[4]).allocate().unwrap();
    assert!(matches!(theirs.open("x", Duration::ZERO), Err(Error::NotFound(NotFound::Name { .. }))));
    assert_eq!(theirs.status().unwrap().names, 0);
    drop(build);
    assert_eq!(theirs.status().unwrap().bytes, []);
}

// Holds 2.
#[test]
fn host_memory_is_read_by_others_without_a_copy() {
    let world = World::new();
    let ours = world.connect();
    let theirs = world.connect();
    let builder = ours.create("model", Place::Host);
    let builder = builder.tensor("a", DType::F32, &[2, 3]).tensor("b", DType::BF16, &[5]).metadata("format", "pt");
    let mut build = builder.tensor("none", DType::I64, &[0]).allocate().unwrap();
    build.as_mut_slice::<f32>("a").unwrap().copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    build.write("b", &[7; 10]).unwrap();
    assert_eq!(build.as_mut_slice::<i64>("none").unwrap(), [0_i64; 0]);
    let committed = build.commit().unwrap();
    assert_eq!(committed.version(), 1);

    let opened = theirs.open("model", Duration::ZERO).unwrap();
    let a = opened.tensor("a").unwrap();
    assert_eq!(a.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert_eq!((a.shape(), a.strides(), a.dtype()), (vec![2, 3], vec![3, 1], DType::F32));
    assert_eq!(opened.tensor("b").unwrap().as_bytes().unwrap(), [7; 10]);
    assert!(opened.tensor("none").unwrap().to_vec().unwrap().is_empty());
    assert_eq!(opened.tensor("none").unwrap().as_slice::<i64>().unwrap(), [0_i64; 0]);
    assert_eq!(opened.metadata().collect::<Vec<_>>(), [("format", "pt")]);
    let names: Vec<_> = opened.tensors().iter().map(|t| t.name().to_owned()).collect();
    assert_eq!(names, ["a", "b", "none"]);
}

#[test]
fn wrong_questions_about_host_memory_are_answered_with_their_own_errors() {
    let world = World::new();
    let domain = world.connect();
    let segment = commit(&domain, "x", 1, false);
    let tensor = segment.tensor("x").unwrap();
    assert!(matches!(
        tensor.as_slice::<f32>(),
        Err(Error::Mismatch(Mismatch::DType { has: DType::U32, wanted: "float32", .. }))
    ));
    let error = tensor.as_slice::<f32>().unwrap_err();
    assert_eq!(error.to_string(), r#"tensor "x" is uint32, and float32 was asked for"#);
    assert_eq!(error.advice(), "use it as uint32, or use its bytes");
    assert!(matches!(tensor.device(), Err(Error::Mismatch(Mismatch::Kind { has: "host", wanted: "GPU", .. }))));
    assert!(matches!(tensor.shared::<u32>(), Err(Error::Mismatch(Mismatch::Kind { .. }))));
    assert!(matches!(tensor.read_at(10, &mut [0; 10]), Err(Error::InvalidArgument(InvalidArgument::Range { .. }))));
    assert!(matches!(tensor.write_at(0, &[0]), Err(Error::Denied(Denied::ReadOnly { version: 1, .. }))));
    match segment.tensor("xx") {
        Err(Error::NotFound(NotFound::Tensor { near, .. })) => assert_eq!(near, ["x"]),
        other => panic!("{other:?}"),
    }
    let mut build = domain.create("y", Place::Host).tensor("x", DType::U32, &[4]).allocate().unwrap();
    assert!(matches!(build.as_mut_slice::<u8>("x"), Err(Error::Mismatch(Mismatch::DType { .. }))));
    assert!(matches!(build.write("x", &[0; 15]), Err(Error::InvalidArgument(InvalidArgument::Range { .. }))));
    assert!(matches!(build.write("z", &[]), Err(Error::NotFound(NotFound::Tensor { .. }))));
}

#[test]
fn impossible_builds_are_refused_before_anything_is_allocated() {
    let world = World::new();
    let domain = world.connect();
    let create = |name: &str| domain.create(name, place());
    for name in ["", "a b", "../a", "a//b", "/a", "a@1", &"n".repeat(256)] {
        assert!(
            matches!(create(name).allocate(), Err(Error::InvalidArgument(InvalidArgument::Name { .. }))),
            "{name:?}"
        );
    }
    let twice = create("x").tensor("a", DType::U8, &[1]).tensor("a", DType::U8, &[2]);
    assert!(matches!(twice.allocate(), Err(Error::InvalidArgument(InvalidArgument::Table { .. }))));
    assert!(matches!(
        create("x").tensor("a", DType::F64, &[u64::MAX, 2]).allocate(),
        Err(Error::InvalidArgument(InvalidArgument::Table { .. }))
    ));
    assert!(matches!(
        create("x").tensor("", DType::F64, &[2]).allocate(),
        Err(Error::InvalidArgument(InvalidArgument::Table { .. }))
    ));
    assert!(create("x").tensor("a", DType::U8, &[1 << 62]).allocate().is_err());
}

#[test]
fn empty_segment_is_committed_and_opened() {
    let world = World::new();
    let domain = world.connect();
    let build = domain.create("empty", place()).allocate().unwrap();
    let used_on = |gpu: Option<&Gpu>| gpu.map(Gpu::uuid);
    assert_eq!((build.place(), used_on(build.gpu())), (place(), place().gpu()));
    let segment = build.commit().unwrap();
    assert_eq!((segment.place(), used_on(segment.gpu())), (place(), place().gpu()));
    assert!(segment.is_empty());
    assert_eq!(domain.open("empty", Duration::ZERO).unwrap().bytes(), 0);
}

#[test]
fn if_absent_makes_a_name_once() {
    let world = World::new();
    let domain = world.connect();
    let _first = commit(&domain, "x", 1, false);
    let second = domain.create("x", place()).tensor("x", DType::U32, &[4]).if_absent(true).allocate().unwrap();
    assert!(matches!(second.commit(), Err(Error::Denied(Denied::NameExists { version: 1, .. }))));
    assert_eq!(value(&domain.open("x", Duration::ZERO).unwrap()), 1);
    assert_eq!(domain.status().unwrap().versions, 1);
}

// Holds 44.
#[test]
fn many_tensors_and_chunks_of_host_memory_keep_their_places() {
    let world = World::new();
    let domain = world.connect();
    let mut builder = domain.create("many", Place::Host).chunk_bytes(64 << 10);
    for i in 0..2000 {
        builder = builder.tensor(&format!("layer.{i}.weight"), DType::U32, &[i % 50 + 1]);
    }
    let mut build = builder.allocate().unwrap();
    for i in 0..2000 {
        build.as_mut_slice::<u32>(&format!("layer.{i}.weight")).unwrap().fill(i as u32);
    }
    assert!(build.chunks().len() > 4);
    let _committed = build.commit().unwrap();
    let opened = world.connect().open("many", Duration::ZERO).unwrap();
    assert_eq!(opened.len(), 2000);
    for i in 0..2000 {
        let tensor = opened.tensor(&format!("layer.{i}.weight")).unwrap();
        assert_eq!(tensor.as_slice::<u32>().unwrap(), vec![i as u32; i as usize % 50 + 1]);
        assert_eq!(tensor.as_bytes().unwrap().as_ptr() as usize % 256, 0);
    }
}

// Holds 46.
#[test]
fn chunks_are_allocated_on_demand_and_the_rest_by_the_commit() {
    let world = World::new();
    let domain = world.connect();
    let mut builder = domain.create("x", place()).chunk_bytes(4096).on_demand(true);
    for tensor in ["a", "b", "c", "d"] {
        builder = builder.tensor(tensor, DType::U8, &[4096]);
    }
    let mut build = builder.tensor("none", DType::U8, &[0]).allocate().unwrap();
    assert_eq!((build.bytes(), build.chunks().len()), (0, 0));
    assert!(!build.is_allocated("a").unwrap() && build.is_allocated("none").unwrap());
    assert!(build.device("a").is_err());
    assert!(matches!(build.allocate_for("other"), Err(Error::NotFound(NotFound::Tensor { .. }))));
    build.allocate_for("none").unwrap();
    assert_eq!(build.chunks().len(), 0);
    // With all chunks before it, and once.
    build.write("b", &[2; 4096]).unwrap();
    build.allocate_for("a").unwrap();
    assert_eq!(build.chunks().len(), 2);
    assert!(build.is_allocated("a").unwrap() && !build.is_allocated("c").unwrap());
    build.write("c", &[3; 4096]).unwrap();
    let _committed = build.commit().unwrap();
    let opened = world.connect().open("x", Duration::ZERO).unwrap();
    let byte = |tensor: &str| {
        let mut byte = [9; 1];
        opened.tensor(tensor).unwrap().read_at(4095, &mut byte).unwrap();
        byte[0]
    };
    assert_eq!(["a", "b", "c", "d"].map(byte), [0, 2, 3, 0]);
}

// Holds 45.
#[test]
fn views_show_the_memory_of_their_tensor() {
    let world = World::new();
    let domain = world.connect();
    let builder = domain.create("x", place()).tensor("matrix", DType::U8, &[4, 8]);
    let builder = builder.view("tied", DType::U8, &[4, 8], &[8, 1], ("matrix", 0));
    let builder = builder.view("turned", DType::U8, &[8, 2], &[1, 8], ("matrix", 16));
    let mut build = builder.tensor_strided("gaps", DType::U8, &[3], &[4]).allocate().unwrap();
    build.write("matrix", &std::array::from_fn::<u8, 32, _>(|i| i as u8)).unwrap();
    let _committed = build.commit().unwrap();
    let opened = world.connect().open("x", Duration::ZERO).unwrap();
    let read = |tensor: &str| {
        let tensor = opened.tensor(tensor).unwrap();
        let mut bytes = vec![0; tensor.bytes() as usize];
        tensor.read_at(0, &mut bytes).unwrap();
        bytes
    };
    assert_eq!(read("tied"), (0..32).collect::<Vec<u8>>());
    assert_eq!(read("turned"), (16..32).collect::<Vec<u8>>());
    assert_eq!(opened.tensor("turned").unwrap().strides(), [1, 8]);
    assert_eq!(read("gaps").len(), 9);
    assert_eq!(opened.tensor_bytes(), 32 + 9);
    let outside = domain.create("y", place()).tensor("a", DType::U8, &[4]);
    let outside = outside.view("b", DType::U8, &[4], &[1], ("a", 1)).allocate();
    assert!(matches!(outside, Err(Error::InvalidArgument(InvalidArgument::Table { .. }))), "{outside:?}");
}

// Holds 117.
#[test]
fn limits_of_the_broker_for_host_memory_are_errors_of_their_own() {
    let world = World::with(|config| {
        config.limits.names = 2;
        config.limits.bytes = 100;
    });
    let domain = world.connect();
    let _a = commit(&domain, "a", 1, true);
    let _b = commit(&domain, "b", 1, true);
    let build = |name: &str, n| domain.create(name, Place::Host).tensor("x", DType::U8, &[n]).allocate().unwrap();
    assert!(matches!(
        build("c", 1).commit(),
        Err(Error::LimitReached(LimitReached::Broker { allowed: 2, needed: 3, .. }))
    ));
    assert!(matches!(build("a", 100).commit(), Err(Error::LimitReached(LimitReached::Broker { allowed: 100, .. }))));
    assert_eq!(domain.names().unwrap().len(), 2);
    domain.remove("b").unwrap();
    assert!(build("c", 1).commit().is_ok());
}
