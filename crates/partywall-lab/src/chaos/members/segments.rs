//! Members that use segments and names.

use partywall::{OpenOrBuild, WatchEvent, error::NotFound, info::Change};

use super::*;
use crate::weights::tensors;

pub(in crate::chaos) fn writer(member: &mut Member<'_>) -> Result<(), Failure> {
    let mut patterns = tensors::Patterns::default();
    member.begins()?;
    while member.goes_on()? {
        let number = member.number();
        commit(member, &mut patterns, number)?;
    }
    Ok(())
}

fn commit(member: &Member<'_>, patterns: &mut tensors::Patterns, number: u64) -> Result<(), Failure> {
    member.history.add(What::Writing { number })?;
    let mut build = match member.call("allocate", || tensors::create(member.session, number, 1).allocate())? {
        Some(build) => build,
        None => return Ok(()),
    };
    if member.call("write", || patterns.write(&mut build, number, tensors::TENSORS))?.is_none() {
        return Ok(());
    }
    let began = Moment::now();
    if let Some(segment) = member.call("commit", || build.commit())? {
        member.history.add(What::Committed { number, version: segment.version(), began })?;
        member.call("release", || segment.release())?;
    }
    Ok(())
}

pub(in crate::chaos) fn reader(member: &mut Member<'_>) -> Result<(), Failure> {
    let mut patterns = tensors::Patterns::default();
    member.begins()?;
    while member.goes_on()? {
        let began = Moment::now();
        let Some(segment) = member.call("open", || member.domain().open(WEIGHTS, LIMIT))? else { continue };
        if let Some((number, whole)) = member.call("check", || patterns.check(&segment))? {
            member.history.add(What::Read { number, version: segment.version(), whole, began })?;
        }
        member.call("release", || segment.release())?;
    }
    Ok(())
}

pub(in crate::chaos) fn watcher(member: &mut Member<'_>) -> Result<(), Failure> {
    let Some(mut watch) = member.call("watch", || member.domain().watch(WEIGHTS))? else {
        return Ok(());
    };
    member.history.add(What::Watching)?;
    member.begins()?;
    let mut ends = false;
    loop {
        ends = ends || member.ends()?;
        // All writers have left before the watchers are asked to end.
        let limit = if ends { Duration::ZERO } else { MOMENT };
        match member.call("next", || watch.next(limit))?.flatten() {
            Some(WatchEvent::Name(event)) => {
                if let Change::Committed { version, .. } = event.change {
                    member.history.add(What::Saw { version })?;
                }
            }
            Some(_) => member.history.add(What::Gap)?,
            None if ends => break,
            None => {}
        }
    }
    Ok(())
}

/// Builds an owned name or opens it, whichever comes first, and waits a moment for a name that nobody commits.
pub(in crate::chaos) fn builder(member: &mut Member<'_>) -> Result<(), Failure> {
    let place = member.session.place;
    member.begins()?;
    while member.goes_on()? {
        let number = member.number();
        let limit = if member.below(2) == 0 { SHORT } else { TIMEOUT };
        let turn = member.call("open_or_build", || member.domain().open_or_build(BUILT, limit))?;
        let claim = match turn {
            Some(OpenOrBuild::Build(claim)) => claim,
            Some(OpenOrBuild::Opened(segment)) => {
                read_built(member, &segment)?;
                continue;
            }
            None => {
                let open = || match member.domain().open(NEVER, SHORT) {
                    Err(Error::NotFound(NotFound::Name { .. })) => Ok(()),
                    opened => opened.map(drop),
                };
                member.call("open", open)?;
                continue;
            }
        };
        member.history.add(What::Claimed)?;
        let mut build = member.call("allocate", || {
            claim.create(place).tensor("x", DType::U64, &[WORDS]).metadata("number", &number.to_string()).allocate()
        })?;
        if let Some(build) = &mut build {
            member.insist("write", || build.write("x", &number.to_le_bytes().repeat(WORDS as usize)))?;
        }
        member.history.add(What::Ending { number })?;
        // Some claims are given back unused.
        let Some(build) = build.filter(|_| member.below(4) > 0) else { continue };
        if let Some(segment) = member.call("commit", || build.commit())? {
            thread::sleep(PAUSE);
            member.call("release", || segment.release())?;
        }
    }
    Ok(())
}

fn read_built(member: &Member<'_>, segment: &Segment) -> Result<(), Failure> {
    let number = segment.metadata().find(|(key, _)| *key == "number").and_then(|(_, number)| number.parse().ok());
    let number: u64 = number.ok_or_else(|| unexpected("the built name has no number"))?;
    let tensor = segment.tensor("x")?;
    if let Some(bytes) = member.call("read", || tensor.to_vec())? {
        let whole = bytes == number.to_le_bytes().repeat(WORDS as usize);
        member.history.add(What::Opened { number, whole })?;
    }
    Ok(())
}
