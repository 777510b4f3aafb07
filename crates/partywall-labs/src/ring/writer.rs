//! The writer: publishes messages full of numbers.

use std::{
    mem,
    time::{Duration, Instant},
};

use partywall::{Error, Place, Publisher, error::Busy};

use super::{DTYPE, Hello, LAB, MOMENT, Meet, NUMBERS, Published, RING, TIMEOUT, TITLE, Wish, numbers::Numbers};
use crate::{
    Context, MemoryOptions, broker, clock::short, device::copy_failed, failure::Failure, peer::Peer, step::Step,
    teller::Teller,
};

/// Plays the role.
pub(super) fn run(context: &Context, options: &MemoryOptions, teller: &mut Teller) -> Result<(), Failure> {
    let place = context.place(options.device)?;
    let hello = Hello { pid: std::process::id(), place: place.to_string() };
    if options.on_standard_input {
        let mut peer = Peer::on_standard_input("reader")?;
        return play(hello, place, &mut peer, teller).map_err(|failure| peer.give_up(failure));
    }
    teller.header_at(TITLE, place)?;
    let mut peer = Peer::meet(context, LAB, "reader", teller)?;
    play(hello, place, &mut peer, teller).map_err(|failure| peer.give_up(failure))?;
    teller.remark("The reader has seen enough, and says which beliefs held.");
    Ok(())
}

fn play(hello: Hello, place: Place, peer: &mut Peer, teller: &mut Teller) -> Result<(), Failure> {
    peer.say(hello, &[])?;
    let Meet { socket, pattern } = peer.hear(teller)?;
    let topic = broker::connect(&socket)?.topic(RING).timeout(TIMEOUT).open()?;
    let mut writer = Writer { publisher: topic.publisher()?, place, numbers: Numbers::of(&pattern) };
    peer.say(Published { messages: 0, refused: None }, &[])?;
    let mut told = false;
    loop {
        let (most, timeout) = match peer.hear(teller)? {
            Wish::End => return Ok(()),
            Wish::Messages(messages) => (messages, TIMEOUT),
            Wish::UntilFull => (u64::MAX, MOMENT),
            Wish::Endless => (u64::MAX, TIMEOUT),
        };
        let start = Instant::now();
        let published = writer.publish(most, timeout)?;
        if !mem::replace(&mut told, true) {
            peer.tell(teller, describe(&published, start.elapsed()))?;
        }
        peer.say(published, &[])?;
    }
}

struct Writer {
    publisher: Publisher,
    place: Place,
    numbers: Numbers,
}

impl Writer {
    /// Publishes so many messages, or until there is no room for one for so long.
    fn publish(&mut self, most: u64, timeout: Duration) -> Result<Published, Failure> {
        for messages in 0..most {
            let first = self.numbers.at();
            let mut loan = self.publisher.loan(DTYPE, &[NUMBERS], TIMEOUT)?;
            loan.header(&first.to_le_bytes())?;
            let numbers = self.numbers.by_ref().take(NUMBERS as usize);
            if self.place == Place::Host {
                for (word, number) in loan.as_mut_slice::<u64>()?.iter_mut().zip(numbers) {
                    *word = number;
                }
            } else {
                let bytes: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
                let range = loan.device()?;
                let copied = range.gpu().stream().copy_from_host(range.as_slice(), &bytes);
                copied.map_err(copy_failed("writing a message"))?;
            }
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
        "A block that nobody uses any more is borrowed and filled in place. Publishing it is one compare-and-swap in the \
         ring, after a look at how far those have read for whom writers wait.",
    )
    .value("messages published", published.messages.to_string())
    .value("time for each, with waiting for room", short(time / (published.messages.max(1) as u32)))
    .judge(published.refused.is_none(), "all were published", "not all were published")
}
