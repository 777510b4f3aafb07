//! Members that use the queue.

use std::collections::VecDeque;

use partywall::{Attachment, Task, Ticket, error::Gone};

use super::*;

pub(in crate::chaos) fn submitter(member: &mut Member<'_>) -> Result<(), Failure> {
    let place = member.session.place;
    let Some(queue) = member.call("open", || member.domain().queue(TASKS).timeout(LIMIT).open())? else {
        return Ok(());
    };
    let Some(constants) = member.call("open", || member.domain().open(CONSTANTS, LIMIT))? else { return Ok(()) };
    member.begins()?;
    let mut attached: Option<Attachment> = None;
    let mut tickets: VecDeque<(u64, Ticket)> = VecDeque::new();
    let mut ends = Instant::now() + TIMEOUT;
    let mut goes_on = true;
    while goes_on || !tickets.is_empty() {
        if goes_on && !member.goes_on()? {
            goes_on = false;
            ends = Instant::now() + ENDS;
        }
        // Another submitter may detach the segment of all tasks at any moment, too.
        if attached.is_none() {
            attached = member.call("attach", || queue.attach(&constants))?;
        } else if let Some(attachment) = attached.as_ref().filter(|_| member.dice.below(8) == 0) {
            let detach = || match queue.detach(attachment, Duration::ZERO) {
                Err(Error::Busy(Busy::AttachmentInUse { .. }) | Error::Gone(Gone::Attachment { .. })) => Ok(()),
                detached => detached,
            };
            member.call("detach", detach)?;
        }
        if let Some(attachment) = attached.clone().filter(|_| goes_on && tickets.len() < 4) {
            let task = member.number();
            let mut input = member.call("alloc", || queue.inputs().alloc(TIMEOUT))?;
            if let Some(input) = &mut input {
                member.insist("fill", || filled!(*input, device_mut, place, task))?;
            }
            if let Some(input) = input {
                member.history.add(What::Submitting { task })?;
                let constants = attachment.tensor(&constants.tensor("x")?)?;
                let order = Task::new("add").input(input).part(constants).output(WORDS * 8).max_attempts(u8::MAX);
                let submit = || match queue.submit(order.cancel_with_submitter(true), LIMIT) {
                    Err(refused) if matches!(refused.error, Error::Gone(Gone::Attachment { .. })) => Ok(None),
                    submitted => submitted.map(Some).map_err(|refused| refused.error),
                };
                match member.call("submit", submit)? {
                    Some(Some(ticket)) => {
                        member.history.add(What::Submitted { task })?;
                        tickets.push_back((task, ticket));
                    }
                    Some(None) => attached = None,
                    None => {}
                }
            }
        }
        let Some((task, ticket)) = tickets.pop_front() else { continue };
        let Some(result) = member.call("result", || ticket.wait(MOMENT))? else {
            tickets.push_front((task, ticket));
            if !goes_on && Instant::now() > ends {
                break;
            }
            continue;
        };
        let output = result.into_output().ok_or_else(|| unexpected("a result has no output"))?;
        let word = member.insist("read", || -> Result<_, Failure> { Ok(word!(output, place, output.device()?)) })?;
        member.history.add(What::Result { task, right: word == Some(task | DONE) })?;
        member.call("release", || output.release())?;
        let again = || match ticket.try_take() {
            Err(Error::Gone(Gone::Task { .. })) => Ok(None),
            taken => taken,
        };
        if member.call("take", again)?.flatten().is_some() {
            member.history.add(What::Result { task, right: true })?;
        }
    }
    Ok(())
}

pub(in crate::chaos) fn worker(member: &mut Member<'_>) -> Result<(), Failure> {
    let place = member.session.place;
    let Some(queue) = member.call("open", || member.domain().queue(TASKS).timeout(LIMIT).open())? else {
        return Ok(());
    };
    member.begins()?;
    while member.goes_on()? {
        let Some(mut task) = member.call("claim", || queue.claim(MOMENT))? else { continue };
        let [input, constants] = task.inputs() else { return Err(unexpected("a task has not two inputs")) };
        let word = member.insist("read", || -> Result<_, Failure> { Ok(word!(input, place, input.device()?)) })?;
        let mut bytes = vec![0; WORDS as usize * 8];
        member.insist("read", || constants.read_at(0, &mut bytes))?;
        let is_constant = bytes == CONSTANT.to_le_bytes().repeat(WORDS as usize);
        let done = word.filter(|_| is_constant).map_or(0, |word| word | DONE);
        let ended = match member.below(20) {
            0 => {
                drop(task);
                continue;
            }
            1 => task.fail("another attempt does it"),
            kind => {
                if kind == 2 {
                    // The attempt becomes another worker's, and this one must not end it.
                    thread::sleep(2 * LEASE);
                }
                member.insist("fill", || filled!(task.output_mut()?, device_mut, place, done))?;
                task.complete()
            }
        };
        match ended {
            // Its submitter was killed, or the attempt took too long and is another worker's.
            Err(Error::Gone(Gone::Claim { .. })) => {}
            ended => drop(member.call("complete", || ended)?),
        }
    }
    Ok(())
}
