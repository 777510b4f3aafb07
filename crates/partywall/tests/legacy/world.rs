//! A process on the simulated driver with a broker of its own, and other processes that play a role in the test.

use std::{process::Command, sync::Arc, thread::JoinHandle, time::Duration};

use partywall::{
    DType, Domain, Gpu, Publication, Segment,
    cuda::{DeviceBuffer, Driver, ForeignMemory, PointerInfo},
};
use partywall_broker::{Broker, Config, StopHandle};
use partywall_harness::{Running, simulated_driver};

pub(crate) const ROLE: &str = "PARTYWALL_TEST_ROLE";

/// Far beyond anything that a test waits for.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a test's body in a process on the simulated driver: this program again, which chooses its driver once.
pub(crate) fn simulated(test: &str, body: impl FnOnce(&World)) {
    if std::env::var_os(Driver::LIBRARY_VARIABLE).is_none() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).env(Driver::LIBRARY_VARIABLE, simulated_driver());
        let output = Running::spawn(command.env("SIMCUDA_DEVICES", "2")).wait();
        let text = output.text();
        assert!(output.code == Some(0) && text.contains("1 passed"), "{text}\n{}", output.stderr);
        return;
    }
    body(&World::new());
}

/// A broker in a thread, with a socket of its own.
pub(crate) struct World {
    directory: tempfile::TempDir,
    stop: StopHandle,
    broker: Option<JoinHandle<()>>,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Config::new(directory.path().join("sockets/test.sock"), "test", partywall::VERSION);
        config.idle_exit = None;
        let broker = Broker::bind(config).unwrap();
        let stop = broker.stop_handle().unwrap();
        let broker = std::thread::spawn(move || {
            broker.run().unwrap();
        });
        Self { directory, stop, broker: Some(broker) }
    }

    pub(crate) fn connect(&self) -> Domain {
        Domain::options().socket(self.directory.path().join("sockets/test.sock")).start(false).connect().unwrap()
    }

    /// Starts this test program as another process that plays `role`, and waits until it is ready.
    pub(crate) fn play(&self, role: &str) -> Running {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "role", "--nocapture"]).env(ROLE, role);
        let mut actor =
            Running::spawn(command.env("PARTYWALL_SOCKET", self.directory.path().join("sockets/test.sock")));
        while actor.line() != "ready" {}
        actor
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(broker) = self.broker.take() {
            broker.join().unwrap();
        }
    }
}

/// The first GPU of this process.
pub(crate) fn gpu(domain: &Domain) -> Arc<Gpu> {
    domain.gpu(partywall::gpu::devices().unwrap()[0].uuid().unwrap()).unwrap()
}

/// Memory of `cuMemAlloc` whose every byte is `value`.
pub(crate) fn buffer(gpu: &Gpu, bytes: u64, value: u8) -> Arc<DeviceBuffer> {
    let buffer = Arc::new(DeviceBuffer::new(gpu.context(), bytes).unwrap());
    gpu.stream().copy_from_host(buffer.as_slice(), &vec![value; bytes as usize]).unwrap();
    buffer
}

/// What publishes 4 KiB of `value` as the tensor `x`.
pub(crate) fn publication(domain: &Domain, name: &str, value: u8) -> Publication {
    let memory = ForeignMemory::try_from(buffer(&gpu(domain), 4096, value)).unwrap();
    domain.publish(name).tensor("x", DType::U8, &[4096], &memory)
}

pub(crate) fn publish(domain: &Domain, name: &str, value: u8) -> Segment {
    publication(domain, name, value).commit().unwrap()
}

/// The byte that fills a tensor.
pub(crate) fn value_of(segment: &Segment, tensor: &str) -> u8 {
    let bytes = segment.tensor(tensor).unwrap().to_vec().unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{bytes:?}");
    bytes[0]
}

/// Memory at an address that the test itself keeps.
#[allow(unsafe_code)]
pub(crate) fn kept_by_the_test(gpu: &Gpu, address: u64) -> ForeignMemory {
    // SAFETY: the tests let go of what they publish before they free the memory, and of nothing before.
    unsafe { ForeignMemory::new(gpu.context(), address, Arc::new(())) }.unwrap()
}

/// What the driver says of an address.
pub(crate) fn kind_of(gpu: &Gpu, address: u64) -> partywall::cuda::PointerKind {
    PointerInfo::of(gpu.context(), address).unwrap().kind
}
