//! The writer: publishes messages full of numbers.

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let pattern = session.parent().hear()?;
    let topic = session.domain().topic(RING).timeout(TIMEOUT).open()?;
    let mut writer = Writer { publisher: topic.publisher()?, numbers: Numbers::of(&pattern) };
    session.parent().say(())?;
    let mut reported = false;
    while let Some(command) = session.parent().next()? {
        let (most, timeout) = match command {
            Command::Messages(messages) => (messages, TIMEOUT),
            Command::UntilFull => (u64::MAX, MOMENT),
            Command::Endless => (u64::MAX, TIMEOUT),
        };
        let start = Instant::now();
        let published = writer.publish(most, timeout)?;
        if !mem::replace(&mut reported, true) {
            session.report(describe(&published, start.elapsed()))?;
        }
        session.parent().say(published)?;
    }
    Ok(())
}

struct Writer {
    publisher: Publisher,
    numbers: Numbers,
}

impl Writer {
    /// Publishes up to `most` messages, and stops if there is no room for one within the timeout.
    fn publish(&mut self, most: u64, timeout: Duration) -> Result<Published, Failure> {
        for messages in 0..most {
            let first = self.numbers.at();
            let mut loan = self.publisher.loan(DTYPE, &[NUMBERS], TIMEOUT)?;
            loan.header(&first.to_le_bytes())?;
            device::fill(&mut loan, "writing a message", |words: &mut [u64]| {
                words.iter_mut().zip(&mut self.numbers).for_each(|(word, number)| *word = number);
                Ok(())
            })?;
            match loan.filled().publish(timeout) {
                Ok(_) => {}
                Err(refused) => match refused.error {
                    error @ Error::Busy(Busy::TopicFull { .. }) => {
                        self.numbers.from(first);
                        return Ok(Published { messages, refused: Some(error.to_string()) });
                    }
                    error => return Err(error.into()),
                },
            }
        }
        Ok(Published { messages: most, refused: None })
    }
}

fn describe(published: &Published, time: Duration) -> Step {
    Step::new(
        "publish",
        "The writer borrows blocks, fills them, and publishes them",
        "The writer borrows an unused block and fills it in place. Publishing it is one compare-and-swap in the ring, \
         after a check of how far the `block` subscribers have read.",
    )
    .value("messages published", published.messages.to_string())
    .value("time per message, including waits for room", short(time / (published.messages.max(1) as u32)))
    .judge(published.refused.is_none(), "all were published", "not all were published")
}
