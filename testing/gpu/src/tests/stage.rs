//! Helpers of the driver facts: calls whose answers are checked and printed, memory that is released at the end, and
//! other processes.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::CStr;
use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use partywall::cuda::{CuResult, kernels};
use partywall_os::socket::{self, Ready};

use super::facts;
use super::world::{ROLE, TIMEOUT, ensure, error_text, say};
use crate::raw::{
    self, AccessRule, Address, Answer, Cuda, Handle, IpcHandle, LAZY_PEER, Properties, READ_WRITE, Words,
};

/// The check of a fact in one process.
pub(crate) struct Check {
    pub(crate) cuda: Cuda,
    /// The number of unexpected answers. Each was printed when it came.
    differences: Cell<usize>,
    /// The calls that release what the helpers created, in the order of creation.
    undo: RefCell<Vec<Undo>>,
    kernels: RefCell<Option<Kernels>>,
}

type Undo = Box<dyn FnOnce(&Cuda) -> Answer>;

#[derive(Clone, Copy)]
struct Kernels {
    fill: Handle,
    double: Handle,
    verify: Handle,
    /// The word for the result of `verify`, and the stream of the helpers.
    result: Address,
    stream: Handle,
}

impl Check {
    pub(crate) fn new() -> Result<Self, String> {
        Ok(Self {
            cuda: Cuda::load()?,
            differences: Cell::default(),
            undo: RefCell::default(),
            kernels: RefCell::default(),
        })
    }

    /// Ends a check: releases what the helpers created.
    pub(crate) fn finish(self, outcome: Result<(), String>) -> Result<(), String> {
        outcome?;
        for undo in self.undo.take().into_iter().rev() {
            undo(&self.cuda).ok().map_err(|error| format!("{error}, while releasing a resource"))?;
        }
        let differences = self.differences.get();
        ensure(differences == 0, || format!("{differences} answers differ from the fact"))
    }

    /// Skips all releases, because the context is lost or a stream has to stay blocked.
    pub(crate) fn give_nothing_back(&self) {
        self.undo.take();
    }

    /// Checks that the driver's answer to `question` is `expected`.
    pub(crate) fn answers(&self, question: &str, answer: Answer, expected: CuResult) {
        self.same(&format!("{question}: {}", answer.call), answer.code, expected);
    }

    /// Checks that the driver returned `expected`.
    pub(crate) fn same<T: Debug + PartialEq>(&self, question: &str, found: T, expected: T) {
        if found == expected {
            say(&format!("{question}: {found:?}"));
        } else {
            say(&format!("DIFFERS  {question}: expected {expected:?}, the driver answered {found:?}"));
            self.differences.set(self.differences.get() + 1);
        }
    }

    /// Initialises CUDA and makes the primary context of a device current on this thread.
    pub(crate) fn start_on(&self, device: i32) -> Result<(), String> {
        self.cuda.init(0).ok()?;
        let mut context = 0;
        self.cuda.primary_ctx_retain(&mut context, device).ok()?;
        self.undo(move |cuda| cuda.primary_ctx_release(device));
        self.cuda.ctx_set_current(context).ok()
    }

    pub(crate) fn start(&self) -> Result<(), String> {
        self.start_on(0)
    }

    pub(crate) fn undo(&self, undo: impl FnOnce(&Cuda) -> Answer + 'static) {
        self.undo.borrow_mut().push(Box::new(undo));
    }

    /// `cuMemAlloc`.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<Address, String> {
        let mut address = 0;
        self.cuda.mem_alloc(&mut address, bytes).ok()?;
        self.undo(move |cuda| cuda.mem_free(address));
        Ok(address)
    }

    /// `cuMemCreate` on the first device, exportable.
    pub(crate) fn create(&self, bytes: usize) -> Result<Handle, String> {
        let mut handle = 0;
        self.cuda.mem_create(&mut handle, bytes, &Properties::exportable(0), 0).ok()?;
        self.undo(move |cuda| cuda.mem_release(handle));
        Ok(handle)
    }

    pub(crate) fn export(&self, handle: Handle) -> Result<OwnedFd, String> {
        let mut descriptor = -1;
        self.cuda.mem_export(&mut descriptor, handle, raw::POSIX_FD, 0).ok()?;
        ensure(descriptor >= 0, || format!("the export gave descriptor {descriptor}"))?;
        Ok(own(descriptor))
    }

    pub(crate) fn import(&self, descriptor: impl AsFd) -> Result<Handle, String> {
        let mut handle = 0;
        self.cuda.mem_import(&mut handle, raw::number(descriptor.as_fd()), raw::POSIX_FD).ok()?;
        self.undo(move |cuda| cuda.mem_release(handle));
        Ok(handle)
    }

    pub(crate) fn reserve(&self, bytes: usize) -> Result<Address, String> {
        let mut address = 0;
        self.cuda.mem_address_reserve(&mut address, bytes, 0, 0, 0).ok()?;
        self.undo(move |cuda| cuda.mem_address_free(address, bytes));
        Ok(address)
    }

    /// Maps a whole allocation at `address` without access.
    pub(crate) fn map_at(&self, address: Address, handle: Handle, bytes: usize) -> Result<(), String> {
        self.cuda.mem_map(address, bytes, 0, handle, 0).ok()?;
        self.undo(move |cuda| cuda.mem_unmap(address, bytes));
        Ok(())
    }

    /// Maps a whole allocation at a new address, for the current device.
    pub(crate) fn map(&self, handle: Handle, bytes: usize, access: u32) -> Result<Address, String> {
        let mut device = 0;
        self.cuda.ctx_get_device(&mut device).ok()?;
        let address = self.reserve(bytes)?;
        self.map_at(address, handle, bytes)?;
        self.cuda.mem_set_access(address, bytes, &AccessRule::of(device, access), 1).ok()?;
        Ok(address)
    }

    /// New exportable memory, mapped.
    pub(crate) fn mapped(&self, bytes: usize) -> Result<(Handle, Address), String> {
        let handle = self.create(bytes)?;
        Ok((handle, self.map(handle, bytes, READ_WRITE)?))
    }

    pub(crate) fn stream(&self) -> Result<Handle, String> {
        let mut stream = 0;
        self.cuda.stream_create(&mut stream, raw::NON_BLOCKING).ok()?;
        self.undo(move |cuda| cuda.stream_destroy(stream));
        Ok(stream)
    }

    pub(crate) fn event(&self, flags: u32) -> Result<Handle, String> {
        let mut event = 0;
        self.cuda.event_create(&mut event, flags).ok()?;
        self.undo(move |cuda| cuda.event_destroy(event));
        Ok(event)
    }

    /// Returns the handle of a `cuMemAlloc` allocation or of an address in it.
    pub(crate) fn legacy_handle(&self, address: Address) -> Result<IpcHandle, String> {
        let mut handle = IpcHandle([0; 64]);
        self.cuda.ipc_get_mem_handle(&mut handle, address).ok()?;
        Ok(handle)
    }

    pub(crate) fn open_legacy(&self, handle: IpcHandle) -> Result<Address, String> {
        let mut address = 0;
        self.cuda.ipc_open_mem_handle(&mut address, handle, LAZY_PEER).ok()?;
        self.undo(move |cuda| cuda.ipc_close_mem_handle(address));
        Ok(address)
    }

    pub(crate) fn attribute(&self, attribute: u32) -> Result<i32, String> {
        let mut value = 0;
        self.cuda.device_get_attribute(&mut value, attribute, 0).ok()?;
        Ok(value)
    }

    /// Registers shared words with CUDA, and returns their device address.
    pub(crate) fn register(&self, words: &Words) -> Result<Address, String> {
        let address = words.address();
        let mut device = 0;
        self.cuda.mem_host_register(address, words.bytes(), raw::PORTABLE_MAPPED).ok()?;
        self.undo(move |cuda| cuda.mem_host_unregister(address));
        self.cuda.mem_host_get_device_pointer(&mut device, address, 0).ok()?;
        Ok(device)
    }

    /// Words of a new memfd, registered.
    pub(crate) fn words(&self) -> Result<(Words, Address), String> {
        let words = Words::map(Words::file(4096)?, true)?;
        let device = self.register(&words)?;
        Ok((words, device))
    }

    /// Loads the embedded kernels and launches each once, so that no later launch waits for their code.
    pub(crate) fn load_kernels(&self) -> Result<(), String> {
        self.kernels().map(drop)
    }

    fn kernels(&self) -> Result<Kernels, String> {
        if let Some(kernels) = *self.kernels.borrow() {
            return Ok(kernels);
        }
        let module = self.module(PTX)?;
        let function = |name| self.function(module, name);
        let kernels = Kernels {
            fill: function(c"pw_fill")?,
            double: function(c"pw_double")?,
            verify: function(c"pw_verify")?,
            result: self.alloc(8)?,
            stream: self.stream()?,
        };
        for kernel in [kernels.fill, kernels.double] {
            self.cuda.launch(kernel, kernels.stream, &[kernels.result, 0]).ok()?;
        }
        self.cuda.launch(kernels.verify, kernels.stream, &[kernels.result, 0, 1, kernels.result]).ok()?;
        self.cuda.stream_synchronize(kernels.stream).ok()?;
        *self.kernels.borrow_mut() = Some(kernels);
        Ok(kernels)
    }

    pub(crate) fn module(&self, ptx: &CStr) -> Result<Handle, String> {
        let mut module = 0;
        self.cuda.load_module(&mut module, ptx).ok()?;
        self.undo(move |cuda| cuda.module_unload(module));
        Ok(module)
    }

    pub(crate) fn function(&self, module: Handle, name: &CStr) -> Result<Handle, String> {
        let mut function = 0;
        self.cuda.function(&mut function, module, name).ok()?;
        Ok(function)
    }

    /// Enqueues writing the test pattern.
    pub(crate) fn enqueue_fill(&self, stream: Handle, address: Address, bytes: usize) -> Result<(), String> {
        self.cuda.launch(self.kernels()?.fill, stream, &[address, bytes as u64 / 4]).ok()
    }

    /// Enqueues doubling every word.
    pub(crate) fn enqueue_double(&self, stream: Handle, address: Address, bytes: usize) -> Result<(), String> {
        self.cuda.launch(self.kernels()?.double, stream, &[address, bytes as u64 / 4]).ok()
    }

    /// Writes the test pattern.
    pub(crate) fn fill(&self, address: Address, bytes: usize) -> Result<(), String> {
        let stream = self.kernels()?.stream;
        self.enqueue_fill(stream, address, bytes)?;
        self.cuda.stream_synchronize(stream).ok()
    }

    /// Doubles every word, and returns the result of waiting for that.
    pub(crate) fn double(&self, address: Address, bytes: usize) -> Result<Answer, String> {
        let stream = self.kernels()?.stream;
        self.enqueue_double(stream, address, bytes)?;
        Ok(self.cuda.stream_synchronize(stream))
    }

    /// Returns whether a kernel finds the test pattern, each word `factor` times, in all of the memory.
    pub(crate) fn holds_pattern(&self, address: Address, bytes: usize, factor: u64) -> Result<bool, String> {
        let Kernels { verify, result, stream, .. } = self.kernels()?;
        self.cuda.memset_d8_async(result, 0xFF, 8, stream).ok()?;
        self.cuda.launch(verify, stream, &[address, bytes as u64 / 4, factor, result]).ok()?;
        self.cuda.stream_synchronize(stream).ok()?;
        Ok(u64::from_ne_bytes(self.bytes(result)?) == u64::MAX)
    }

    /// Copies from the device, synchronously.
    pub(crate) fn bytes<const N: usize>(&self, address: Address) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.cuda.read(&mut bytes, address).ok()?;
        Ok(bytes)
    }
}

/// Returns the word of the test pattern at an index.
pub(crate) fn pattern(index: u64) -> u32 {
    kernels::expected(index)
}

#[allow(unsafe_code)]
fn own(descriptor: i32) -> OwnedFd {
    // SAFETY: the driver just made the descriptor for its caller, which must close it; it is open and owned by nothing
    // else.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

/// A message between the processes of a check.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) bytes: Vec<u8>,
    pub(crate) descriptor: Option<OwnedFd>,
}

impl Message {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    pub(crate) fn descriptor(self) -> Result<OwnedFd, String> {
        self.descriptor.ok_or_else(|| "no descriptor came along".to_owned())
    }

    pub(crate) fn handle(&self) -> Result<IpcHandle, String> {
        self.bytes
            .as_slice()
            .try_into()
            .map(IpcHandle)
            .map_err(|_| format!("{} bytes are not a handle", self.bytes.len()))
    }
}

/// One end of the line between two processes of a check.
pub(crate) struct Line(OwnedFd);

impl Line {
    /// Returns the line of a process that plays a role, which is its standard input.
    pub(crate) fn of_role() -> Result<Self, String> {
        rustix::stdio::stdin().try_clone_to_owned().map(Self).map_err(error_text)
    }

    pub(crate) fn send(&self, bytes: impl AsRef<[u8]>) -> Result<(), String> {
        socket::send(&self.0, bytes.as_ref(), &[]).map(drop).map_err(error_text)
    }

    pub(crate) fn give(&self, bytes: impl AsRef<[u8]>, descriptor: impl AsFd) -> Result<(), String> {
        let descriptor: BorrowedFd<'_> = descriptor.as_fd();
        socket::send(&self.0, bytes.as_ref(), &[descriptor]).map(drop).map_err(error_text)
    }

    /// Returns the next message; nothing when the other end is closed.
    pub(crate) fn hear(&self) -> Result<Option<Message>, String> {
        ensure(self.speaks_within(TIMEOUT)?, || format!("no message arrived for {} s", TIMEOUT.as_secs()))?;
        let mut bytes = vec![0; 256];
        let mut descriptors = VecDeque::new();
        let received = match socket::recv(&self.0, &mut bytes, &mut descriptors) {
            Ok(received) => received.bytes,
            Err(partywall_os::Errno::CONNRESET) => 0,
            Err(error) => return Err(error_text(error)),
        };
        bytes.truncate(received);
        Ok((received > 0).then(|| Message { bytes, descriptor: descriptors.pop_front() }))
    }

    /// Returns whether a message or the end of the line arrives within `limit`.
    pub(crate) fn speaks_within(&self, limit: Duration) -> Result<bool, String> {
        socket::wait(&self.0, Ready::Read, Some(Instant::now() + limit)).map_err(error_text)
    }
}

/// Another process of a check, which plays a role. Dropping it kills the process.
pub(crate) struct Peer {
    child: Child,
    line: Line,
    role: &'static str,
}

impl Peer {
    /// Starts a process that plays a role of the facts.
    pub(crate) fn start(role: &'static str) -> Result<Self, String> {
        Self::start_with(role, Command::new("/proc/self/exe"))
    }

    /// Starts a process as [`Peer::start`] does, by a command that starts this program.
    pub(crate) fn start_with(role: &'static str, mut command: Command) -> Result<Self, String> {
        let (ours, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .map_err(error_text)?;
        command.args([ROLE, facts::ROLE, role]).stdin(Stdio::from(theirs));
        Ok(Self { child: command.spawn().map_err(error_text)?, line: Line(ours), role })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    pub(crate) fn send(&self, bytes: impl AsRef<[u8]>) -> Result<(), String> {
        self.line.send(bytes)
    }

    pub(crate) fn give(&self, bytes: impl AsRef<[u8]>, descriptor: impl AsFd) -> Result<(), String> {
        self.line.give(bytes, descriptor)
    }

    pub(crate) fn hear(&mut self) -> Result<Message, String> {
        match self.line.hear() {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(format!("{} ended too early: {}", self.role, self.child.wait().map_err(error_text)?)),
            Err(error) => Err(format!("{}: {error}", self.role)),
        }
    }

    pub(crate) fn expect(&mut self, word: &str) -> Result<(), String> {
        let heard = self.hear()?.text();
        ensure(heard == word, || format!("expected {word:?} from {}, received {heard:?}", self.role))
    }

    /// Sends a command and waits until it is done.
    pub(crate) fn order(&mut self, word: &str) -> Result<(), String> {
        self.send(word)?;
        self.expect("done")
    }

    pub(crate) fn speaks_within(&self, limit: Duration) -> Result<bool, String> {
        self.line.speaks_within(limit)
    }

    /// Kills the process and waits for its end.
    pub(crate) fn kill(&mut self) -> Result<(), String> {
        self.child.kill().map_err(error_text)?;
        self.child.wait().map(drop).map_err(error_text)
    }

    /// Waits until the process has ended by itself.
    pub(crate) fn end(&mut self) -> Result<ExitStatus, String> {
        ensure(self.line.hear()?.is_none(), || format!("{} speaks instead of ending", self.role))?;
        self.child.wait().map_err(error_text)
    }

    /// Closes the line, and waits until the process ends successfully.
    pub(crate) fn finish(mut self) -> Result<(), String> {
        rustix::net::shutdown(&self.line.0, rustix::net::Shutdown::Write).map_err(error_text)?;
        let status = self.child.wait().map_err(error_text)?;
        ensure(status.success(), || format!("{} failed: {status}", self.role))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Fails only if it has been waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The checked-in kernels, closed by the NUL that the driver looks for.
pub(crate) const PTX: &CStr = match CStr::from_bytes_with_nul(
    concat!(include_str!("../../../../crates/partywall-cuda/kernels/partywall.ptx"), "\0").as_bytes(),
) {
    Ok(ptx) => ptx,
    Err(_) => panic!("the PTX contains a NUL byte"),
};
