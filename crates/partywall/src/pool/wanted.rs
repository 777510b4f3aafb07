//! Creating and opening blocks: the part that the options of pools, topics and queues share.

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use partywall_cuda::{DeviceUuid, ForeignMemory};
use partywall_shm::DType;
use partywall_wire::{Access as WireAccess, Answer, BLOCK_ALIGNMENT, Call, Control, LeaseId, Named, Opened};

use super::{Blocks, blocks::MapObject, pools::OpenPools};
use crate::{
    domain::{Domain, answered, check_name, unexpected},
    error::{Denied, Error, InvalidArgument, Mismatch, Result},
    gpu::{self, cuda_error},
    place::{Access, DeviceChoice, Place},
    segment::{Builder, Claim},
    wait::Wait,
};

/// The pool, topic or queue that a process wants, and where its blocks should be.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) domain: Domain,
    /// A pool, a topic or a queue.
    pub(crate) object: Named,
    map: MapObject,
    pub(crate) name: String,
    pub(crate) place: Option<Place>,
    pub(crate) kept: bool,
    pub(crate) shared: bool,
    pub(crate) device: Option<DeviceUuid>,
    pub(crate) allow_peer: bool,
    pub(crate) access: Option<Access>,
    pub(crate) timeout: Option<Duration>,
}

impl Wanted {
    /// `map` maps the control memory of the object, apart from that of its pool.
    pub(crate) fn new(domain: Domain, object: Named, name: &str, map: MapObject) -> Self {
        let name = name.to_owned();
        Self {
            domain,
            object,
            map,
            name,
            place: None,
            kept: false,
            shared: false,
            device: None,
            allow_peer: false,
            access: None,
            timeout: None,
        }
    }

    /// Returns the error that the options are invalid.
    pub(crate) fn invalid(&self, why: impl Into<String>) -> Error {
        InvalidArgument::Options { of: self.object, name: self.name.clone(), why: why.into() }.into()
    }

    /// Returns the error that the existing pool or topic differs from the options.
    pub(crate) fn differs(&self, why: impl Into<String>) -> Error {
        Mismatch::Options { of: self.object, name: self.name.clone(), why: why.into() }.into()
    }

    /// Creates the blocks, all zero.
    pub(crate) fn create(&self, control: Control) -> Result<Arc<Blocks>> {
        self.build(self.domain.create(&self.name, self.home()?), control)
    }

    /// Creates the blocks in memory that other code allocated.
    pub(crate) fn create_in(&self, memory: &ForeignMemory, control: Control) -> Result<Arc<Blocks>> {
        let address = memory.info().address;
        if let Some(asked) = self.place {
            let device = memory.info().device.map(|device| device.uuid()).transpose();
            let there = device.map_err(cuda_error("asking for a GPU's UUID"))?;
            if there.map(Place::Gpu) != Some(asked) {
                return Err(self.invalid(format!("the given memory is not on {asked}")));
            }
        }
        if !address.is_multiple_of(BLOCK_ALIGNMENT) {
            return Err(self
                .invalid(format!("its first block would begin at {address:#x}, and each at a multiple of 256 bytes")));
        }
        let publication = self.domain.publish(&self.name).tensor("blocks", DType::U8, &data_shape(&control), memory);
        let segment = publication.kept(self.kept).shared(self.shared).control(control).commit()?;
        self.domain.extension::<OpenPools>().lock().add(segment, self.map)
    }

    /// Opens the blocks, unless they are another kind of object, elsewhere, or `check` refuses them.
    pub(crate) fn open(&self, check: impl Fn(&Control) -> Result<()>) -> Result<Arc<Blocks>> {
        // Asks for read access: with write access a plain segment would be refused because it is frozen, and the error
        // would not say that the object is of another kind.
        let timeout = self.timeout.unwrap_or_default();
        let (answer, fds) = self.domain.ask_to_open(&self.name, None, WireAccess::Read, timeout.into())?;
        self.attach(answered!(answer, Answer::Opened(opened) => opened)?, fds, check)
    }

    /// Opens the blocks, or creates them if they do not exist. If several processes call this at once, one of them
    /// creates the blocks; if it dies, another does.
    pub(crate) fn open_or_create(
        &self,
        control: Control,
        check: impl Fn(&Control) -> Result<()>,
    ) -> Result<Arc<Blocks>> {
        let name = check_name(&self.name)?;
        let waiting = Wait::from(self.timeout.unwrap_or(CREATION)).begin();
        loop {
            let call = || Call::OpenOrBuild { name: name.clone() };
            match self.domain.link().call_waiting(call, &waiting)? {
                Some((Answer::Build { claim }, _)) => {
                    let claim = Claim::new(self.domain.clone(), &self.name, claim);
                    match self.build(claim.create(self.home()?), control) {
                        // Another process has created it meanwhile without a claim; the next round opens it.
                        Err(Error::Denied(Denied::NameExists { .. })) => {}
                        made => return made,
                    }
                }
                Some((Answer::Opened(opened), fds)) => return self.attach(opened, fds, check),
                Some((other, _)) => return Err(unexpected(&other)),
                None => {
                    let Self { object, name, .. } = self;
                    let why = "another process began to make it and did not finish";
                    return Err(waiting.error(format!("cannot open {} {name:?}: {why}", object.name())));
                }
            }
        }
    }

    /// Returns where to create the blocks. Only called to create them: opening needs no driver.
    fn home(&self) -> Result<Place> {
        self.place.map_or_else(|| Ok(gpu::resolve(DeviceChoice::Auto)?.0), Ok)
    }

    fn build(&self, builder: Builder, control: Control) -> Result<Arc<Blocks>> {
        let builder = builder.tensor("blocks", DType::U8, &data_shape(&control)).kept(self.kept);
        let segment = builder.shared(self.shared).control(control).allocate()?.commit()?;
        self.domain.extension::<OpenPools>().lock().add(segment, self.map)
    }

    /// Maps the version that the broker handed out, unless this connection has already mapped it.
    pub(crate) fn attach(
        &self,
        opened: Opened,
        fds: Vec<OwnedFd>,
        check: impl Fn(&Control) -> Result<()>,
    ) -> Result<Arc<Blocks>> {
        let lease = opened.lease;
        if let Err(error) = self.check(&opened).and_then(check) {
            self.give_back(lease);
            return Err(error);
        }
        // Locked until it is mapped: otherwise two threads could both map it.
        let pools = self.domain.extension::<OpenPools>();
        let mut pools = pools.lock();
        if let Some(blocks) = pools.find(&opened.name, opened.version, self.device) {
            drop(pools);
            self.give_back(lease);
            return Ok(blocks);
        }
        let opener = self.domain.opener(&self.name).read_write().allow_peer(self.allow_peer);
        let opener = if let Some(device) = self.device { opener.device(device) } else { opener };
        let opener = if let Some(access) = self.access { opener.access(access) } else { opener };
        pools.add(opener.attach(opened, fds)?, self.map)
    }

    /// Refuses an object of another kind, and one that is elsewhere.
    fn check<'o>(&self, opened: &'o Opened) -> Result<&'o Control> {
        let is = opened.facts.named();
        let wanted = self.object;
        let control = opened.facts.control.as_ref().filter(|_| is == wanted);
        let control = control.ok_or_else(|| Mismatch::Object { name: self.name.clone(), is, wanted })?;
        let place = Place::from(opened.facts.place);
        match self.place {
            Some(asked) if asked != place => Err(self.differs(format!("it is on {place}, not on {asked}"))),
            _ => Ok(control),
        }
    }

    fn give_back(&self, lease: LeaseId) {
        if let Err(error) = self.domain.link().call(Call::Release { lease }) {
            tracing::debug!(%error, "a lease could not be given back");
        }
    }
}

/// Returns the shape of the tensor of all blocks. Those of a queue differ in size.
fn data_shape(control: &Control) -> Vec<u64> {
    match control.queue {
        None => vec![control.blocks.into(), control.stride().unwrap_or(u64::MAX)],
        Some(_) => vec![control.data_bytes().unwrap_or(u64::MAX)],
    }
}

/// Defines the setters of the options of a pool, topic or queue, whose field `wanted` is [`Wanted`].
macro_rules! wanted_setters {
    ($what:literal, $parts:literal) => {
        #[doc = concat!("Sets where the ", $parts, " are. The default is [`DeviceChoice::Auto`](crate::DeviceChoice::Auto).")]
        #[doc = concat!("An existing ", $what, " must be at this place, if it is given.")]
        pub fn place(mut self, place: Place) -> Self {
            self.wanted.place = Some(place);
            self
        }

        #[doc = concat!("Sets whether a newly created ", $what, " is kept until it is removed, the broker ends, the machine")]
        /// restarts or the GPU is reset. By default it ends with the last process that has it open.
        pub fn kept(mut self, kept: bool) -> Self {
            self.wanted.kept = kept;
            self
        }

        #[doc = concat!("Sets whether processes of other users may open a newly created ", $what, ", where the broker admits")]
        /// them. All that have it open write its control memory, so each of their users can break it for all; and
        /// nothing else.
        pub fn shared(mut self, shared: bool) -> Self {
            self.wanted.shared = shared;
            self
        }

        #[doc = concat!("Sets the GPU on which this process uses an existing ", $what, ". The default is the GPU that has its")]
        /// memory, or the first GPU that this process sees if that one is hidden.
        pub fn device(mut self, device: DeviceUuid) -> Self {
            self.wanted.device = Some(device);
            self
        }

        #[doc = concat!("Allows to map ", $parts, " of another GPU than the one that uses them: every access then crosses")]
        /// the link between the two GPUs.
        pub fn allow_peer(mut self, allow: bool) -> Self {
            self.wanted.allow_peer = allow;
            self
        }

        #[doc = concat!("Sets what has access from the start to an existing ", $what, " in pinned memory; see")]
        /// [`OpenOptions::access`](crate::OpenOptions::access).
        pub fn access(mut self, access: $crate::place::Access) -> Self {
            self.wanted.access = Some(access);
            self
        }

        #[doc = concat!("Sets how long to wait for a ", $what, " that does not exist yet or that another process is creating.")]
        /// By default [`open`](Self::open) does not wait, and [`open_or_create`](Self::open_or_create) waits 10 s.
        pub fn timeout(mut self, timeout: Duration) -> Self {
            self.wanted.timeout = Some(timeout);
            self
        }
    };
}

pub(crate) use wanted_setters;

/// How long another process may take to make the blocks.
const CREATION: Duration = Duration::from_secs(10);
