//! Imported segments.

use std::{sync::Arc, time::Duration};

use partywall::{DType, Domain, Place, Segment};
use partywall_harness::{World, eventually, simulated};
use partywall_vulkan::{
    Error, Gpu, ImportedMemory,
    ash::{khr, vk},
};

use super::device::Fixture;

const TIMEOUT: Duration = Duration::from_secs(60);
const READ: vk::BufferUsageFlags = vk::BufferUsageFlags::TRANSFER_SRC;
const WRITE: vk::BufferUsageFlags = vk::BufferUsageFlags::TRANSFER_DST;

pub(crate) fn import(gpu: &Arc<Gpu>, domain: &Domain, name: &str) -> Arc<ImportedMemory> {
    gpu.import(domain.descriptors(name, TIMEOUT).unwrap()).unwrap()
}

/// A mutable segment with a tensor `x` of zeroes.
pub(crate) fn target(domain: &Domain, name: &str, bytes: u64) -> Segment {
    let builder = domain.create(name, Place::Host).mutable(true).tensor("x", DType::U8, &[bytes]);
    builder.allocate().unwrap().commit().unwrap()
}

// Holds 227.
#[test]
fn needs_vulkan_segment_of_a_killed_process_is_copied_by_vulkan() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::new();
    let mut committer = world.play("committer");
    let mesh = import(&fixture.gpu, &domain, "mesh");
    committer.kill();
    let again = import(&fixture.gpu, &domain, "mesh");
    let segment = target(&domain, "copy", 300);
    let copy = import(&fixture.gpu, &domain, "copy");
    for mesh in [&mesh, &again] {
        segment.tensor("x").unwrap().write_at(0, &[0; 300]).unwrap();
        let from = mesh.buffer("y", READ).unwrap();
        let to = copy.buffer("x", WRITE).unwrap();
        assert_eq!((from.bytes(), mesh.descriptors().table().find("y").unwrap().offset()), (300, 4096));
        fixture.copy(&from, &to, None, None);
        fixture.finish();
        assert_eq!(segment.tensor("x").unwrap().to_vec().unwrap(), [9; 300]);
    }
}

// Holds 227.
#[test]
fn needs_vulkan_import_holds_the_lease_and_gives_it_back() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::new();
    let segment = target(&domain, "x", 100);
    let leases = domain.status().unwrap().leases;
    let imported = import(&fixture.gpu, &domain, "x");
    let buffer = imported.buffer("x", READ).unwrap();
    drop(imported);
    assert_eq!(domain.status().unwrap().leases, leases + 1, "a buffer keeps the import");
    drop(buffer);
    assert_eq!(domain.status().unwrap().leases, leases);
    let files = std::fs::read_dir("/proc/self/fd").unwrap().count();
    for _ in 0..20 {
        let imported = import(&fixture.gpu, &domain, "x");
        let buffers: Vec<_> = (0..20).map(|_| imported.buffer("x", READ).unwrap()).collect();
        drop((imported, buffers));
    }
    eventually("files closed", || std::fs::read_dir("/proc/self/fd").unwrap().count() <= files);
    drop(segment);
}

// Holds 227.
#[test]
fn needs_vulkan_frozen_version_is_not_written() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::new();
    let segment = domain.create("x", Place::Host).tensor("x", DType::U8, &[100]).allocate().unwrap().commit().unwrap();
    let imported = import(&fixture.gpu, &domain, "x");
    let error = imported.buffer("x", READ | WRITE).unwrap_err();
    assert!(matches!(error, Error::ReadOnly { .. }), "{error}");
    assert!(error.to_string().contains("commit the version as mutable"), "{error}");
    assert_eq!(imported.buffer("x", READ | vk::BufferUsageFlags::STORAGE_BUFFER).unwrap().bytes(), 100);
    drop((imported, segment));
}

#[test]
fn needs_vulkan_buffers_outside_of_a_chunk_are_refused() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::new();
    let builder = domain.create("x", Place::Host).chunk_bytes(4096).mutable(false);
    let builder = builder.tensor("a", DType::U8, &[4096]).tensor("b", DType::U8, &[10]).tensor("none", DType::U8, &[0]);
    let mut build = builder.allocate().unwrap();
    build.as_mut_bytes("b").unwrap().fill(5);
    let segment = build.commit().unwrap();
    let imported = import(&fixture.gpu, &domain, "x");
    assert_eq!(imported.descriptors().chunks().len(), 2);
    let refused = |result: partywall_vulkan::Result<partywall_vulkan::Buffer>, why: &str| match result {
        Err(Error::Buffer { name, why: said }) => assert!(name == "x" && said.contains(why), "{said}"),
        other => panic!("{other:?}"),
    };
    refused(imported.buffer("c", READ), "it has no tensor \"c\"");
    refused(imported.buffer("none", READ), "are none");
    refused(imported.buffer_at(2, 0..1, READ), "it has 2 chunks, and no chunk 2");
    refused(imported.buffer_at(0, 4000..4097, READ), "not all within chunk 0 of 4096");
    refused(imported.buffer_at(0, 1..64, READ), "byte 1 is not a multiple of");
    let other = target(&domain, "copy", 10);
    let copy = import(&fixture.gpu, &domain, "copy");
    let from = imported.buffer("b", READ).unwrap();
    let to = copy.buffer("x", WRITE).unwrap();
    fixture.copy(&from, &to, None, None);
    fixture.finish();
    assert_eq!(other.tensor("x").unwrap().to_vec().unwrap(), [5; 10]);
    drop((from, to, imported, copy, segment));
}

#[test]
fn needs_vulkan_tensor_of_a_version_that_has_grown_is_found_in_its_chunk() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::new();
    let builder = domain.create("x", Place::Host).mutable(true).reserve(1 << 20).tensor("a", DType::U8, &[4096]);
    let segment = builder.allocate().unwrap().commit().unwrap();
    segment.grow().tensor("b", DType::U8, &[5000]).commit().unwrap();
    segment.tensor("b").unwrap().write_at(0, &[3; 5000]).unwrap();
    let imported = import(&fixture.gpu, &domain, "x");
    assert_eq!(imported.descriptors().chunks().len(), 2);
    let from = imported.buffer("b", READ).unwrap();
    let other = target(&domain, "copy", 5000);
    let copy = import(&fixture.gpu, &domain, "copy");
    let to = copy.buffer("x", WRITE).unwrap();
    fixture.copy(&from, &to, None, None);
    fixture.finish();
    assert_eq!(other.tensor("x").unwrap().to_vec().unwrap(), [3; 5000]);
    segment.grow().tensor("c", DType::U8, &[100]).extend("c", 90_000).commit().unwrap_err();
    drop((from, to, imported, copy));
}

// Holds 227.
#[test]
fn needs_vulkan_blocks_of_a_pool_are_copied_while_they_are_held() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::new();
    let pool = domain.pool("frames").place(Place::Host).blocks(3).block_bytes(1000).create().unwrap();
    let leases = domain.status().unwrap().leases;
    let imported = fixture.gpu.import(pool.descriptors().unwrap()).unwrap();
    assert_eq!(domain.status().unwrap().leases, leases + 1);
    let mut held: Vec<_> = (0..3).map(|_| pool.alloc(TIMEOUT).unwrap()).collect();
    for block in &mut held {
        let index = block.index() as u8;
        block.bytes_mut().unwrap().fill(10 + index);
    }
    let [first, second, third] = held.as_mut_slice() else { unreachable!() };
    let from = imported.block(first, READ).unwrap();
    let to = imported.block(third, WRITE).unwrap();
    assert_eq!((from.bytes(), to.bytes()), (1000, 1000));
    fixture.copy(&from, &to, None, None);
    fixture.finish();
    drop((from, to));
    assert_eq!(third.bytes().unwrap(), first.bytes().unwrap());
    assert_eq!(second.bytes().unwrap(), [10 + second.index() as u8; 1000]);

    // The block goes to another holder, and its bytes with it.
    let reference = held.pop().unwrap().offer().unwrap();
    let mut accepted = pool.accept(&reference).unwrap();
    let again = imported.block(&mut accepted, READ).unwrap();
    let target = target(&domain, "copy", 1000);
    let copy = import(&fixture.gpu, &domain, "copy");
    let to = copy.buffer("x", WRITE).unwrap();
    fixture.copy(&again, &to, None, None);
    fixture.finish();
    assert_eq!(target.tensor("x").unwrap().to_vec().unwrap(), held[0].bytes().unwrap());
    drop((again, to, copy, target));
    drop((accepted, held));

    // The import keeps the pool, and its end gives the lease back.
    drop(pool);
    assert!(domain.pool("frames").open().is_ok());
    drop(imported);
    eventually("the pool ended with its import", || domain.pool("frames").open().is_err());
}

// Holds 227.
#[test]
fn needs_vulkan_only_blocks_of_the_imported_pool_become_buffers() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::new();
    let pool = |name: &str| domain.pool(name).place(Place::Host).blocks(2).block_bytes(512).create().unwrap();
    let (frames, others) = (pool("frames"), pool("others"));
    let imported = fixture.gpu.import(frames.descriptors().unwrap()).unwrap();
    for refused in [imported.buffer("blocks", READ), imported.buffer_at(0, 0..512, READ)] {
        let error = refused.unwrap_err();
        assert!(matches!(&error, Error::Buffer { name, .. } if name == "frames"), "{error}");
        assert!(error.to_string().contains("only those that this process holds may be used"), "{error}");
    }
    let mut foreign = others.alloc(TIMEOUT).unwrap();
    let error = imported.block(&mut foreign, READ).unwrap_err();
    let said = error.to_string();
    assert!(matches!(error, Error::Partywall(partywall::Error::Mismatch(_))), "{said}");
    assert!(said.contains("\"others\"") && said.contains("\"frames\""), "{said}");
    let segment = target(&domain, "x", 512);
    let plain = import(&fixture.gpu, &domain, "x");
    assert!(matches!(plain.block(&mut foreign, READ).unwrap_err(), Error::Partywall(_)));
    let error = domain.descriptors("frames", TIMEOUT).unwrap_err();
    assert!(matches!(error, partywall::Error::Mismatch(_)), "{error}");
    drop((plain, segment, imported, foreign));
}

// Holds 227.
#[test]
fn needs_vulkan_sample_becomes_another_topics_sample() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::new();
    let topic = |name: &str| {
        let topic = domain.topic(name).place(Place::Host).dtype(DType::U8).max_bytes(300).depth(4).publishers(1);
        topic.subscribers(1).create().unwrap()
    };
    let (scenes, tiles) = (topic("scenes"), topic("tiles"));
    let subscriber = scenes.subscribe(partywall::Policy::Block).join().unwrap();
    let seen = tiles.subscribe(partywall::Policy::Block).join().unwrap();
    let from = fixture.gpu.import(scenes.descriptors().unwrap()).unwrap();
    let to = fixture.gpu.import(tiles.descriptors().unwrap()).unwrap();
    let (source, target) = (scenes.publisher().unwrap(), tiles.publisher().unwrap());
    for round in 0..20_u8 {
        let mut loan = source.loan(DType::U8, &[300], TIMEOUT).unwrap();
        loan.bytes_mut().unwrap().fill(round);
        loan.filled().publish(TIMEOUT).unwrap();
        let sample = subscriber.recv(TIMEOUT).unwrap();
        let mut loan = target.loan(DType::U8, &[300], TIMEOUT).unwrap();
        let error = from.sample(&sample, READ | WRITE).unwrap_err();
        assert!(matches!(error, Error::ReadOnly { .. }), "{error}");
        let read = from.sample(&sample, READ).unwrap();
        let written = to.loan(&mut loan, WRITE).unwrap();
        fixture.copy(&read, &written, None, None);
        fixture.finish();
        drop((read, written));
        drop(sample);
        loan.filled().publish(TIMEOUT).unwrap();
        assert_eq!(seen.recv(TIMEOUT).unwrap().bytes().unwrap(), [round; 300]);
    }
    drop((from, to));
}

#[test]
fn needs_vulkan_device_without_the_extension_is_named() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::with(&[khr::external_memory_fd::NAME]);
    let segment = target(&domain, "x", 100);
    let leases = domain.status().unwrap().leases;
    let error = fixture.gpu.import(domain.descriptors("x", TIMEOUT).unwrap()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { missing: "VK_EXT_external_memory_host", .. }), "{error}");
    assert!(error.to_string().contains("llvmpipe"), "{error}");
    assert_eq!(domain.status().unwrap().leases, leases);
    drop(segment);
}

// Holds 229.
#[test]
fn needs_vulkan_memory_of_another_gpu_is_refused() {
    simulated("memory::needs_vulkan_memory_of_another_gpu_is_refused", |world| {
        let domain = world.connect();
        let owner = partywall::gpu::devices().unwrap()[0].uuid().unwrap();
        let builder = domain.create("x", Place::Gpu(owner)).tensor("x", DType::U8, &[100]);
        let _segment = builder.allocate().unwrap().commit().unwrap();
        let gpu = Gpu::open(None).unwrap();
        let error = gpu.import(domain.descriptors("x", TIMEOUT).unwrap()).unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, Error::WrongGpu { .. }), "{said}");
        assert!(said.contains(&owner.to_string()) && said.contains(&gpu.uuid().to_string()), "{said}");
        let error = Gpu::open(Some(owner)).unwrap_err();
        assert!(matches!(error, Error::NoDevice { .. }) && error.to_string().contains(gpu.name()), "{error}");
    });
}

#[test]
fn needs_vulkan_missing_driver_is_said_with_what_to_install() {
    let world = World::new();
    world.play_with("without a driver", |command| _ = command.env("VK_DRIVER_FILES", "/nothing.json")).finish();
}
