//! Memory of other allocators, and publications of it.

use std::{sync::Arc, time::Duration};

use partywall::{
    DType, Domain, Gpu, Publication, Segment,
    cuda::{DeviceBuffer, ForeignMemory, PointerInfo},
};

pub(crate) use partywall_harness::{ROLE, World, simulated};

/// Much longer than any wait of a test.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// The first GPU of this process.
pub(crate) fn gpu(domain: &Domain) -> Arc<Gpu> {
    domain.gpu(partywall::gpu::devices().unwrap()[0].uuid().unwrap()).unwrap()
}

/// Returns memory of `cuMemAlloc` in which every byte is `value`.
pub(crate) fn buffer(gpu: &Gpu, bytes: u64, value: u8) -> Arc<DeviceBuffer> {
    let buffer = Arc::new(DeviceBuffer::new(gpu.context(), bytes).unwrap());
    gpu.stream().copy_from_host(buffer.as_slice(), &vec![value; bytes as usize]).unwrap();
    buffer
}

/// Returns a publication of 4 KiB of `value` as the tensor `x`.
pub(crate) fn publication(domain: &Domain, name: &str, value: u8) -> Publication {
    let memory = ForeignMemory::try_from(buffer(&gpu(domain), 4096, value)).unwrap();
    domain.publish(name).tensor("x", DType::U8, &[4096], &memory)
}

pub(crate) fn publish(domain: &Domain, name: &str, value: u8) -> Segment {
    publication(domain, name, value).commit().unwrap()
}

/// Returns the byte that fills a tensor.
pub(crate) fn value_of(segment: &Segment, tensor: &str) -> u8 {
    let bytes = segment.tensor(tensor).unwrap().to_vec().unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{bytes:?}");
    bytes[0]
}

/// Returns memory at an address that the test itself keeps valid.
#[allow(unsafe_code)]
pub(crate) fn kept_by_the_test(gpu: &Gpu, address: u64) -> ForeignMemory {
    // SAFETY: the tests drop the publication before they free the memory.
    unsafe { ForeignMemory::new(gpu.context(), address, Arc::new(())) }.unwrap()
}

/// Returns what the driver reports about an address.
pub(crate) fn kind_of(gpu: &Gpu, address: u64) -> partywall::cuda::PointerKind {
    PointerInfo::of(gpu.context(), address).unwrap().kind
}
