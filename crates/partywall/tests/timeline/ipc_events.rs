//! CUDA's interprocess events.

use std::time::Duration;

use partywall::{
    Domain, Error, IpcEvent, IpcEventHandle,
    cuda::{CuResult, DeviceBuffer},
    error::DeviceFault,
};

use super::world::{TIMEOUT, gpu, next_order, say, simulated};

/// Another process, which creates an event and records it on request, behind work that waits for another request.
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = gpu(&domain);
    let word = DeviceBuffer::new(gpu.context(), 8).unwrap();
    let release = partywall::cuda::Stream::new(gpu.context()).unwrap();
    gpu.stream().copy_from_host(word.as_slice(), &[0; 8]).unwrap();
    let event = IpcEvent::create(&gpu).unwrap();
    say("ready");
    while let Some(order) = next_order() {
        match order.as_str() {
            "handle" => say(&format!("done {}", event.export().unwrap().0.map(|byte| format!("{byte:02x}")).concat())),
            "record" => {
                gpu.stream().enqueue_wait_u64(word.as_slice(), 1).unwrap();
                event.record(gpu.stream()).unwrap();
                say("done");
            }
            _ => {
                release.as_ref().enqueue_write_u64(word.as_slice(), 1).unwrap();
                event.synchronize(TIMEOUT).unwrap();
                say("done");
            }
        }
    }
}

fn handle(text: &str) -> IpcEventHandle {
    let byte = |index: usize| u8::from_str_radix(&text[2 * index..][..2], 16).unwrap();
    IpcEventHandle(std::array::from_fn(byte))
}

#[test]
fn ipc_event_orders_streams_of_two_processes_on_the_simulated_gpu() {
    simulated("ipc_events::ipc_event_orders_streams_of_two_processes_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let mut recorder = world.play("event");
        let event = IpcEvent::open(&gpu, &handle(&recorder.request("handle"))).unwrap();
        // A wait without a record does not wait: the first trap.
        event.wait(gpu.stream()).unwrap();
        event.synchronize(Duration::ZERO).unwrap();
        gpu.stream().synchronize().unwrap();

        recorder.request("record");
        event.wait(gpu.stream()).unwrap();
        assert!(!event.query().unwrap());
        let late = event.synchronize(Duration::from_millis(1));
        assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
        assert_eq!(gpu.stream().is_done(), Ok(false));
        recorder.request("release");
        event.synchronize(TIMEOUT).unwrap();
        assert!(event.query().unwrap());
        gpu.stream().synchronize().unwrap();
    });
}

#[test]
fn unshareable_memory_is_refused_with_a_hint_on_the_simulated_gpu() {
    simulated("ipc_events::unshareable_memory_is_refused_with_a_hint_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let mut recorder = world.play("event");
        let opened = IpcEvent::open(&gpu, &handle(&recorder.request("handle"))).unwrap();
        let ours = IpcEvent::create(&gpu).unwrap();
        let own_handle = ours.export().unwrap();
        for (refused, code) in [
            (opened.export().map(drop), CuResult::INVALID_HANDLE),
            (IpcEvent::open(&gpu, &own_handle).map(drop), CuResult::INVALID_CONTEXT),
            (IpcEvent::open(&gpu, &IpcEventHandle([7; 64])).map(drop), CuResult::MAP_FAILED),
        ] {
            let error = refused.unwrap_err();
            let Error::DeviceFault(DeviceFault::Cuda { source, .. }) = &error else { panic!("{error:?}") };
            assert_eq!(source.code, code);
            assert_eq!(error.anchor(), "event-not-shared");
            assert!(error.advice().contains("timeline"), "{}", error.advice());
        }
    });
}

#[test]
fn event_of_a_killed_recorder_is_never_reached_on_the_simulated_gpu() {
    simulated("ipc_events::event_of_a_killed_recorder_is_never_reached_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let mut recorder = world.play("event");
        let event = IpcEvent::open(&gpu, &handle(&recorder.request("handle"))).unwrap();
        recorder.request("record");
        recorder.kill();
        assert!(!event.query().unwrap(), "nobody will ever say that it is");
        let late = event.synchronize(Duration::from_millis(50));
        assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    });
}
