//! The columns of members.

use partywall::info::MemberInfo;

use crate::{
    describe,
    table::{Cell, Column},
};

type Col = Column<MemberInfo>;

/// Of `ps`.
pub(crate) const PS: &[Col] =
    &[PID, UID, MEMBER, STATE, HOLDS, LEASES, TIMELINES, PERMITS, BLOCKS, TASKS, HEARTBEAT, SINCE, WAITS, COMMAND];

/// Of `status`.
pub(crate) const STATUS: &[Col] = &[PID, LEASES, HOLDS, SINCE, STATE, COMMAND];

/// Of `top`.
pub(crate) const TOP: &[Col] =
    &[PID, STATE, BEAT, HOLDS, LEASES, BLOCKS, PERMITS, TIMELINES, SINCE, MPS, ALL_WAITS, COMMAND];

const PID: Col = Col::right("PID", |member| member.pid.into());
const UID: Col = Col::right("UID", |member| member.uid.into()).spare(1);
const MEMBER: Col = Col::right("MEMBER", |member| member.member.into()).spare(2);
const STATE: Col = Col::left("STATE", |member| describe::state(member.state).into());
const HOLDS: Col = Col::right("HOLDS", |member| Cell::bytes(member.bytes));
const LEASES: Col = Col::right("LEASES", |member| member.leases.into()).spare(10);
const TIMELINES: Col = Col::right("TIMELINES", |member| member.timelines.into()).spare(4);
const PERMITS: Col = Col::right("PERMITS", |member| Cell::or_many(member.permits)).spare(3);
const BLOCKS: Col = Col::right("BLOCKS", |member| Cell::or_many(member.blocks)).spare(6);
const TASKS: Col = Col::right("TASKS", |member| Cell::or_many(member.tasks)).spare(5);
const HEARTBEAT: Col = Col::right("HEARTBEAT", |member| member.quiet.map(Cell::seconds).into()).spare(7);
const BEAT: Col = HEARTBEAT.headed("BEAT").spare(0);
const SINCE: Col = Col::right("SINCE", |member| member.since(member.since)).spare(8);
const MPS: Col = Col::left("MPS", |member| member.long_name(member.mps.as_deref().unwrap_or_default())).spare(9);
const COMMAND: Col = Col::left("COMMAND", |member| describe::command(&member.command, describe::LONG).into());

/// The waits for names and timelines.
const WAITS: Col =
    Col::left("WAITS FOR", |member| member.waits.iter().map(describe::wait).collect::<Vec<_>>().join(", ").into())
        .spare(11);

/// The note: the waits for blocks and permits as well.
const ALL_WAITS: Col = Col::left("WAITS FOR", |member| member.note.as_str().into());
