//! A model whose worker is killed inside a forward, until the next worker has done its first forward: by a warm spare,
//! and by a new process. Both map the weights in place.

use std::path::Path;

use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{
        Bench,
        python::{Programs, RESTART},
        size,
    },
    broker::Broker,
};

const NAME: &str = "restarted";

/// Layers of a model of 8 billion parameters in 16 bits, and of what is used in place of it where there is too little
/// memory.
const LAYERS: u64 = 32;
const FEW_LAYERS: u64 = 2;

/// Bytes of a layer, and of the two embeddings.
const LAYER: u64 = 436_224_000;
const EMBEDDINGS: u64 = 2 * 128_256 * 4096 * 2;

/// How often a worker is killed, and one whose follower starts from nothing.
const KILLS: usize = 20;
const COLD_KILLS: usize = 5;

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let domain = broker.connect()?;
    let free = domain.gpu(bench.gpu()?)?.context().memory_info()?.free;
    let bytes = |layers: u64| layers * LAYER + EMBEDDINGS;
    let fits = free > 2 * bytes(LAYERS) + (4 << 30);
    if !fits {
        bench.note(format!("the model has {FEW_LAYERS} layers: {free} bytes are free on the GPU"));
    }
    let layers = if fits && !bench.quick { LAYERS } else { FEW_LAYERS };
    let socket: &Path = broker.socket();
    let count = layers.to_string();
    let programs = Programs::unpack(broker)?;
    let _maker = programs.start(RESTART, &[&"make", &socket, &NAME, &count])?;
    let mut spares = programs.start(RESTART, &[&"spares", &socket, &NAME, &count])?;
    let case = |what: &str| {
        let case = Case::new(format!("from the kill of a worker to the next forward, {what}"), Unit::Milliseconds);
        case.parameter("size", size(bytes(layers))).parameter("layers", layers)
    };
    let comparison = Comparison::new(case("by a warm spare"), spares.sampler(1));
    let plan = bench.plan(KILLS).warm_up(0).block(1);
    bench.run(comparison, plan)?;
    drop(spares);
    let mut respawn = programs.start(RESTART, &[&"respawn", &socket, &NAME, &count])?;
    let plan = bench.plan(COLD_KILLS).warm_up(0).block(1);
    bench.run(Comparison::new(case("by a new process"), respawn.sampler(1)), plan)
}
