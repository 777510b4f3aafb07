//! A chain of three processes. When the first one dies, the stream of the last one still continues.

use super::{observer::Observer, *};
use crate::device::ends;

/// Runs the chain. The observer is the third stage, the waiter the second.
pub(super) fn run(observer: &mut Observer<'_>) -> Result<(), Failure> {
    let builder =
        observer.domain.create(BATCH, Place::Gpu(observer.gpu.uuid())).tensor(TENSOR, DType::U32, &[ELEMENTS]);
    let build = builder.mutable(true).allocate()?;
    device::set(&observer.gpu, build.device(TENSOR)?.as_slice(), 0)?;
    let batch = build.commit()?;

    let mut first = observer.session.spawn("actor")?;
    first.ask::<()>(Command::FirstStage)?;
    observer.waiter.ask::<()>(Command::SecondStage)?;
    let resting = observer.domain.timeline(RESTING)?;
    let careless = observer.domain.timeline(CARELESS)?;
    let stream = Stream::new(observer.gpu.context()).doing("creating a stream")?;
    resting.wait_on(stream.as_ref(), 1)?;
    careless.wait_on(stream.as_ref(), 1)?;
    let waits = !ends(stream.as_ref(), MOMENT)?;

    let killed = Moment::now();
    first.kill();
    let went_on = ends(stream.as_ref(), TIMEOUT)?;
    let after = Moment::now().since(killed);
    if !went_on {
        // Otherwise dropping the stream would wait, too.
        resting.abandon()?;
        careless.abandon()?;
    }
    observer.waiter.ask::<()>(Command::DescribeSecondStage)?;
    let declared = ending(&resting.check());
    let undeclared = ending(&careless.check());
    let right = has(Some(&observer.gpu), &batch, 2)?;
    let step = Step::new(
        "third-stage",
        "The chain's third stage, after the first one was killed",
        "It waited for the second stage, which is alive, and whose stream signalled as enqueued long before. No wait \
         failed here. If the second stage declared its input (rests_on), check reports the error; otherwise the wrong \
         batch looks right.",
    )
    .value("its stream, before", if waits { "waits" } else { "continued" })
    .value(
        "its stream, after the kill",
        if went_on { format!("continued after {}", millis(after)) } else { "waits".into() },
    )
    .value("the batch", if right { "right" } else { "never written by the first stage" })
    .value("check, with rests_on", &declared)
    .value("check, without rests_on", &undeclared);
    observer.session.report(step.says(TRAVELS, undeclared != "no error").judge(
        waits && went_on && !right && declared == "Tainted" && undeclared == "no error",
        "it continues with a wrong batch, and only check reports it",
        "check returned something else",
    ))
}
