// Holds 66, 69.
//! Publications are read in place.

use std::{sync::Arc, time::Duration};

use partywall::{
    DType, Error,
    cuda::{Access, DeviceBuffer, ForeignMemory, Mapping, PhysicalMemory, PinnedBuffer, PointerKind},
    error::{Denied, DeviceFault, InvalidArgument, NotFound},
    info::Enforcement,
};
use partywall_shm::TableError;

use super::world::{TIMEOUT, buffer, gpu, kept_by_the_test, kind_of, publication, publish, simulated, value_of};

#[test]
fn reader_in_another_process_sees_the_publication_on_the_simulated_gpu() {
    simulated("publish::reader_in_another_process_sees_the_publication_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let publisher = world.play("publisher");
        let opened = domain.open("theirs", TIMEOUT).unwrap();
        assert_eq!(value_of(&opened, "x"), 5);
        assert_eq!((opened.kind(), opened.is_kept(), opened.is_writable()), ("legacy", false, false));
        let promises = opened.promises();
        assert_eq!(promises.read_only, Enforcement::Convention);
        assert!(!promises.outlives_publisher && !promises.hides_neighbours);
        let denied = opened.tensor("x").unwrap().write_at(0, &[1]);
        assert!(matches!(denied, Err(Error::Denied(Denied::ReadOnly { .. }))), "{denied:?}");

        let info = domain.inspect("theirs").unwrap();
        assert_eq!((info.version.committer, info.chunks.len()), (publisher.pid(), 1));
        let status = domain.status().unwrap();
        assert!(status.simulated && status.fds == 0 && status.bytes.is_empty(), "{status:?}");
    });
}

#[test]
fn second_open_in_a_process_shares_the_mapping_on_the_simulated_gpu() {
    simulated("publish::second_open_in_a_process_shares_the_mapping_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let _publisher = world.play("publisher");
        let first = domain.open("theirs", TIMEOUT).unwrap();
        let second = domain.open("theirs", TIMEOUT).unwrap();
        let address = |segment: &partywall::Segment| segment.tensor("x").unwrap().device().unwrap().device_ptr();
        assert_eq!(address(&first), address(&second));
        drop(first);
        assert_eq!(value_of(&second, "x"), 5, "the other one still has it");
    });
}

// Holds 67.
#[test]
fn publisher_opens_its_publication_at_the_same_addresses_on_the_simulated_gpu() {
    simulated("publish::publisher_opens_its_publication_at_the_same_addresses_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let other = world.connect();
        let memory = buffer(&gpu(&domain), 4096, 7);
        let address = memory.as_slice().device_ptr();
        let freed = Arc::downgrade(&memory);
        let memory = ForeignMemory::try_from(memory).unwrap();
        let published = domain.publish("ours").tensor("x", DType::U8, &[4096], &memory).commit().unwrap();
        drop(memory);
        let opened = other.open("ours", Duration::ZERO).unwrap();
        assert_eq!(opened.tensor("x").unwrap().device().unwrap().device_ptr(), address);
        drop(published);
        assert_eq!(value_of(&opened, "x"), 7, "a reader in this process keeps it too");
        assert!(freed.upgrade().is_some());
        drop(opened);
        assert!(freed.upgrade().is_none(), "no owner is left");
    });
}

// Holds 247.
#[test]
fn left_publication_keeps_its_memory_while_it_is_the_latest_on_the_simulated_gpu() {
    simulated("publish::left_publication_keeps_its_memory_while_it_is_the_latest_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let other = world.connect();
        let mut freed = Vec::new();
        for value in [1, 2] {
            let memory = buffer(&gpu(&domain), 4096, value);
            freed.push(Arc::downgrade(&memory));
            let memory = ForeignMemory::try_from(memory).unwrap();
            domain.publish("ours").tensor("x", DType::U8, &[4096], &memory).commit().unwrap().leave_name().unwrap();
        }
        partywall_harness::eventually("the first is superseded", || freed[0].upgrade().is_none());
        assert_eq!(value_of(&other.open("ours", Duration::ZERO).unwrap(), "x"), 2);
        assert!(freed[1].upgrade().is_some());
        other.remove("ours").unwrap();
        partywall_harness::eventually("the second is removed", || freed[1].upgrade().is_none());

        let memory = buffer(&gpu(&domain), 4096, 3);
        freed.push(Arc::downgrade(&memory));
        let memory = ForeignMemory::try_from(memory).unwrap();
        domain.publish("ours").tensor("x", DType::U8, &[4096], &memory).commit().unwrap().leave_name().unwrap();
        drop(memory);
        domain.withdraw_names().unwrap();
        partywall_harness::eventually("the third is withdrawn", || freed[2].upgrade().is_none());
    });
}

#[test]
fn publisher_uses_its_publication_on_its_own_gpu_only_on_the_simulated_gpu() {
    simulated("publish::publisher_uses_its_publication_on_its_own_gpu_only_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let _published = publish(&domain, "ours", 7);
        let other = partywall::gpu::devices().unwrap()[1].uuid().unwrap();
        for allow in [false, true] {
            let refused = domain.opener("ours").device(other).allow_peer(allow).open();
            assert!(matches!(refused, Err(Error::DeviceFault(DeviceFault::Remote { .. }))), "{refused:?}");
        }
    });
}

#[test]
fn tensors_keep_their_addresses_on_the_simulated_gpu() {
    simulated("publish::tensors_keep_their_addresses_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let one = buffer(&gpu, 8192, 1);
        let two = buffer(&gpu, 4096, 2);
        let inside = kept_by_the_test(&gpu, one.as_slice().device_ptr() + 4096);
        gpu.stream().copy_from_host(one.slice(4096, 4096).unwrap(), &[3; 4096]).unwrap();
        let first = ForeignMemory::try_from(one.clone()).unwrap();
        let publication = domain.publish("many").tensor("begin", DType::U8, &[4096], &first);
        let publication = publication.tensor_strided("end", DType::U8, &[2, 8], &[64, 1], &inside);
        let publication = publication.tensor("empty", DType::F32, &[0], &inside).metadata("made by", "a test");
        let publication = publication.tensor("other", DType::U8, &[4096], &ForeignMemory::try_from(two).unwrap());
        let _published = publication.commit().unwrap();

        let mut reader = world.play("reader of many");
        assert_eq!(reader.line(), "1 3 2");
        let info = domain.inspect("many").unwrap();
        assert_eq!(info.chunks, [8192, 4096], "one an allocation");
        assert_eq!(info.table.find("end").unwrap().offset(), 4096);
    });
}

#[test]
fn mutable_memory_is_written_by_its_readers_on_the_simulated_gpu() {
    simulated("publish::mutable_memory_is_written_by_its_readers_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let published = publication(&domain, "shared", 1).mutable(true).commit().unwrap();
        let mut writer = world.play("writer");
        assert_eq!(writer.line(), "written");
        assert_eq!(published.tensor("x").unwrap().to_vec().unwrap()[..2], [9, 1]);
        let frozen = publish(&domain, "frozen", 1);
        assert!(matches!(domain.opener("frozen").read_write().open(), Err(Error::Denied(Denied::ReadOnly { .. }))));
        drop(frozen);
    });
}

#[test]
fn memory_without_a_handle_is_refused_by_its_kind_on_the_simulated_gpu() {
    simulated("publish::memory_without_a_handle_is_refused_by_its_kind_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let _publisher = world.play("publisher");
        let imported = domain.open("theirs", TIMEOUT).unwrap();
        let granularity = PhysicalMemory::granularity(gpu.context()).unwrap();
        let vmm = PhysicalMemory::create(gpu.context(), granularity).unwrap();
        let vmm = Mapping::new(vmm, Access::ReadWrite).unwrap();
        let pinned = PinnedBuffer::new(gpu.context(), 4096).unwrap();
        let plain = vec![0_u8; 4096];
        let freed = DeviceBuffer::new(gpu.context(), 4096).unwrap().as_slice().device_ptr();
        for (address, kind) in [
            (imported.tensor("x").unwrap().device().unwrap().device_ptr(), PointerKind::Imported),
            (vmm.device_ptr(), PointerKind::Vmm),
            (pinned.as_ptr() as u64, PointerKind::Pinned),
            (plain.as_ptr() as u64, PointerKind::Unknown),
            (freed, PointerKind::Unknown),
        ] {
            assert_eq!(kind_of(&gpu, address), kind);
            let memory = kept_by_the_test(&gpu, address);
            match domain.publish("x").tensor("t", DType::U8, &[16], &memory).commit() {
                Err(Error::DeviceFault(DeviceFault::NotShareable { tensor, address: at, kind: found })) => {
                    assert_eq!((tensor.as_str(), at, found), ("t", address, kind));
                }
                other => panic!("{kind:?}: {other:?}"),
            }
        }
        assert!(matches!(domain.open("x", Duration::ZERO), Err(Error::NotFound(NotFound::Name { .. }))));
    });
}

#[test]
fn invalid_publication_is_refused_on_the_simulated_gpu() {
    simulated("publish::invalid_publication_is_refused_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let memory = ForeignMemory::try_from(buffer(&gpu(&domain), 4096, 1)).unwrap();
        let tensor = |bytes| domain.publish("x").tensor("t", DType::U8, &[bytes], &memory);
        assert!(
            matches!(tensor(4097).commit(), Err(Error::InvalidArgument(InvalidArgument::Table { .. }))),
            "longer than its allocation"
        );
        assert!(matches!(tensor(1).kept(true).commit(), Err(Error::Denied(Denied::Keeping { .. }))));
        let twice = tensor(1).tensor("t", DType::U8, &[1], &memory).commit();
        assert!(
            matches!(
                twice,
                Err(Error::InvalidArgument(InvalidArgument::Table { source: TableError::Duplicate(_), .. }))
            ),
            "{twice:?}"
        );
        assert!(
            matches!(domain.publish("x").commit(), Err(Error::InvalidArgument(InvalidArgument::Range { .. }))),
            "no tensor, no place"
        );
        assert!(matches!(domain.publish("a b").commit(), Err(Error::InvalidArgument(InvalidArgument::Name { .. }))));
        let elsewhere = domain.gpu(partywall::gpu::devices().unwrap()[1].uuid().unwrap()).unwrap();
        let elsewhere = ForeignMemory::try_from(buffer(&elsewhere, 4096, 1)).unwrap();
        let both = tensor(1).tensor("u", DType::U8, &[1], &elsewhere).commit();
        assert!(matches!(both, Err(Error::InvalidArgument(InvalidArgument::Range { .. }))), "{both:?}");
        assert_eq!(domain.names().unwrap(), []);

        let _published = publish(&domain, "x", 1);
        assert!(matches!(tensor(1).if_absent(true).commit(), Err(Error::Denied(Denied::NameExists { .. }))));
    });
}
