//! The commands: each file holds the arguments of one and its `run`.

pub(crate) mod abandon;
pub(crate) mod completions;
pub(crate) mod cp;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod evict;
pub(crate) mod explain;
pub(crate) mod get;
pub(crate) mod logs;
pub(crate) mod ls;
pub(crate) mod man;
pub(crate) mod metrics;
pub(crate) mod mps;
pub(crate) mod ps;
pub(crate) mod put;
pub(crate) mod queue;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod show;
pub(crate) mod status;
pub(crate) mod stop;
pub(crate) mod top;
pub(crate) mod topic;
pub(crate) mod trace;
pub(crate) mod watch;
