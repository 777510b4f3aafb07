//! Heaps: blocks for other allocators, and publications of tensors in them.

use std::{io::Read, sync::Arc, time::Duration};

use partywall::{
    DType, Domain, Error, Heap, Segment,
    cuda::{Access, ForeignMemory},
    error::{Denied, Gone, InvalidArgument, LimitReached, NotFound, Unreachable},
    info::Enforcement,
};
use partywall_harness::eventually;

use super::{
    deaths::in_a_child,
    left::forbid_threads,
    world::{TIMEOUT, buffer, gpu, simulated, value_of},
};

const MIB: u64 = 1 << 20;

fn heap(domain: &Domain, limit: u64) -> Heap {
    domain.heap("test", partywall::gpu::devices().unwrap()[0].uuid().unwrap(), limit).unwrap()
}

/// Returns the memory at an address of a heap, with what keeps it.
#[allow(unsafe_code)]
fn tensor(heap: &Heap, address: u64, keep: Arc<()>) -> ForeignMemory {
    // SAFETY: the tests free no block whose memory is used; a heap keeps what is published.
    unsafe { ForeignMemory::new(heap.gpu().context(), address, keep) }.unwrap()
}

/// Fills bytes at an address of a heap.
#[allow(unsafe_code)]
fn fill(heap: &Heap, address: u64, bytes: u64, value: u8) {
    // SAFETY: the range lies in a block of the test.
    let slice = unsafe { partywall::cuda::DeviceSlice::from_raw(address, bytes, Access::ReadWrite) };
    heap.gpu().stream().copy_from_host(slice, &vec![value; bytes as usize]).unwrap();
}

/// Publishes 4 KiB of `value` in a new block, kept by `keep`. Returns the address of the block, too.
fn publish(domain: &Domain, heap: &Heap, name: &str, value: u8, keep: &Arc<()>) -> (Segment, u64) {
    let address = heap.allocate(MIB).unwrap();
    fill(heap, address, 4096, value);
    let memory = tensor(heap, address, keep.clone());
    let published = domain.publish(name).tensor("x", DType::U8, &[4096], &memory).commit().unwrap();
    (published, address)
}

#[allow(clippy::print_stdout)] // it is how they talk to the test
pub(crate) fn play(role: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    let wait = || {
        println!("\nready");
        let _ = std::io::stdin().read(&mut [0]);
    };
    match role {
        "publisher" => {
            let heap = heap(&domain, 64 * MIB);
            let address = heap.allocate(MIB).unwrap();
            fill(&heap, address, 4096, 5);
            let memory = tensor(&heap, address, Arc::new(()));
            let publication = |name| domain.publish(name).tensor("x", DType::U8, &[4096], &memory);
            let _owned = publication("owned").commit().unwrap();
            let _kept = publication("kept").kept(true).commit().unwrap();
            wait();
        }
        "reader" => {
            let opened = domain.open("theirs", TIMEOUT).unwrap();
            assert_eq!(value_of(&opened, "x"), 5);
            wait();
        }
        "evictor" => {
            println!("\nready");
            domain.evict(std::os::unix::process::parent_id(), false).unwrap();
            println!("evicted");
        }
        other => panic!("no role is called {other:?}"),
    }
}

// Holds 73.
#[test]
fn tensors_in_a_heap_are_read_where_they_lie_on_the_simulated_gpu() {
    simulated("heaps::tensors_in_a_heap_are_read_where_they_lie_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let heap = heap(&domain, 64 * MIB);
        let one = heap.allocate(3 * MIB).unwrap();
        let two = heap.allocate(MIB).unwrap();
        fill(&heap, one, 3 * MIB, 1);
        fill(&heap, two, MIB, 2);
        let keep = Arc::new(());
        let publication = domain.publish("ours");
        let publication = publication.tensor("inside", DType::U8, &[4096], &tensor(&heap, one + MIB, keep.clone()));
        let publication = publication.tensor("other", DType::U8, &[4096], &tensor(&heap, two, keep));
        let published = publication.commit().unwrap();

        let opened = world.connect().open("ours", Duration::ZERO).unwrap();
        assert_eq!((value_of(&opened, "inside"), value_of(&opened, "other")), (1, 2));
        assert_eq!((opened.kind(), opened.is_writable()), ("live", false));
        let promises = opened.promises();
        assert_eq!(promises.read_only, Enforcement::Convention);
        assert!(promises.outlives_publisher && !promises.hides_neighbours);
        let range = opened.tensor("inside").unwrap().device().unwrap();
        assert!(!range.is_writable() && range.device_ptr() != one + MIB, "a mapping of its own, for reading");
        let info = domain.inspect("ours").unwrap();
        assert_eq!(info.chunks, [heap.bytes()], "both blocks lie in one chunk");
        assert_eq!(info.table.find("inside").unwrap().offset(), MIB);

        fill(&heap, two, 4096, 3);
        assert_eq!(value_of(&opened, "other"), 3, "nothing was copied or frozen");
        let own = published.tensor("inside").unwrap().device().unwrap();
        assert!(own.device_ptr() == one + MIB && !own.is_writable());
    });
}

// Holds 74.
#[test]
fn publication_outlives_its_killed_publisher_on_the_simulated_gpu() {
    simulated("heaps::publication_outlives_its_killed_publisher_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let mut publisher = world.play("heap: publisher");
        let opened = domain.open("owned", Duration::ZERO).unwrap();
        publisher.kill();
        opened.wait_withdrawn(TIMEOUT).unwrap();
        assert_eq!(value_of(&opened, "x"), 5);
        let refused = domain.open("owned", Duration::ZERO);
        assert!(matches!(refused, Err(Error::NotFound(NotFound::Name { .. }))), "{refused:?}");
        assert_eq!(value_of(&domain.open("kept", Duration::ZERO).unwrap(), "x"), 5);
    });
}

// Holds 75.
#[test]
fn owners_stay_until_the_last_lease_has_ended_on_the_simulated_gpu() {
    simulated("heaps::owners_stay_until_the_last_lease_has_ended_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let heap = heap(&domain, 64 * MIB);
        for (leave, kill) in [(false, false), (false, true), (true, false), (true, true)] {
            let keep = Arc::new(());
            let (published, _) = publish(&domain, &heap, "theirs", 5, &keep);
            let mut reader = world.play("heap: reader");
            if leave {
                published.leave_name().unwrap();
                assert_eq!(Arc::strong_count(&keep), 2, "the name exists");
                domain.withdraw_names().unwrap();
            } else {
                published.release().unwrap();
            }
            assert!(domain.open("theirs", Duration::ZERO).is_err());
            // A second publication of the name does not end the first one.
            let (second, _) = publish(&domain, &heap, "theirs", 6, &Arc::new(()));
            drop(second);
            assert_eq!(Arc::strong_count(&keep), 2, "the reader still has the version");
            if kill {
                reader.kill();
            } else {
                drop(reader);
            }
            eventually("the owner is dropped", || Arc::strong_count(&keep) == 1);
        }
        let keep = Arc::new(());
        drop(publish(&domain, &heap, "theirs", 5, &keep));
        assert_eq!(Arc::strong_count(&keep), 1, "without readers the owner goes with the segment");
    });
}

// Holds 71.
#[test]
fn owners_outlast_a_thread_that_cannot_be_started_on_the_simulated_gpu() {
    simulated("heaps::owners_outlast_a_thread_that_cannot_be_started_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let heap = heap(&domain, 64 * MIB);
        let keep = Arc::new(());
        let (published, _) = publish(&domain, &heap, "theirs", 5, &keep);
        let reader = world.play("heap: reader");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                forbid_threads();
                published.release().unwrap();
            });
        });
        assert_eq!(Arc::strong_count(&keep), 2, "a reader has the version");
        drop(reader);
        eventually("the owner is dropped", || Arc::strong_count(&keep) == 1);
    });
}

// Holds 75.
#[test]
fn broker_that_ends_ends_the_leases_on_the_simulated_gpu() {
    simulated("heaps::broker_that_ends_ends_the_leases_on_the_simulated_gpu", |_| {
        let mut world = partywall_harness::World::new();
        let domain = world.connect();
        let heap = heap(&domain, 64 * MIB);
        let keep = Arc::new(());
        let (published, _) = publish(&domain, &heap, "theirs", 5, &keep);
        let _reader = world.play("heap: reader");
        published.release().unwrap();
        assert_eq!(Arc::strong_count(&keep), 2);
        world.end_broker();
        eventually("the owner is dropped", || Arc::strong_count(&keep) == 1);
    });
}

// Holds 75.
#[test]
fn freed_block_is_not_used_again_while_it_is_published_on_the_simulated_gpu() {
    simulated("heaps::freed_block_is_not_used_again_while_it_is_published_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let heap = heap(&domain, 2 * MIB);
        let (published, address) = publish(&domain, &heap, "ours", 5, &Arc::new(()));
        assert!(Heap::contains(address) && Heap::contains(address + MIB - 1) && !Heap::contains(address + MIB));
        assert!(Heap::free(address) && !Heap::free(address));
        assert!(!Heap::contains(address));
        let other = heap.allocate(MIB).unwrap();
        let full = heap.allocate(MIB);
        assert!(matches!(full, Err(Error::LimitReached(LimitReached::Heap { .. }))), "{full:?}");
        assert_eq!(value_of(&published, "x"), 5);
        drop(published);
        assert_eq!(heap.allocate(MIB).unwrap(), address);
        assert_ne!(other, address);
    });
}

// Holds 76.
#[test]
fn chunks_go_back_to_the_gpu_with_their_last_block_on_the_simulated_gpu() {
    simulated("heaps::chunks_go_back_to_the_gpu_with_their_last_block_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let free = || gpu.context().memory_info().unwrap().free;
        let before = free();
        let heap = heap(&domain, 256 * MIB);
        assert_eq!((heap.bytes(), free()), (0, before));
        let small: Vec<_> = (0..8).map(|_| heap.allocate(4 * MIB).unwrap()).collect();
        assert_eq!((heap.bytes(), free()), (32 * MIB, before - 32 * MIB), "one chunk");
        let large = heap.allocate(100 * MIB).unwrap();
        assert_eq!(heap.bytes(), 132 * MIB);
        assert!(Heap::free(large));
        assert_eq!(heap.bytes(), 32 * MIB);
        // On any thread, and after the connection has ended.
        drop((domain, heap));
        std::thread::spawn(move || small.into_iter().for_each(|address| assert!(Heap::free(address)))).join().unwrap();
        assert_eq!(free(), before);
    });
}

// Holds 76.
#[test]
fn limit_of_a_heap_is_kept_on_the_simulated_gpu() {
    simulated("heaps::limit_of_a_heap_is_kept_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let heap = heap(&domain, 39 * MIB + 1);
        assert_eq!(heap.limit(), 40 * MIB, "whole allocation units");
        let first = heap.allocate(30 * MIB).unwrap();
        let rest = heap.allocate(8 * MIB).unwrap();
        for bytes in [3 * MIB, 41 * MIB, u64::MAX] {
            match heap.allocate(bytes) {
                Err(Error::LimitReached(LimitReached::Heap { name, asked, taken, limit })) => {
                    assert_eq!((name.as_str(), taken, limit), ("test", 40 * MIB, 40 * MIB));
                    assert!(asked >= bytes, "{asked}");
                }
                other => panic!("{other:?}"),
            }
        }
        heap.allocate(2 * MIB).unwrap();
        assert!(Heap::free(first));
        assert_eq!(heap.allocate(30 * MIB).unwrap(), first);
        assert!(Heap::free(rest));
        assert_eq!(heap.allocate(0).unwrap() % 512, 0, "no block is empty");
        assert!(matches!(self::heap(&domain, 0).allocate(1), Err(Error::LimitReached(LimitReached::Heap { .. }))));
    });
}

// Holds 73.
#[test]
fn many_blocks_fit_one_version_on_the_simulated_gpu() {
    simulated("heaps::many_blocks_fit_one_version_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let heap = heap(&domain, 1 << 30);
        let keep = Arc::new(());
        let mut publication = domain.publish("model");
        for layer in 0_u64..200 {
            let address = heap.allocate(3 * MIB).unwrap();
            fill(&heap, address, 64, layer as u8);
            let memory = tensor(&heap, address, keep.clone());
            publication = publication.tensor(&format!("{layer}"), DType::U8, &[64], &memory);
        }
        let published = publication.commit().unwrap();
        assert!(domain.inspect("model").unwrap().chunks.len() == 20, "ten in each");
        let opened = world.connect().open("model", Duration::ZERO).unwrap();
        for layer in [0_u64, 150, 199] {
            assert_eq!(value_of(&opened, &format!("{layer}")), layer as u8);
        }
        drop(published);
    });
}

// Holds 76.
#[test]
fn threads_share_a_heap_on_the_simulated_gpu() {
    simulated("heaps::threads_share_a_heap_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let heap = heap(&domain, 64 * MIB);
        std::thread::scope(|scope| {
            for value in 1..=4 {
                let heap = &heap;
                scope.spawn(move || {
                    for _ in 0..200 {
                        let address = heap.allocate(MIB).unwrap();
                        fill(heap, address, 64, value);
                        let mut found = [0; 64];
                        let memory = tensor(heap, address, Arc::new(()));
                        let pieces = memory.pieces(64).unwrap();
                        heap.gpu().stream().copy_to_host(&mut found, pieces[0]).unwrap();
                        assert_eq!(found, [value; 64], "nobody else has the block");
                        assert!(Heap::free(address));
                    }
                });
            }
        });
        assert_eq!(heap.bytes(), 0);
    });
}

// Holds 73.
#[test]
fn publication_is_within_heaps_or_outside_on_the_simulated_gpu() {
    simulated("heaps::publication_is_within_heaps_or_outside_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let one = heap(&domain, 64 * MIB);
        let two = heap(&domain, 64 * MIB);
        let keep = Arc::new(());
        let inside = tensor(&one, one.allocate(MIB).unwrap(), keep.clone());
        let beside = tensor(&two, two.allocate(MIB).unwrap(), keep);
        let outside = ForeignMemory::try_from(buffer(&gpu(&domain), 4096, 1)).unwrap();
        let both = domain.publish("x").tensor("a", DType::U8, &[16], &inside).tensor("b", DType::U8, &[16], &outside);
        match both.commit() {
            Err(Error::InvalidArgument(InvalidArgument::Range { tensor, why })) => {
                assert_eq!(tensor, "b");
                assert!(why.contains("in no heap"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        let kept = domain.publish("x").tensor("b", DType::U8, &[16], &outside).kept(true).commit();
        assert!(matches!(kept, Err(Error::Denied(Denied::Keeping { .. }))), "{kept:?}");
        let long = domain.publish("x").tensor("a", DType::U8, &[64 * MIB], &inside).commit();
        assert!(matches!(long, Err(Error::InvalidArgument(InvalidArgument::Table { .. }))), "{long:?}");
        let heaps = domain.publish("x").tensor("a", DType::U8, &[16], &inside).tensor("c", DType::U8, &[16], &beside);
        let published = heaps.commit().unwrap();
        assert_eq!(domain.inspect("x").unwrap().chunks.len(), 2);
        drop(published);
    });
}

#[test]
fn readers_write_a_mutable_publication_on_the_simulated_gpu() {
    simulated("heaps::readers_write_a_mutable_publication_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let heap = heap(&domain, 64 * MIB);
        let address = heap.allocate(MIB).unwrap();
        fill(&heap, address, 4096, 1);
        let memory = tensor(&heap, address, Arc::new(()));
        let publication = domain.publish("ours").tensor("x", DType::U8, &[4096], &memory).mutable(true);
        let published = publication.commit().unwrap();
        let opened = domain.opener("ours").read_write().open().unwrap();
        opened.tensor("x").unwrap().write_at(0, &[9]).unwrap();
        assert_eq!(published.tensor("x").unwrap().to_vec().unwrap()[..2], [9, 1]);
    });
}

#[test]
fn pool_of_blocks_lives_in_a_heap_on_the_simulated_gpu() {
    simulated("heaps::pool_of_blocks_lives_in_a_heap_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let heap = heap(&domain, 64 * MIB);
        heap.allocate(MIB).unwrap();
        let memory = tensor(&heap, heap.allocate(MIB).unwrap(), Arc::new(()));
        let pool = domain.pool("blocks").blocks(4).block_bytes(1024).create_in(&memory).unwrap();
        let block = pool.alloc(TIMEOUT).unwrap();
        let range = block.device().unwrap();
        range.copy_from_host(range.gpu().stream(), &[7; 1024]).unwrap();
        let accepting = world.connect().pool("blocks").open().unwrap();
        let block = accepting.accept(&block.offer().unwrap()).unwrap();
        let range = block.device().unwrap();
        let mut found = [0; 1024];
        range.copy_to_host(range.gpu().stream(), &mut found).unwrap();
        assert_eq!(found, [7; 1024]);
    });
}

// Holds 76.
#[test]
fn forked_child_has_no_heap_on_the_simulated_gpu() {
    simulated("heaps::forked_child_has_no_heap_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let heap = heap(&domain, 64 * MIB);
        let (published, address) = publish(&domain, &heap, "ours", 5, &Arc::new(()));
        assert!(in_a_child(|| {
            if Heap::free(address) || Heap::contains(address) {
                return Err("the child has the parent's block".into());
            }
            if heap.bytes() != 0 {
                return Err(format!("{heap:?}"));
            }
            match heap.allocate(MIB) {
                Err(Error::Unreachable(Unreachable::Forked { .. })) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        }));
        assert!(Heap::contains(address));
        assert_eq!(value_of(&published, "x"), 5);
    });
}

// Holds 75.
#[test]
fn evicted_publisher_keeps_what_may_be_read_on_the_simulated_gpu() {
    simulated("heaps::evicted_publisher_keeps_what_may_be_read_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let heap = heap(&domain, 64 * MIB);
        let keep = Arc::new(());
        let (published, _) = publish(&domain, &heap, "theirs", 5, &keep);
        let mut reader = world.play("heap: reader");
        let mut evictor = world.play("heap: evictor");
        assert_eq!(evictor.line(), "evicted");
        let refused = published.release();
        assert!(matches!(refused, Err(Error::Gone(Gone::Evicted { .. }))), "{refused:?}");
        reader.kill();
        assert_eq!(Arc::strong_count(&keep), 2, "this process cannot know");
    });
}
