//! Opening one segment of 70,000 tensors: its table is a sealed file, which the reader maps and checks.

use partywall::{DType, Domain, Place, Segment};
use partywall_measure::{Case, Comparison, Failure, Sampler, Unit};

use crate::{
    bench::{Bench, clocked, microseconds, milliseconds},
    broker::Broker,
};

const TENSORS: usize = 70_000;

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let producer = broker.connect()?;
    let consumer = broker.connect()?;
    let names: Vec<_> = names().take(TENSORS).collect();
    let _held = commit(&producer, &names)?;
    let segment = consumer.opener("model").open()?;
    if segment.len() != TENSORS {
        return Err(format!("{} tensors instead of {TENSORS}", segment.len()).into());
    }
    let case = |what: &str, unit| Case::new(what, unit).parameter("tensors", TENSORS);

    let open: Sampler<'_> = Box::new(|| Ok(milliseconds(clocked(|| consumer.opener("model").open())?.0)));
    let comparison = Comparison::new(case("open a table", Unit::Milliseconds), open);
    let plan = bench.plan(500);
    bench.run(comparison, plan)?;

    let mut next = 0;
    let find: Sampler<'_> = Box::new(|| {
        // Each step skips a prime number of names, so that no name is still in the cache.
        next = (next + 7919) % TENSORS;
        Ok(microseconds(clocked(|| segment.tensor(&names[next]).map(drop))?.0))
    });
    let plan = bench.plan(50_000);
    bench.run(Comparison::new(case("find one of its tensors", Unit::Microseconds), find), plan)
}

/// Returns the names of a large mixture-of-experts model: 256 experts a layer, each of three quantised matrices.
fn names() -> impl Iterator<Item = String> {
    (0..61).flat_map(|layer| {
        let attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"];
        let attention = attention.map(|matrix| format!("model.layers.{layer}.self_attn.{matrix}.weight"));
        let experts = (0..256).flat_map(move |expert| {
            ["gate_proj", "up_proj", "down_proj"].into_iter().flat_map(move |matrix| {
                let matrix = format!("model.layers.{layer}.mlp.experts.{expert}.{matrix}");
                [format!("{matrix}.weight"), format!("{matrix}.weight_scale_inv")]
            })
        });
        attention.into_iter().chain(experts)
    })
}

/// Returns a model of many small tensors: the benchmark measures their number.
fn commit(domain: &Domain, names: &[String]) -> Result<Segment, Failure> {
    let builder = domain.create("model", Place::Host);
    let builder = names.iter().fold(builder, |builder, name| builder.tensor(name, DType::BF16, &[8, 16]));
    Ok(builder.allocate()?.commit()?)
}
