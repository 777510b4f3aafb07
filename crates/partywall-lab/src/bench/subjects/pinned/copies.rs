//! Copies of a model between pinned memory and a GPU, against the same copies by the driver alone, and against one copy
//! from page-locked memory, which shows what the bus can do.

use partywall::{
    Build, Place, Segment,
    cuda::{DeviceBuffer, DeviceSlice, NodeMapping, NodeMemory, NodeUse, PinnedBuffer, round_up},
};
use partywall_measure::{Case, Comparison, Failure, Plan, Sampler, Unit};

use super::{Setting, rate};
use crate::{
    bench::{Bench, clocked, size, subjects::gpu_open},
    broker::Broker,
};

/// The tensors of the model, whose size is 15 units of the setting.
const TENSORS: u64 = 320;
const UNITS: u64 = 15;

const IN_PINNED: &str = "model";
const ON_GPU: &str = "model-gpu";
const BACK: &str = "model-back";

pub(crate) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let setting = Setting::new(bench, broker)?;
    let Setting { domain, gpu, node, unit } = &setting;
    let bytes = UNITS * unit;
    let on_gpu = Place::Gpu(gpu.uuid());
    let free = gpu.context().memory_info()?.free;
    if free < 3 * bytes + 2 * unit {
        bench.note(format!("copies: left out, because only {free} B of the GPU are free"));
        return Ok(());
    }
    // The model, its copy, and the memory of the floor.
    if !setting.fits(bench, "copies", 3 * bytes + unit) {
        return Ok(());
    }
    gpu_open::commit(bench, broker, IN_PINNED, setting.place(), TENSORS, bytes / TENSORS)?;
    let model = domain.opener(IN_PINNED).device(gpu.uuid()).open()?;
    let plan = Plan::new(bench.fewer(20).max(3)).warm_up(1).block(1);
    let case = |what: &str, way: &str| {
        let case = Case::new(what, Unit::GigabytesPerSecond).parameter("size", size(bytes)).parameter("way", way);
        case.parameter("tensors", TENSORS)
    };
    let bus = |way: &str| Case::new("one copy from page-locked memory", Unit::GigabytesPerSecond).parameter("way", way);

    // The memory of the floor is of the same two kinds.
    let driver = gpu.context().driver();
    let whole = round_up(bytes, NodeMemory::granularity(driver)?).ok_or("the model is too large")?;
    let pinned = NodeMapping::new(NodeMemory::create(driver, *node, whole)?, NodeUse::Draft)?;
    pinned.allow_device(gpu.context())?;
    let pinned = pinned.slice(gpu.context(), 0, bytes)?;
    let local = DeviceBuffer::new(gpu.context(), bytes)?;
    let plain = |to, from| plain(&setting, to, from);

    let mut target = domain.create(ON_GPU, on_gpu).like(&model).allocate()?;
    let comparison = Comparison::new(case("copy_from", TO_GPU), copies(&setting, &mut target, &model))
        .floor(case("the driver's copy", TO_GPU), plain(local.as_slice(), pinned));
    bench.run(comparison, plan)?;
    let copied = target.commit()?;
    check(&setting, &copied)?;

    let page_locked = PinnedBuffer::new(gpu.context(), *unit)?;
    let destination = local.slice(0, *unit)?;
    let one_copy: Sampler<'_> = Box::new(|| {
        let (elapsed, ()) = clocked(|| gpu.stream().copy_from_host(destination, &page_locked))?;
        Ok(rate(*unit, elapsed))
    });
    let to: Sampler<'_> = Box::new(|| {
        let copy = || model.to("model-again", on_gpu, gpu.stream())?.commit();
        let (elapsed, copied) = clocked(copy)?;
        copied.release()?;
        Ok(rate(bytes, elapsed))
    });
    // Allocation and commit are part of it.
    let comparison =
        Comparison::new(case("to and commit", TO_GPU), to).floor(bus(TO_GPU).parameter("size", size(*unit)), one_copy);
    bench.run(comparison, plan)?;
    model.release()?;
    domain.remove(IN_PINNED)?;

    let mut target = domain.create(BACK, setting.place()).like(&copied).allocate()?;
    let comparison = Comparison::new(case("copy_from", FROM_GPU), copies(&setting, &mut target, &copied))
        .floor(case("the driver's copy", FROM_GPU), plain(pinned, local.as_slice()));
    bench.run(comparison, plan)?;
    check(&setting, &target.commit()?)
}

const TO_GPU: &str = "pinned memory to GPU";
const FROM_GPU: &str = "GPU to pinned memory";

/// Returns a sampler of the GB/s of a copy of all tensors.
fn copies<'a>(setting: &'a Setting, target: &'a mut Build, source: &'a Segment) -> Sampler<'a> {
    let stream = setting.gpu.stream();
    Box::new(move || {
        let (elapsed, ()) = clocked(|| -> Result<(), Failure> {
            target.copy_from(source, stream)?;
            Ok(stream.synchronize()?)
        })?;
        Ok(rate(source.bytes(), elapsed))
    })
}

/// Returns a sampler of the GB/s of one copy by the driver.
fn plain<'a>(setting: &'a Setting, to: DeviceSlice<'a>, from: DeviceSlice<'a>) -> Sampler<'a> {
    let stream = setting.gpu.stream();
    Box::new(move || {
        let (elapsed, ()) = clocked(|| -> Result<(), Failure> {
            stream.enqueue_copy(to, from)?;
            Ok(stream.synchronize()?)
        })?;
        Ok(rate(from.len(), elapsed))
    })
}

/// Fails unless each tensor of a copy is what the other process has written.
fn check(setting: &Setting, copied: &Segment) -> Result<(), Failure> {
    let kernels = setting.gpu.kernels()?;
    for tensor in copied.tensors() {
        if kernels.verify(setting.gpu.stream(), tensor.device()?.as_slice(), 1)?.is_some() {
            return Err(format!("tensor {} of {} was not copied", tensor.name(), copied.name()).into());
        }
    }
    Ok(())
}
