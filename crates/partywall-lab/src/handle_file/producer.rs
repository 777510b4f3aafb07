//! The producer: allocates memory, and writes its handle to a file.

use std::io::Write;

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut producer = Producer { gpu: session.gpu(), memory: None, built: Vec::new() };
    while let Some(command) = session.parent().next()? {
        match command {
            Command::Half(file) => {
                let handle = producer.allocate()?;
                fs::write(&file, &handle[..HANDLE_BYTES / 2]).doing(WRITING)?;
                session.parent().say(())?;
            }
            Command::Rest(file) => {
                let handle = producer.handle()?;
                let appended = fs::OpenOptions::new().append(true).open(&file);
                appended.and_then(|mut file| file.write_all(&handle[HANDLE_BYTES / 2..])).doing(WRITING)?;
                session.parent().say(())?;
            }
            Command::Publish(file, reports) => {
                let handle = producer.publish(&file)?;
                if reports {
                    session.report(describe(&file, handle))?;
                }
                session.parent().say(())?;
            }
            Command::Replace => {
                // Freed before the next allocation, so that the driver may use the same place again.
                producer.memory = None;
                producer.allocate()?;
                session.parent().say(())?;
            }
            Command::Build(name) => {
                session.parent().say(())?;
                thread::sleep(MOMENT);
                let segment = producer.build(session.domain(), &name)?;
                producer.built.push(segment);
            }
        }
    }
    Ok(())
}

struct Producer {
    gpu: Arc<Gpu>,
    memory: Option<DeviceBuffer>,
    /// Kept until the process ends.
    built: Vec<Segment>,
}

impl Producer {
    fn allocate(&mut self) -> Result<[u8; HANDLE_BYTES], Failure> {
        let memory = DeviceBuffer::new(self.gpu.context(), BYTES).doing("allocating")?;
        device::set(&self.gpu, memory.as_slice(), OLD)?;
        self.memory = Some(memory);
        self.handle()
    }

    fn memory(&self) -> Result<&DeviceBuffer, Failure> {
        self.memory.as_ref().ok_or_else(|| unexpected("the producer was not asked to allocate memory"))
    }

    fn handle(&self) -> Result<[u8; HANDLE_BYTES], Failure> {
        let handle = IpcMemoryHandle::of(self.gpu.context(), self.memory()?.as_slice().device_ptr());
        Ok(handle.doing("asking for a handle")?.0)
    }

    /// Fills the memory, and then writes the whole file under another name and renames it.
    fn publish(&mut self, file: &PathBuf) -> Result<[u8; HANDLE_BYTES], Failure> {
        if self.memory.is_none() {
            self.allocate()?;
        }
        device::set(&self.gpu, self.memory()?.as_slice(), NEW)?;
        let handle = self.handle()?;
        let draft = file.with_extension("new");
        fs::write(&draft, handle).and_then(|()| fs::rename(&draft, file)).doing(WRITING)?;
        Ok(handle)
    }

    fn build(&self, domain: &Domain, name: &str) -> Result<Segment, Failure> {
        let build = domain.create(name, Place::Gpu(self.gpu.uuid())).tensor(TENSOR, DType::U8, &[BYTES]).allocate()?;
        device::set(&self.gpu, build.device(TENSOR)?.as_slice(), NEW)?;
        Ok(build.commit()?)
    }
}

fn describe(file: &Path, handle: [u8; HANDLE_BYTES]) -> Step {
    Step::new(
        "publish",
        "The handle goes into a file, properly",
        "First the work that fills the memory ends, then the whole handle is written to another file, then that file \
         takes the name in one step. A file can order nothing else: the consumer's work needs an event or a timeline.",
    )
    .value("file", file.display().to_string())
    .value("handle", format!("{:?}, {HANDLE_BYTES} bytes", IpcMemoryHandle(handle)))
    .value("not in the handle", "the size, the type and the shape of the data, and whether it is ready")
    .judge(true, "written", "")
}

const WRITING: &str = "writing the handle to a file";
