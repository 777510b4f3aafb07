//! Members that use the topic.

use std::collections::VecDeque;

use partywall::error::{Gone, InvalidData};

use super::*;

pub(in crate::chaos) fn publisher(member: &mut Member<'_>) -> Result<(), Failure> {
    let place = member.session.place;
    let Some(topic) = member.call("open", || member.domain().topic(MESSAGES).timeout(LIMIT).open())? else {
        return Ok(());
    };
    let Some(publisher) = member.join("publisher", || topic.publisher())? else { return Ok(()) };
    member.begins()?;
    let mut message = member.number();
    while member.goes_on()? {
        let loan = || publisher.loan(DType::U64, &[WORDS], LIMIT);
        // Now and then it has all the blocks that it is promised.
        let others = if member.below(4) == 0 { topic.loans() - 1 } else { 0 };
        let _others = (0..others).map(|_| member.call("loan", loan)).collect::<Result<Vec<_>, _>>()?;
        let Some(mut loan) = member.call("loan", loan)? else { continue };
        if member.call("fill", || filled!(loan, device, place, message))?.is_none() {
            continue;
        }
        loan.header(&message.to_le_bytes())?;
        member.history.add(What::Publishing { message })?;
        let publish = || {
            let published = match &member.gpu {
                Some(gpu) if matches!(place, Place::Gpu(_)) && message.is_multiple_of(2) => {
                    loan.filled().publish_on(gpu.stream(), LIMIT)
                }
                _ => loan.filled().publish(LIMIT),
            };
            published.map_err(|refused| refused.error)
        };
        // A message that was refused is published again.
        if member.call("publish", publish)?.is_some() {
            member.history.add(What::Published { message })?;
            message = member.number();
        }
    }
    Ok(())
}

/// Receives every message, until the last publisher has left.
pub(in crate::chaos) fn subscriber(member: &mut Member<'_>) -> Result<(), Failure> {
    let Some(topic) = member.call("open", || member.domain().topic(MESSAGES).timeout(LIMIT).open())? else {
        return Ok(());
    };
    let joined = member.join("subscriber", || topic.subscribe(Policy::Block).until_idle(true).join())?;
    let Some(subscriber) = joined else { return Ok(()) };
    member.history.add(What::Subscribed)?;
    member.begins()?;
    let mut ends: Option<Instant> = None;
    while ends.is_none_or(|ends| Instant::now() < ends) {
        // All publishers have left before the subscribers are asked to end.
        if ends.is_none() && member.ends()? {
            ends = Some(Instant::now() + ENDS);
        }
        let recv = || match subscriber.recv(MOMENT) {
            Err(Error::Gone(Gone::TopicIdle { .. })) => Ok(None),
            received => received.map(Some),
        };
        match member.call("recv", recv)? {
            None => {}
            Some(None) => {
                member.history.add(What::Idle)?;
                break;
            }
            Some(Some(sample)) => {
                let Content { message, whole, failed } = read(member, &sample)?;
                member.history.add(What::Got { message, whole, failed })?;
                member.call("release", || sample.release())?;
            }
        }
    }
    // It ends only when it is asked to.
    while ends.is_none() && member.goes_on()? {}
    Ok(())
}

/// Joins under a policy that may miss messages, holds as many as it may, and leaves, again and again.
pub(in crate::chaos) fn viewer(member: &mut Member<'_>) -> Result<(), Failure> {
    let Some(topic) = member.call("open", || member.domain().topic(MESSAGES).timeout(LIMIT).open())? else {
        return Ok(());
    };
    member.begins()?;
    while member.goes_on()? {
        let policy = [Policy::DropOldest, Policy::Latest][member.below(2) as usize];
        let history = member.below(4) as u32;
        let joined = member.join("viewer", || topic.subscribe(policy).history(history).join())?;
        let Some(subscriber) = joined else { continue };
        member.history.add(What::Joined)?;
        let mut held = VecDeque::new();
        for _ in 0..member.below(30) {
            if held.len() == topic.held() as usize
                && let Some((sample, content)) = held.pop_front()
            {
                view(member, sample, &content)?;
            }
            if let Some(sample) = member.call("recv", || subscriber.recv(MOMENT / 10))? {
                let content = read(member, &sample)?;
                held.push_back((sample, content));
            }
        }
        // Samples stay as they are after their subscriber has left.
        drop(subscriber);
        held.into_iter().try_for_each(|(sample, content)| view(member, sample, &content))?;
    }
    Ok(())
}

/// Reads a sample again, which was not to change meanwhile, and gives it back.
fn view(member: &Member<'_>, sample: Sample, before: &Content) -> Result<(), Failure> {
    let Content { message, whole, failed } = read(member, &sample)?;
    let whole = whole && before.whole && message == before.message || failed && before.failed;
    let (position, missed) = (sample.position(), sample.missed());
    member.history.add(What::Viewed { message, position, missed, whole, failed })?;
    member.call("release", || sample.release()).map(drop)
}

/// What a sample contains.
struct Content {
    message: u64,
    /// True if its words and its header are of one message.
    whole: bool,
    /// True if its publisher had not completed it.
    failed: bool,
}

fn read(member: &Member<'_>, sample: &Sample) -> Result<Content, Failure> {
    let read = || -> Result<_, Failure> {
        let word = word!(sample, member.session.place, {
            let gpu = member.gpu.as_ref().ok_or_else(|| unexpected("there is no GPU for a message"))?;
            sample.device_on(gpu.stream())?
        });
        sample.check()?;
        Ok(word)
    };
    let word = member.insist("read", || match read() {
        Err(failure)
            if matches!(failure.error.as_deref(), Some(Error::InvalidData(InvalidData::SampleFailed { .. }))) =>
        {
            Ok(None)
        }
        word => word.map(Some),
    })?;
    let message = sample.header().try_into().map_or(0, u64::from_le_bytes);
    Ok(Content { message, whole: word == Some(Some(message)), failed: word.is_none() })
}
