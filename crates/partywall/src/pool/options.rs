//! Making pools, and finding those that others have made.

use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use partywall_cuda::DeviceUuid;
use partywall_shm::{DType, pool::MAX_BLOCKS};
use partywall_wire::{Access, Answer, Call, Control, Opened};

use super::Pool;
use crate::{
    domain::{Domain, check_name, unexpected},
    error::{Error, Result},
    place::Place,
    segment::{Builder, Claim},
};

/// Which pool, and how it is to be; see [`Domain::pool`].
#[derive(Debug, Clone)]
#[must_use = "options do nothing until create(), open() or open_or_create()"]
pub struct PoolOptions {
    domain: Domain,
    name: String,
    blocks: Option<u32>,
    block_bytes: Option<u64>,
    place: Option<Place>,
    kept: bool,
    device: Option<DeviceUuid>,
    allow_peer: bool,
    timeout: Option<Duration>,
}

impl PoolOptions {
    pub(super) fn new(domain: Domain, name: &str) -> Self {
        let name = name.to_owned();
        Self {
            domain,
            name,
            blocks: None,
            block_bytes: None,
            place: None,
            kept: false,
            device: None,
            allow_peer: false,
            timeout: None,
        }
    }

    /// How many blocks: 1 to 65,536. Needed to make a pool; a pool that is there has to have as many.
    pub fn blocks(mut self, blocks: u32) -> Self {
        self.blocks = Some(blocks);
        self
    }

    /// Bytes of each block, at least 1. Needed to make a pool; one that is there has to have such blocks. Each begins at a
    /// multiple of 256 bytes.
    pub fn block_bytes(mut self, bytes: u64) -> Self {
        self.block_bytes = Some(bytes);
        self
    }

    /// Where the blocks are; host memory by default. A pool that is there has to be there, if this is given.
    pub fn place(mut self, place: Place) -> Self {
        self.place = Some(place);
        self
    }

    /// Keeps a pool that is made until it is removed, the broker ends, the machine restarts or the GPU is reset. By default it
    /// goes with the last process that has it open.
    pub fn kept(mut self, kept: bool) -> Self {
        self.kept = kept;
        self
    }

    /// The GPU that is to use a pool that is there. By default the one that has it, or the only one in sight.
    pub fn device(mut self, device: DeviceUuid) -> Self {
        self.device = Some(device);
        self
    }

    /// Whether blocks of another GPU than the user's may be mapped: every access then crosses the link between them.
    pub fn allow_peer(mut self, allow: bool) -> Self {
        self.allow_peer = allow;
        self
    }

    /// How long to wait for a pool that is not there yet, or that another process is just making. By default
    /// [`open`](Self::open) does not wait, and [`open_or_create`](Self::open_or_create) 10 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Makes it. All its bytes are zero then.
    ///
    /// # Errors
    /// [`Error::NameExists`]; [`Error::BadPool`]; as [`Builder::allocate`](crate::Builder::allocate) and [`Build::commit`](crate::Build::commit).
    pub fn create(&self) -> Result<Pool> {
        let control = self.control()?;
        self.build(self.domain.create(&self.name, self.home()), control)
    }

    /// Opens it.
    ///
    /// # Errors
    /// [`Error::NotFound`] without a time-out, [`Error::Timeout`] with one; [`Error::NotAPool`]; [`Error::WrongPool`] if it
    /// is not as it was said to be; as [`OpenOptions::open`](crate::OpenOptions::open).
    pub fn open(&self) -> Result<Pool> {
        check_name(&self.name)?;
        // For reading: what is no pool would be refused for a reason that is beside the point.
        let timeout = self.timeout.unwrap_or_default();
        let (answer, fds) = self.domain.ask_to_open(&self.name, None, Access::Read, timeout)?;
        match answer {
            Answer::Opened(opened) => self.attach(opened, fds),
            other => Err(unexpected(&other)),
        }
    }

    /// Opens it, or makes it if it is not there. Of several processes that want that at once one makes it, and if that one
    /// dies, another.
    ///
    /// # Errors
    /// [`Error::Timeout`] while another process makes it; as [`create`](Self::create) and [`open`](Self::open), but for
    /// [`Error::NameExists`] and [`Error::NotFound`].
    pub fn open_or_create(&self) -> Result<Pool> {
        check_name(&self.name)?;
        let control = self.control()?;
        let timeout = self.timeout.unwrap_or(CREATION);
        // A time-out too large for the clock is none.
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let call = || Call::OpenOrBuild { name: self.name.clone() };
            match self.domain.link().call_waiting(call, deadline)? {
                Some((Answer::Build { claim }, _)) => {
                    let claim = Claim::new(self.domain.clone(), &self.name, claim);
                    match self.build(claim.create(self.home()), control) {
                        // By somebody who had not asked whether to: it is there now.
                        Err(Error::NameExists { .. }) => {}
                        made => return made,
                    }
                }
                Some((Answer::Opened(opened), fds)) => return self.attach(opened, fds),
                Some((other, _)) => return Err(unexpected(&other)),
                None => {
                    return Err(Error::Timeout {
                        what: format!("the making of pool {:?} by another process", self.name),
                        after: timeout,
                    });
                }
            }
        }
    }

    fn home(&self) -> Place {
        self.place.unwrap_or(Place::Host)
    }

    /// What is to be made.
    fn control(&self) -> Result<Control> {
        let bad = |why: String| Error::BadPool { name: self.name.clone(), why };
        let (Some(blocks), Some(block_bytes)) = (self.blocks, self.block_bytes) else {
            return Err(bad("the number of its blocks, and how many bytes each has, are to be given".into()));
        };
        if !(1..=MAX_BLOCKS).contains(&blocks) {
            return Err(bad(format!("it has 1 to {MAX_BLOCKS} blocks, not {blocks}")));
        }
        let control = Control { blocks, block_bytes, topic: None };
        // As many as a file can have.
        match control.data_bytes().filter(|bytes| i64::try_from(*bytes).is_ok()) {
            Some(bytes) if bytes > 0 => Ok(control),
            Some(_) => Err(bad("a block has at least one byte".into())),
            None => Err(bad(format!("{blocks} blocks of {block_bytes} bytes are more than 2^63"))),
        }
    }

    fn build(&self, builder: Builder, control: Control) -> Result<Pool> {
        let stride = control.stride().unwrap_or(u64::MAX);
        let builder = builder.tensor("blocks", DType::U8, &[u64::from(control.blocks), stride]).kept(self.kept);
        let segment = builder.control(control).allocate()?.commit()?;
        self.domain.pools().lock().add(segment).map(Pool::new)
    }

    /// Maps what the broker handed out, unless this connection has it mapped already.
    fn attach(&self, opened: Opened, fds: Vec<OwnedFd>) -> Result<Pool> {
        let lease = opened.lease;
        if let Err(error) = self.check(&opened) {
            self.give_back(lease);
            return Err(error);
        }
        // Held meanwhile: else two threads would both map it.
        let mut pools = self.domain.pools().lock();
        if let Some(blocks) = pools.find(&opened.name, opened.version, self.device) {
            drop(pools);
            self.give_back(lease);
            return Ok(Pool::new(blocks));
        }
        let opener = self.domain.opener(&self.name).read_write().allow_peer(self.allow_peer);
        let opener = if let Some(device) = self.device { opener.device(device) } else { opener };
        pools.add(opener.attach(opened, fds)?).map(Pool::new)
    }

    /// Refuses what is not as it was said to be.
    fn check(&self, opened: &Opened) -> Result<()> {
        let name = || self.name.clone();
        let control = match &opened.control {
            None => return Err(Error::NotAPool { name: name(), is: "a segment" }),
            Some(Control { topic: Some(_), .. }) => return Err(Error::NotAPool { name: name(), is: "a topic" }),
            Some(control) => control,
        };
        let wrong = |why: String| Err(Error::WrongPool { name: name(), why });
        match (self.blocks, self.block_bytes, self.place) {
            (Some(asked), ..) if asked != control.blocks => {
                wrong(format!("it has {} blocks, not {asked}", control.blocks))
            }
            (_, Some(asked), _) if asked != control.block_bytes => {
                wrong(format!("its blocks have {} bytes each, not {asked}", control.block_bytes))
            }
            (.., Some(asked)) if asked != opened.place.into() => {
                wrong(format!("its blocks are on {}, not on {asked}", Place::from(opened.place)))
            }
            _ => Ok(()),
        }
    }

    fn give_back(&self, lease: u64) {
        if let Err(error) = self.domain.link().call(Call::Release { lease }) {
            tracing::debug!(%error, "a lease could not be given back");
        }
    }
}

/// How long others may take to make a pool.
const CREATION: Duration = Duration::from_secs(10);
