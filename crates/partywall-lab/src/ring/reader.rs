//! The reader: receives with each policy, checks every number, kills a writer, and reports which beliefs are refuted.

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let Order { pattern, messages } = session.options()?;
    let topic = session.domain().topic(RING).max_bytes(NUMBERS * 8).dtype(DTYPE).depth(DEPTH).place(session.place);
    let topic = topic.create()?;
    let mut writer = session.partner();
    writer.ask::<()>(&pattern)?;
    let mut reader = Reader { session, topic, writer, pattern, messages };
    for experiment in [Reader::stream, Reader::slow_block, Reader::slow_latest, Reader::late, Reader::killed] {
        session.report(experiment(&mut reader)?)?;
    }
    reader.writer.end();
    Ok(())
}

struct Reader<'a> {
    session: &'a Session,
    topic: Topic,
    /// The other process, which may run in its own terminal, and is not killed.
    writer: Peer,
    pattern: Pattern,
    messages: u64,
}

/// The received messages, with every number checked.
struct Checked {
    numbers: Numbers,
    /// The index of the next number, if nothing is missing.
    next: Option<u64>,
    messages: u64,
    /// Numbers that differ from the expected ones.
    wrong: u64,
    /// Messages that arrived out of order.
    unordered: u64,
    /// Messages that this subscriber missed.
    missed: u64,
}

impl Checked {
    fn is_right(&self) -> bool {
        self.wrong == 0 && self.unordered == 0
    }
}

impl Reader<'_> {
    fn stream(&mut self) -> Result<Step, Failure> {
        let subscriber = self.topic.subscriber(Policy::Block)?;
        let start = Instant::now();
        self.writer.say(Command::Messages(self.messages))?;
        let mut seen = self.nothing_seen();
        for _ in 0..self.messages {
            self.check(subscriber.recv(TIMEOUT)?, &mut seen)?;
        }
        let time = start.elapsed().as_secs_f64();
        let Published { .. } = self.writer.hear()?;
        let right = seen.is_right() && seen.missed == 0 && seen.messages == self.messages;
        Ok(Step::new(
            "stream",
            format!("{} messages of {NUMBERS} numbers: {}", self.messages, self.pattern),
            "A message is written once, into a block of a pool, and read in place. Only the number of the block goes \
             through the ring. The reader computes each expected number itself.",
        )
        .value("messages received, in order", format!("{}", seen.messages - seen.unordered))
        .value("numbers that were wrong", seen.wrong.to_string())
        .value("messages a second", format!("{:.0}", self.messages as f64 / time))
        .value("bytes a second", format!("{}/s", partywall::bytes((self.messages as f64 * 8192.0 / time) as u64)))
        .judge(right, "every number is right", "numbers are wrong, missing or out of order"))
    }

    fn slow_block(&mut self) -> Result<Step, Failure> {
        let subscriber = self.topic.subscriber(Policy::Block)?;
        self.writer.say(Command::UntilFull)?;
        let Published { messages, refused } = self.writer.hear()?;
        let mut seen = self.nothing_seen();
        self.check_all(&subscriber, &mut seen)?;
        let right = seen.is_right() && seen.missed == 0 && seen.messages == messages && refused.is_some();
        Ok(Step::new(
            "slow-block",
            "A subscriber with the policy `block` that does not read",
            "The ring has room for as many messages as its depth. Then the writer waits up to its timeout, and its \
             error names the process that it waits for.",
        )
        .value("published, and depth of the ring", format!("{messages}, {DEPTH}"))
        .value("the next one", refused.unwrap_or_else(|| "published, too".into()))
        .value("read afterwards", format!("{} messages, {} numbers wrong", seen.messages, seen.wrong))
        .says(BRAKE, !right)
        .judge(right, "the writer waits, and nothing is lost", "messages were lost"))
    }

    fn slow_latest(&mut self) -> Result<Step, Failure> {
        let subscriber = self.topic.subscriber(Policy::Latest)?;
        let messages = u64::from(DEPTH) * 10;
        self.writer.say(Command::Messages(messages))?;
        let Published { messages: published, .. } = self.writer.hear()?;
        let mut seen = self.nothing_seen();
        self.check_all(&subscriber, &mut seen)?;
        let right = seen.is_right() && published == messages && seen.messages == 1 && seen.missed == messages - 1;
        Ok(Step::new(
            "slow-latest",
            "A subscriber with the policy `latest` that does not read",
            "The writer does not wait for it. It gets the newest message when it reads. Messages are numbered, so it \
             knows how many it has missed.",
        )
        .value("published meanwhile", format!("{published} messages"))
        .value("received", seen.messages.to_string())
        .value("missed, according to the message", seen.missed.to_string())
        .says(SLOWED, published != messages)
        .says(UNNOTICED, seen.missed != messages - 1)
        .judge(
            right,
            "the newest message, and the number of missed ones",
            "not the newest message, or the gap was not reported",
        ))
    }

    fn late(&mut self) -> Result<Step, Failure> {
        let subscriber = self.topic.subscribe(Policy::Block).history(HISTORY).join()?;
        let mut seen = self.nothing_seen();
        self.check_all(&subscriber, &mut seen)?;
        let right = seen.is_right() && seen.messages == u64::from(HISTORY);
        Ok(Step::new(
            "late",
            "A late subscriber that requests history",
            "Messages that were not overwritten are still in the ring, and a late subscriber may start with them.",
        )
        .value("requested", format!("the last {HISTORY} messages, of {DEPTH} in the ring"))
        .value("received", format!("{} messages, {} numbers wrong", seen.messages, seen.wrong))
        .says(LATE, seen.messages == 0)
        .judge(right, "as many as requested", "fewer than requested, or wrong ones"))
    }

    fn killed(&mut self) -> Result<Step, Failure> {
        let mut victim = self.session.spawn("writer")?;
        victim.ask::<()>(&self.pattern)?;
        let subscriber = self.topic.subscriber(Policy::Block)?;
        victim.say(Command::Endless)?;
        let mut seen = self.nothing_seen();
        for _ in 0..10 * DEPTH {
            self.check(subscriber.recv(TIMEOUT)?, &mut seen)?;
        }
        victim.kill();
        self.check_all(&subscriber, &mut seen)?;
        // Another writer continues, immediately or after that death is proved.
        let mut others = self.nothing_seen();
        let more = u64::from(DEPTH) * 10;
        self.writer.say(Command::Messages(more))?;
        for _ in 0..more {
            self.check(subscriber.recv(TIMEOUT)?, &mut others)?;
        }
        let Published { .. } = self.writer.hear()?;
        let right = seen.is_right() && seen.missed == 0 && others.is_right() && others.missed == 0;
        Ok(Step::new(
            "killed",
            "A writer is killed while it publishes as fast as it can",
            "One compare-and-swap puts a message into the ring. A writer that is killed before it leaves a block that \
             the broker reclaims; killed after it, a complete message.",
        )
        .value("killed", format!("process {}", victim.pid))
        .value("received from it", format!("{} messages, {} numbers wrong", seen.messages, seen.wrong))
        .value("then from the other writer", format!("{} messages, {} numbers wrong", others.messages, others.wrong))
        .says(TORN, !right)
        .judge(right, "complete messages, and the ring still works", "messages are torn, lost or out of order"))
    }

    fn nothing_seen(&self) -> Checked {
        let numbers = Numbers::of(&self.pattern);
        Checked { numbers, next: None, messages: 0, wrong: 0, unordered: 0, missed: 0 }
    }

    /// Checks all messages until none arrives for a moment.
    fn check_all(&self, subscriber: &Subscriber, seen: &mut Checked) -> Result<(), Failure> {
        loop {
            match subscriber.recv(MOMENT) {
                Ok(sample) => self.check(sample, seen)?,
                Err(Error::Timeout { .. }) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn check(&self, sample: Sample, seen: &mut Checked) -> Result<(), Failure> {
        let first = sample.header().try_into().map(u64::from_le_bytes);
        let first = first.map_err(|_| unexpected("a message has no index of its first number"))?;
        seen.messages += 1;
        seen.missed += sample.missed();
        seen.unordered += u64::from(seen.next.is_some_and(|next| next + sample.missed() * NUMBERS != first));
        seen.next = Some(first + NUMBERS);
        let numbers = seen.numbers.from(first);
        let found = device::elements::<u64>(&sample, "reading a message")?;
        seen.wrong += found.iter().zip(numbers).filter(|(found, number)| *found != number).count() as u64;
        drop(found);
        Ok(sample.release()?)
    }
}
