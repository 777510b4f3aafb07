//! Members that use permits and blocks.

use partywall::{BlockRef, error::Gone};

use super::*;

pub(in crate::chaos) fn holder(member: &mut Member<'_>) -> Result<(), Failure> {
    let Some(permits) = member.call("open", || member.domain().semaphore(PERMITS, PERMITS_MOST))? else {
        return Ok(());
    };
    member.begins()?;
    while member.goes_on()? {
        let kind = member.below(4);
        let acquire = || match kind {
            0 => permits.try_acquire(),
            1 => permits.acquire(SHORT).map(Some),
            _ => permits.acquire(TIMEOUT).map(Some),
        };
        let Some(permit) = member.call("acquire", acquire)?.flatten() else { continue };
        member.history.add(What::Acquired)?;
        thread::sleep(PAUSE);
        member.history.add(What::Releasing)?;
        member.call("release", || permit.release())?;
    }
    Ok(())
}

/// Takes blocks, marks them, and gives them back or offers them. Takers leave the references to offered blocks in the
/// words of a segment, where each of them may accept them.
pub(in crate::chaos) fn taker(member: &mut Member<'_>) -> Result<(), Failure> {
    let place = member.session.place;
    let Some(pool) = member.call("open", || member.domain().pool(BLOCKS).timeout(LIMIT).open())? else {
        return Ok(());
    };
    let open = || member.domain().opener(MAIL).read_write().timeout(LIMIT).open();
    let Some(mail) = member.call("open", open)? else { return Ok(()) };
    let mail = mail.tensor("x")?.shared::<u64>()?;
    member.begins()?;
    // What it has offered and nobody may have accepted.
    let mut offered: Option<BlockRef> = None;
    while member.goes_on()? {
        let mark = member.number();
        let kind = member.below(5);
        let reference = match (offered.take(), kind) {
            (Some(offered), _) => Some(offered),
            (None, 0) => letter(&pool, mail.get(member.below(MAIL_WORDS) as usize))?,
            _ => None,
        };
        let accept = |reference: &BlockRef| match pool.accept(reference) {
            Err(Error::Gone(Gone::Block { .. })) => Ok(None),
            accepted => accepted.map(Some),
        };
        let take = || match (&reference, kind) {
            (Some(reference), _) => accept(reference),
            (None, 1) => pool.try_alloc(),
            (None, 2) => pool.alloc(SHORT).map(Some),
            _ => pool.alloc(TIMEOUT).map(Some),
        };
        let Some(mut block) = member.call("take", take)?.flatten() else { continue };
        member.history.add(What::Took { block: block.index() })?;
        if let Some(reference) = reference {
            let word = member.insist("read", || -> Result<_, Failure> { Ok(word!(block, place, block.device()?)) })?;
            let (block, generation, mark) = (reference.index(), reference.generation(), word.unwrap_or(0));
            member.history.add(What::Accepted { block, generation, mark })?;
        }
        member.insist("fill", || filled!(block, device_mut, place, mark))?;
        thread::sleep(PAUSE);
        let read = || -> Result<_, Failure> { Ok(word!(block, place, block.device()?)) };
        let whole = member.insist("read", read)? == Some(mark);
        let index = block.index();
        member.history.add(What::Giving { block: index, whole })?;
        match member.below(3) {
            0 => {
                if let Some(reference) = member.call("offer", || block.offer())? {
                    let generation = reference.generation();
                    member.history.add(What::Offered { block: index, generation, mark })?;
                    let word = u64::from(index) << 48 | generation;
                    mail.set(member.below(MAIL_WORDS) as usize, word + 1);
                    offered = Some(reference);
                }
            }
            // A block of a GPU would be free only later.
            1 if place == Place::Host => drop(block),
            _ => drop(member.call("release", || block.release())?),
        }
    }
    Ok(())
}

/// Returns the reference in a word of the mail. Generations of a run have fewer than 48 bits, and indices fewer than
/// 16.
fn letter(pool: &partywall::Pool, word: u64) -> Result<Option<BlockRef>, Failure> {
    let Some(word) = word.checked_sub(1) else { return Ok(None) };
    let (index, generation) = (word >> 48, word & ((1 << 48) - 1));
    let text = format!("{BLOCKS}@{}#{index}.{generation}", pool.version());
    Ok(Some(text.parse().map_err(|error: Error| Failure::from(error))?))
}

/// Creates a pool and a topic, or opens those of another maker, and uses them for a moment. They go with their last
/// user.
pub(in crate::chaos) fn maker(member: &mut Member<'_>) -> Result<(), Failure> {
    let place = member.session.place;
    member.begins()?;
    while member.goes_on()? {
        let made = if member.below(2) == 0 { make_pool(member, place)? } else { make_topic(member, place)? };
        if made {
            member.history.add(What::Made)?;
        }
    }
    Ok(())
}

fn make_pool(member: &Member<'_>, place: Place) -> Result<bool, Failure> {
    let pool = member.domain().pool(MADE_POOL).blocks(4).block_bytes(WORDS * 8).place(place).timeout(TIMEOUT);
    let Some(pool) = member.call("open_or_create", || pool.open_or_create())? else { return Ok(false) };
    let Some(block) = member.call("alloc", || pool.alloc(TIMEOUT))? else { return Ok(false) };
    Ok(member.call("release", || block.release())?.is_some())
}

fn make_topic(member: &mut Member<'_>, place: Place) -> Result<bool, Failure> {
    let topic = member.domain().topic(MADE_TOPIC).max_bytes(WORDS * 8).publishers(4).place(place).timeout(TIMEOUT);
    let Some(topic) = member.call("open_or_create", || topic.open_or_create())? else { return Ok(false) };
    let Some(publisher) = member.join("publisher", || topic.publisher())? else { return Ok(false) };
    let Some(loan) = member.call("loan", || publisher.loan(DType::U8, &[1], TIMEOUT))? else { return Ok(false) };
    let publish = || loan.filled().publish(TIMEOUT).map_err(|refused| refused.error);
    Ok(member.call("publish", publish)?.is_some())
}
