//! Measures and compares: the basis of all benchmarks of Partywall.
//!
//! Every benchmark compares a measured time with the least that the machine could take and with
//! the time of rivals, and all numbers come from the same run. This crate makes such comparisons
//! trustworthy: a warm-up that is not counted, samples that are stored one by one, percentiles
//! instead of means, cases that run in turns so that a slower machine affects all of them alike,
//! and a report that names the machine.
//!
//! | module | holds |
//! |---|---|
//! | [`case`](Case) | cases and how they are sampled: [`Case`], [`Unit`], [`Plan`], [`Sampler`] and [`timed`] |
//! | [`percentiles`](Percentiles) | nearest-rank percentiles of a set of samples |
//! | [`goal`](Goal) | expressions such as `<= 1.3x floor` and their [`Verdict`] |
//! | [`comparison`](Comparison) | a measured case, its floor and its rivals, run in turns |
//! | [`machine`](Machine) | kernel, processor, memory, GPU, date and commit |
//! | [`report`](Report) | JSON, with all percentiles |
//! | [`chart`](Chart) | the plots of a report, as SVG |
//! | `page` | the report as one HTML page |
//! | [`compare`](Differences) | the differences between two reports of one machine |
//!
//! The crate measures nothing by itself and knows nothing about GPUs: the caller passes closures, and
//! the GPU's name and driver as text. It only decides whether goals are met; in particular it has no
//! significance tests.
//!
//! ```
//! use partywall_measure::{Case, Comparison, Machine, Plan, Report, Unit, timed};
//!
//! # fn main() -> Result<(), partywall_measure::Error> {
//! let numbers: Vec<u64> = (0..1000).collect();
//! let result = Comparison::new(
//!     Case::new("sum and sort", Unit::Microseconds).parameter("numbers", numbers.len()),
//!     timed(Unit::Microseconds, || {
//!         let mut copy = numbers.clone();
//!         copy.sort_unstable();
//!         std::hint::black_box(copy.iter().sum::<u64>());
//!         Ok(())
//!     }),
//! )
//! .floor(
//!     Case::new("sum", Unit::Microseconds),
//!     timed(Unit::Microseconds, || {
//!         std::hint::black_box(numbers.iter().sum::<u64>());
//!         Ok(())
//!     }),
//! )
//! .goal("<= floor + 1 s".parse()?)
//! .run(Plan::new(200).warm_up(20))?;
//!
//! let mut report = Report::new("an example", Machine::detect(None, None));
//! report.push(result);
//! assert!(report.all_met());
//! std::fs::write(std::env::temp_dir().join("sum-and-sort.html"), report.page()?).unwrap();
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod case;
mod chart;
mod compare;
mod comparison;
mod error;
mod goal;
mod machine;
mod page;
mod percentiles;
mod report;

pub use case::{Case, Plan, Sampler, Unit, timed};
pub use chart::{Chart, Line, Point, Rows, bytes};
pub use compare::{Change, Differences};
pub use comparison::{Comparison, ComparisonResult, Measurement};
pub use error::{Error, Failure};
pub use goal::{Goal, Verdict};
pub use machine::{Machine, commit, kernel_release, today};
pub use page::capital;
pub use percentiles::Percentiles;
pub use report::{Report, figure};
