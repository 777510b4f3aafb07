//! The consumer: opens what it finds in the file, also at the wrong time, and reports which beliefs are refuted.

use partywall::error::NotFound;

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let domain = session.domain().clone();
    let file = session.broker().directory().join("handle");
    let producer = session.partner();
    let mut consumer = Consumer { session, gpu, domain, file, producer };
    for experiment in [
        Consumer::missing,
        Consumer::half,
        Consumer::early,
        Consumer::right,
        Consumer::replaced,
        Consumer::stale,
        Consumer::name_waits,
        Consumer::name_ends,
    ] {
        session.report(experiment(&mut consumer)?)?;
    }
    consumer.producer.end();
    Ok(())
}

struct Consumer<'a> {
    session: &'a Session,
    gpu: Arc<Gpu>,
    domain: Domain,
    file: PathBuf,
    /// The other process, which may run in its own terminal, and is not killed.
    producer: Peer,
}

impl Consumer<'_> {
    fn missing(&mut self) -> Result<Step, Failure> {
        let answer = fs::read(&self.file);
        let none = answer.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound);
        Ok(Step::new(
            "no-file",
            "The consumer starts first, and finds no file",
            "It cannot know whether the producer is late, looks elsewhere or will never start. Tutorials wait in a \
             loop, or tell the user which program to start first.",
        )
        .value("file", self.file.display().to_string())
        .value("read", answer.map_or_else(|error| error.to_string(), |bytes| format!("{} bytes", bytes.len())))
        .judge(none, "no such file: the consumer has to poll", "a file is there already"))
    }

    fn half(&mut self) -> Result<Step, Failure> {
        self.producer.ask::<()>(Command::Half(self.file.clone()))?;
        let bytes = self.read()?;
        let half = bytes.len() < HANDLE_BYTES;
        Ok(Step::new(
            "half-file",
            "The consumer reads while the producer writes",
            "A file exists before it has contents, and another process can read it between two writes. The driver \
             promises nothing about a damaged handle: `partywall lab errors` shows that it may open. A consumer that \
             does not check the length passes it on.",
        )
        .value("read", format!("{} of {HANDLE_BYTES} bytes", bytes.len()))
        .says(WHOLE, !half)
        .judge(half, "the file is there, and its handle is not whole", "the handle is whole"))
    }

    fn early(&mut self) -> Result<Step, Failure> {
        self.producer.ask::<()>(Command::Rest(self.file.clone()))?;
        let found = self.contents()?.doing("opening the handle from the file")?;
        let old = found.iter().all(|byte| *byte == OLD);
        Ok(Step::new(
            "too-early",
            "The consumer opens the handle before the memory is filled",
            "The handle is valid from the allocation on. Neither the file nor the handle says whether the contents are \
             ready, and the driver does not wait.",
        )
        .value("read from the memory", count(&found, OLD))
        .says(READY, !old)
        .judge(old, "it opens, with old bytes and no error", "it does not find the old bytes"))
    }

    fn right(&mut self) -> Result<Step, Failure> {
        self.producer.ask::<()>(Command::Publish(self.file.clone(), true))?;
        let found = self.contents()?.doing("opening the handle from the file")?;
        let right = found.iter().all(|byte| *byte == NEW);
        Ok(Step::new(
            "opened",
            "The consumer opens the handle after that",
            "The memory is used in place. It stays as long as the producer lives and does not free it, so the producer \
             has to learn when the consumer is done: a second file, in the other direction.",
        )
        .value("read from the memory", count(&found, NEW))
        .judge(right, "every byte is right", "not every byte is right"))
    }

    fn replaced(&mut self) -> Result<Step, Failure> {
        let before = self.read()?;
        self.producer.ask::<()>(Command::Replace)?;
        let unchanged = self.read()? == before;
        let opened = self.contents()?;
        let step = Step::new(
            "freed",
            "The producer frees the memory and allocates again; the file stays",
            "The file has no connection to the memory. The driver may refuse the handle, or open what was allocated in \
             the same place since, without an error. If a consumer still had the memory open, the driver's behaviour \
             would be undefined.",
        )
        .value("file", if unchanged { "unchanged" } else { "changed" })
        .answer("cuIpcOpenMemHandle", code(&opened))
        .says(NOTICED, !unchanged)
        .says(STALE, false);
        Ok(match opened {
            Ok(found) => step.value("read from the memory", count(&found, OLD)).judge(
                unchanged && found.iter().all(|byte| *byte == OLD),
                "the file looks as before, and its handle opens memory that was allocated later",
                "it opens memory that is not the later allocation",
            ),
            Err(_) => step.judge(unchanged, "the file looks as before, and its handle is refused", "the file changed"),
        })
    }

    fn stale(&mut self) -> Result<Step, Failure> {
        let mut victim = self.session.spawn("producer")?;
        victim.ask::<()>(Command::Publish(self.file.clone(), false))?;
        let pid = victim.pid;
        victim.kill();
        let waited = Instant::now();
        let bytes = self.read()?;
        let waited = waited.elapsed();
        let answer = code(&self.contents()?);
        Ok(Step::new(
            "stale-file",
            "The producer is killed, and the consumer finds its file",
            "A killed process removes no file. A consumer that waits for the file of the next producer does not wait \
             at all: it takes this one. Nothing in the file says which process wrote it, or when.",
        )
        .value(format!("process {pid}"), "killed")
        .value("waited for a file", format!("{}: {} bytes are there", short(waited), bytes.len()))
        .says(NOTICED, false)
        .refused("cuIpcOpenMemHandle", answer, STALE, Some(CuResult::INVALID_HANDLE)))
    }

    fn name_waits(&mut self) -> Result<Step, Failure> {
        let name = "handle-file/waiting";
        self.producer.ask::<()>(Command::Build(name.into()))?;
        let began = Instant::now();
        let segment = self.domain.open(name, TIMEOUT)?;
        let waited = began.elapsed();
        let found = self.bytes_of(&segment)?;
        let right = found.iter().all(|byte| *byte == NEW);
        Ok(Step::new(
            "name-waits",
            "The same with a name of Partywall, asked for too early",
            "A name appears in one step, when the producer commits. open waits for that, so there is no half and no \
             early state. Size, type and shape come with the name, and each reader holds the memory.",
        )
        .value("open", format!("waited {}", millis(waited)))
        .value("read from the memory", count(&found, NEW))
        .says(NAME_EARLY, !right)
        .judge(right, "it waited, and every byte is right", "not every byte is right"))
    }

    fn name_ends(&mut self) -> Result<Step, Failure> {
        let name = "handle-file/stale";
        let mut victim = self.session.spawn("producer")?;
        victim.ask::<()>(Command::Build(name.into()))?;
        let segment = self.domain.open(name, TIMEOUT)?;
        let pid = victim.pid;
        victim.kill();
        let deadline = Instant::now() + TIMEOUT;
        let answer = loop {
            match self.domain.open(name, Duration::ZERO) {
                // The death is proved after a moment.
                Ok(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
                answer => break answer,
            }
        };
        let reason = answer.as_ref().map_or_else(ToString::to_string, |_| "no error".into());
        let explained = matches!(&answer, Err(Error::NotFound(NotFound::Name { ended: Some(_), .. })));
        let found = self.bytes_of(&segment)?;
        let right = found.iter().all(|byte| *byte == NEW);
        Ok(Step::new(
            "name-ends",
            "The producer of a name is killed",
            "The broker proves the death by the process's pidfd and ends the name. The next open says how it ended; \
             with a timeout it waits for the next producer. A consumer that has the memory open keeps it. A name that \
             is created with kept stays, with its memory.",
        )
        .value(format!("process {pid}"), "killed")
        .value("open", reason)
        .value("read from the memory that is open", count(&found, NEW))
        .says(NAME_STALE, !explained)
        .judge(explained && right, "the name is gone, and open says why", "the name did not end as expected"))
    }

    /// Returns the contents of the file.
    fn read(&self) -> Result<Vec<u8>, Failure> {
        fs::read(&self.file).doing("reading the handle from a file")
    }

    /// Opens the handle in the file and returns the bytes of the memory, or the driver's refusal. The mapping is closed
    /// at the end: the next experiment opens anew.
    fn contents(&self) -> Result<Result<Vec<u8>, CudaError>, Failure> {
        let handle = <[u8; HANDLE_BYTES]>::try_from(self.read()?);
        let handle = IpcMemoryHandle(handle.map_err(|_| unexpected("the file has no whole handle"))?);
        Ok(match IpcMapping::open(self.gpu.context(), handle, BYTES, Access::ReadOnly) {
            Ok(mapping) => Ok(device::bytes_of(&self.gpu, mapping.as_slice()).doing("reading shared memory")?),
            Err(error) => Err(error),
        })
    }

    fn bytes_of(&self, segment: &Segment) -> Result<Vec<u8>, Failure> {
        let range = segment.tensor(TENSOR)?.device()?;
        device::bytes_of(&self.gpu, range.as_slice()).doing("reading shared memory")
    }
}
