//! The witness: starts and ends the others, and says what is left.

use std::{path::Path, sync::Arc};

use partywall::{Domain, Gpu};

use super::{BELIEFS, Hello, LAB, Meet, TITLE, Task, chain, scenes};
use crate::{
    Context, Options,
    broker::{self, Broker},
    device::{self, Chosen, failed},
    failure::Failure,
    peer::Peer,
    step::Step,
    teller::Teller,
};

/// Plays the role, and ends the lab.
pub(super) fn run(context: &Context, options: &Options, mut waiter: Peer, teller: &mut Teller) -> Result<(), Failure> {
    let hello: Hello = waiter.hear(teller)?;
    let theirs = || hello.uuid.parse().map(Chosen::Uuid).unwrap_or(Chosen::Ordinal(0));
    let uuid = device::open(options.device.unwrap_or_else(theirs))?.uuid();
    let broker = Broker::start(context, LAB)?;
    let domain = broker::connect(broker.socket())?;
    let gpu = domain.gpu(uuid)?;
    teller.header(TITLE, &gpu).map_err(failed("asking about the GPU"))?;
    gpu.kernels()?;
    waiter.say(Meet { socket: broker.socket().to_owned() }, &[])?;
    let obstacle = device::streams_cannot_wait(&gpu);
    let mut witness = Witness { domain, gpu, broker, waiter, teller };
    if let Some(why) = obstacle {
        let step = Step::new(
            "waits",
            "Waiting for those who die",
            "Timelines order streams by words of memory that these wait for. Nothing of this lab works without.",
        );
        let step = BELIEFS.iter().fold(step, |step, belief| step.leaves_open(*belief));
        witness.tell(step.untried(None, why));
    } else {
        scenes::server(&mut witness)?;
        scenes::client(&mut witness)?;
        chain::run(&mut witness)?;
        // Last, because nothing that has a name is left behind it.
        scenes::broker(&mut witness)?;
    }

    let Witness { waiter, teller, .. } = witness;
    waiter.say(Task::End, &[])?;
    waiter.end();
    teller.conclude(&BELIEFS);
    Ok(())
}

/// What every scene needs.
pub(super) struct Witness<'a, 'b> {
    pub(super) domain: Domain,
    pub(super) gpu: Arc<Gpu>,
    pub(super) broker: Broker,
    pub(super) waiter: Peer,
    pub(super) teller: &'a mut Teller<'b>,
}

/// A process that the witness has started.
pub(super) struct Actor {
    pub(super) pid: u32,
    pub(super) peer: Peer,
}

impl Witness<'_, '_> {
    /// Starts a process that does one thing.
    pub(super) fn start(&mut self) -> Result<Actor, Failure> {
        let mut peer = Peer::spawn(LAB, "actor", &self.gpu.uuid().to_string())?;
        let Hello { pid, .. } = peer.hear(self.teller)?;
        peer.say(Meet { socket: self.socket().to_owned() }, &[])?;
        Ok(Actor { pid, peer })
    }

    pub(super) fn socket(&self) -> &Path {
        self.broker.socket()
    }

    pub(super) fn tell(&mut self, step: Step) {
        self.teller.tell(step);
    }
}
