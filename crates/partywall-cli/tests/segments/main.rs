//! Commands for segments and their names, which `cargo xtask test` also runs with segments on a simulated GPU.
#![allow(clippy::unwrap_used, reason = "helpers of tests are outside #[test]")]

mod members;
mod names;
mod put_get;
mod watch;
