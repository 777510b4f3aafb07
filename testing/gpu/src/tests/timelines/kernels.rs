// Holds 172.
//! Timelines and the caller's own kernels.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use partywall::{
    Domain, Error, TimelineEnding,
    cuda::{Context, DeviceBuffer, Function, LaunchConfig, Module, Stream},
    error::DeviceFault,
};

use super::{
    scenes::{Stage, ended, is_pending},
    world::{TIMEOUT, World, gpu, next_order, say},
};
use crate::raw::{CAPTURE_RELAXED, Cuda};

/// Waits and signals by kernels, as commanded.
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    let endless = kernel(gpu.context(), c"endless");
    let hand_over = kernel(gpu.context(), c"hand_over");
    let data = DeviceBuffer::new(gpu.context(), 16).unwrap();
    gpu.stream().copy_from_host(data.as_slice(), &[0; 16]).unwrap();
    let input = domain.timeline("in").unwrap();
    let writer = domain.timeline_writer("out").unwrap();
    let from = input.device_ptr(&gpu).unwrap();
    let to = writer.timeline().device_ptr(&gpu).unwrap();
    say("ready");
    while let Some(order) = next_order() {
        let (order, v) = order.split_once(' ').unwrap_or((&order, "0"));
        let v: u64 = v.parse().unwrap();
        match order {
            "signal" => writer.signal_on(stream.as_ref(), v).unwrap(),
            "endless" => launch(&endless, &stream, &[data.as_slice().device_ptr()]),
            "hand-over" => {
                launch(&hand_over, &stream, &[from, v, data.as_slice().device_ptr() + 8, to, v]);
                writer.promise_on(stream.as_ref(), v).unwrap();
            }
            "counted" => {
                let mut count = [0; 16];
                stream.as_ref().copy_to_host(&mut count, data.as_slice()).unwrap();
                say(&format!("done {}", count[8]));
                continue;
            }
            other => panic!("unknown command {other}"),
        }
        say("done");
    }
}

pub(crate) fn a_stream_that_is_captured_is_refused(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("x").unwrap();
    let writer = stage.domain.timeline_writer("x").unwrap();
    let captured = Stream::new(stage.gpu.context()).unwrap();
    let cuda = Cuda::load().unwrap();
    let _guard = stage.gpu.context().guard().unwrap();
    cuda.stream_begin_capture(captured.as_ref().raw().0, CAPTURE_RELAXED).ok().unwrap();
    let is_refused =
        |result: Result<(), Error>| matches!(result, Err(Error::DeviceFault(DeviceFault::Captured { .. })));
    assert!(is_refused(timeline.wait_on(captured.as_ref(), 1)));
    assert!(is_refused(timeline.wait_on_for(captured.as_ref(), 1, TIMEOUT).map(drop)));
    assert!(is_refused(writer.signal_on(captured.as_ref(), 1)));
    assert!(is_refused(writer.signal_on_and_wake(captured.as_ref(), 1)));
    // Nothing was promised, and the capture is still valid.
    assert_eq!(timeline.announced(), 0);
    let mut graph = 0;
    cuda.stream_end_capture(captured.as_ref().raw().0, &mut graph).ok().unwrap();
    cuda.graph_destroy(graph).ok().unwrap();
    writer.signal_on(captured.as_ref(), 1).unwrap();
    timeline.wait(1, TIMEOUT).unwrap();
}

pub(crate) fn a_writer_killed_in_an_endless_kernel_ends_every_wait(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("out").unwrap();
    let mut writer = world.play("kernels");
    for order in ["signal 1", "endless", "signal 2"] {
        writer.request(order);
    }
    timeline.wait(1, TIMEOUT).unwrap();
    timeline.wait_on(stage.stream.as_ref(), 2).unwrap();
    assert!(is_pending(&timeline, 2));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| timeline.wait(2, TIMEOUT));
        writer.kill();
        assert_eq!(ended(waiter.join().unwrap()), (TimelineEnding::OwnerDied, 2, 1));
    });
    stage.stream.synchronize().unwrap();
    assert_eq!(ended(timeline.check()), (TimelineEnding::OwnerDied, 2, 1));
}

/// Follows the documentation of [`partywall::Timeline::device_ptr`] in both processes.
pub(crate) fn kernels_wait_and_signal_by_themselves(world: &World) {
    let stage = Stage::new(world);
    let input = stage.domain.timeline("out").unwrap();
    let writer = stage.domain.timeline_writer("in").unwrap();
    let mut other = world.play("kernels");
    for v in 1..=3 {
        other.request(&format!("hand-over {v}"));
        input.wait_announced(v, TIMEOUT).unwrap();
        assert!(is_pending(&input, v));
        if v == 2 {
            writer.signal(v).unwrap()
        } else {
            writer.signal_on(stage.stream.as_ref(), v).unwrap()
        }
        input.wait(v, TIMEOUT).unwrap();
        assert_eq!(other.request("counted"), v.to_string());
    }
    // Poison ends the kernel, which then neither counts nor signals.
    other.request("hand-over 4");
    drop(writer);
    assert_eq!(other.request("counted"), "3");
    assert_eq!(input.value(), 3);
}

fn kernel(context: &Context, name: &'static CStr) -> Function {
    Module::from_ptx(context, PTX).unwrap().function(name).unwrap()
}

/// Launches one thread.
#[allow(unsafe_code)]
fn launch(function: &Function, stream: &Stream, parameters: &[u64]) {
    let mut parameters: Vec<*mut c_void> = parameters.iter().map(|it| ptr::from_ref(it).cast_mut().cast()).collect();
    let config = LaunchConfig { grid: [1, 1, 1], block: [1, 1, 1], shared_bytes: 0 };
    // SAFETY: the kernels below take this many 64-bit numbers; the memory that they access stays mapped until the
    // process ends.
    unsafe { function.launch(stream.as_ref(), config, &mut parameters) }.unwrap();
}

/// `endless` runs until a word is not 0. `hand_over` waits until a timeline has reached `v`, counts, and stores `w` as
/// the value of another timeline; if the first one has ended, it does nothing.
const PTX: &CStr = c"
.version 8.4
.target sm_70
.address_size 64
.visible .entry endless(.param .u64 stop)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [stop];
look:
    ld.relaxed.sys.u64 %rd2, [%rd1];
    setp.eq.u64 %p1, %rd2, 0;
    @%p1 bra look;
    ret;
}
.visible .entry hand_over(.param .u64 waits, .param .u64 v, .param .u64 count, .param .u64 signals, .param .u64 w)
{
    .reg .pred %p<3>;
    .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [waits];
    ld.param.u64 %rd2, [v];
    ld.param.u64 %rd3, [count];
    ld.param.u64 %rd4, [signals];
    ld.param.u64 %rd5, [w];
look:
    ld.acquire.sys.u64 %rd6, [%rd1];
    sub.u64 %rd7, %rd6, %rd2;
    setp.lt.s64 %p1, %rd7, 0;
    @%p1 bra look;
    mov.u64 %rd8, 2305843009213693952;
    setp.gt.u64 %p2, %rd6, %rd8;
    @%p2 ret;
    ld.u64 %rd9, [%rd3];
    add.u64 %rd9, %rd9, 1;
    st.u64 [%rd3], %rd9;
    st.release.sys.u64 [%rd4], %rd5;
    ret;
}
";
