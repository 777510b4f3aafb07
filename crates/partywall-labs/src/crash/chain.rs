//! A chain of three processes of which the first one dies: the last one's stream goes on all the same.

use super::{observer::Observer, *};
use crate::device::ends;

/// The observer is the third stage, the waiter the second one.
pub(super) fn run(observer: &mut Observer<'_>) -> Result<(), Failure> {
    let builder =
        observer.domain.create(BATCH, Place::Gpu(observer.gpu.uuid())).tensor(TENSOR, DType::U32, &[ELEMENTS]);
    let build = builder.mutable(true).allocate()?;
    device::set(&observer.gpu, build.device(TENSOR)?.as_slice(), 0)?;
    let batch = build.commit()?;

    let mut first = observer.start()?;
    first.ask::<()>(Command::FirstStage)?;
    observer.waiter.ask::<()>(Command::SecondStage)?;
    let resting = observer.domain.timeline(RESTING)?;
    let careless = observer.domain.timeline(CARELESS)?;
    let stream = Stream::new(observer.gpu.context()).doing("making a stream")?;
    resting.wait_on(stream.as_ref(), 1)?;
    careless.wait_on(stream.as_ref(), 1)?;
    let waits = !ends(stream.as_ref(), MOMENT)?;

    let killed = Moment::now();
    first.kill();
    let went_on = ends(stream.as_ref(), TIMEOUT)?;
    let after = Moment::now().since(killed);
    if !went_on {
        // Else dropping the stream would wait as well.
        resting.abandon()?;
        careless.abandon()?;
    }
    observer.waiter.ask::<()>(Command::TellSecondStage)?;
    let told = ending(&resting.check());
    let untold = ending(&careless.check());
    let right = has(&observer.gpu, &batch, 2)?;
    let step = Step::new(
        "third-stage",
        "The chain's third stage, after the first one was killed",
        "It waited for the second stage, which is alive, and whose stream signalled as it had been told long before. No \
         wait failed here. Where the second stage had said what it rests on (rests_on), check knows; where it had not, \
         the wrong batch looks like a right one.",
    )
    .value("its stream, before", if waits { "waits" } else { "went on" })
    .value("its stream, after the kill", if went_on { format!("went on after {}", millis(after)) } else { "waits".into() })
    .value("the batch", if right { "right" } else { "never written by the first stage" })
    .value("check, with rests_on", &told)
    .value("check, without", &untold);
    observer.session.tell(step.says(TRAVELS, untold != "no error").judge(
        waits && went_on && !right && told == "Tainted" && untold == "no error",
        "it goes on with a wrong batch, and only check tells",
        "it was told otherwise",
    ))
}
