// Holds 183.
#![allow(clippy::unwrap_used, reason = "what is said of tests holds for their helpers")]

use std::sync::atomic::{AtomicU64, Ordering};

use partywall_os::map::SharedMap;
use proptest::{collection::vec, prelude::*};

use super::*;
use crate::{
    members::NOBODY,
    slots::{HeldSlot, SlotAudit},
};

fn pool(blocks: u32) -> Pool {
    Pool::map(Pool::create(blocks).unwrap()).unwrap()
}

fn idle(blocks: u32) -> SlotAudit {
    SlotAudit { free: blocks, ..SlotAudit::default() }
}

#[test]
fn retaken_block_has_another_generation() {
    let pool = pool(1);
    let first = pool.try_take(1).unwrap();
    assert!(pool.is_current(0, first.generation()));
    pool.free(&first).unwrap();
    assert!(!pool.is_current(0, first.generation()));
    let second = pool.try_take(1).unwrap();
    assert_eq!((second.index(), pool.holders()), (0, vec![(1, 1)]));
    assert_ne!(first.generation(), second.generation());
    assert!(pool.free(&first).is_err(), "it is not the same");
    assert!(!pool.is_current(0, first.generation()) && pool.is_current(0, second.generation()));
    assert!(!pool.is_current(1, second.generation()), "there is no such block");
    pool.free(&second).unwrap();
}

#[test]
fn an_offered_block_is_taken_over_once() {
    let pool = pool(2);
    let given = pool.try_take(1).unwrap();
    let index = given.index();
    let generation = given.generation();
    assert_eq!(pool.accept(2, index, generation), None, "it is held");
    pool.offer(&given).unwrap();
    assert!(pool.offer(&given).is_err() && pool.free(&given).is_err(), "it is not held any more");
    assert!(pool.is_current(index, generation));
    assert_eq!(pool.audit(), SlotAudit { free: 1, offered: 1, ..SlotAudit::default() });
    assert_eq!(pool.holders(), [(1, 1)], "it is its giver's");
    for (index, generation) in [(index, generation + 1), (index + 1, generation), (9, generation), (u32::MAX, 0)] {
        assert_eq!(pool.accept(2, index, generation), None);
    }
    let taken = pool.accept(2, index, generation).unwrap();
    assert_eq!(pool.accept(3, index, generation), None, "it is stale");
    assert_ne!(taken.generation(), generation);
    assert_eq!(pool.holders(), [(2, 1)]);
    assert_eq!(pool.recover(|row| row == 1), 0, "it is not its giver's any more");
    pool.free(&taken).unwrap();
    assert_eq!(pool.audit(), idle(2));
}

#[test]
fn offered_blocks_of_the_dead_come_back() {
    let pool = pool(1);
    let given = pool.try_take(1).unwrap();
    let index = given.index();
    let generation = given.generation();
    pool.offer(&given).unwrap();
    assert_eq!(pool.recover(|row| row == 2), 0);
    assert_eq!(pool.recover(|row| row == 1), 1);
    assert_eq!(pool.accept(2, index, generation), None);
    assert_eq!(pool.audit(), idle(1));
}

#[test]
fn a_published_block_survives_its_publisher() {
    let pool = pool(2);
    let [published, held] = [(); 2].map(|()| pool.try_take(1).unwrap());
    let seen = pool.publish(published.index(), published.word()).unwrap();
    assert!(pool.free(&published).is_err() && pool.offer(&published).is_err());
    assert!(pool.is_current(published.index(), published.generation()));
    assert_eq!(pool.recover(|row| row == 1), 1);
    assert!(pool.free(&held).is_err());
    assert_eq!((pool.audit(), pool.holders()), (SlotAudit { free: 1, published: 1, ..SlotAudit::default() }, vec![]));
    pool.free_seen(published.index(), seen).unwrap();
    assert!(pool.free_seen(published.index(), seen).is_err(), "it is free");
    assert_eq!(pool.audit(), idle(2));
}

#[test]
fn pool_has_one_to_65536_blocks() {
    assert_eq!(Pool::create(0).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    assert!(Pool::create(MAX_BLOCKS + 1).is_err());
    assert_eq!(Pool::map(Pool::create(MAX_BLOCKS).unwrap()).unwrap().count(), MAX_BLOCKS);
}

#[derive(Debug, Clone)]
enum Step {
    Alloc(u16),
    Free(usize),
    Offer(usize),
    Accept(usize, u16),
    Publish(usize),
    Retire(usize),
    Die(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let row = 0..4_u16;
    let any = any::<usize>();
    prop_oneof![
        4 => row.clone().prop_map(Step::Alloc),
        2 => any.prop_map(Step::Free),
        2 => any.prop_map(Step::Offer),
        2 => (any, row.clone()).prop_map(|(any, row)| Step::Accept(any, row)),
        1 => any.prop_map(Step::Publish),
        1 => any.prop_map(Step::Retire),
        1 => row.prop_map(Step::Die),
    ]
}

fn pick<T>(from: &mut Vec<T>, any: usize) -> Option<T> {
    (!from.is_empty()).then(|| from.remove(any % from.len()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// One thread acts for all members, so each step has one correct outcome.
    #[test]
    fn it_is_what_the_model_is(blocks in 1..6_u32, steps in vec(step(), 1..200)) {
        let pool = pool(blocks);
        let mut held = Vec::<(u16, HeldSlot)>::new();
        let mut offered = Vec::<(u16, HeldSlot)>::new();
        let mut published = Vec::new();
        let mut stale = Vec::new();
        let mut generations = std::collections::BTreeSet::new();
        for step in steps {
            match step {
                Step::Alloc(row) => {
                    let used = held.len() + offered.len() + published.len();
                    let got = pool.try_take(row);
                    prop_assert_eq!(got.is_some(), used < blocks as usize);
                    if let Some(got) = got {
                        prop_assert!(generations.insert(got.generation()), "never twice");
                        held.push((row, got));
                    }
                }
                Step::Free(any) => if let Some((_, got)) = pick(&mut held, any) {
                    prop_assert!(pool.free(&got).is_ok());
                    stale.push(got);
                }
                Step::Offer(any) => if let Some((row, got)) = pick(&mut held, any) {
                    prop_assert!(pool.offer(&got).is_ok());
                    offered.push((row, got));
                }
                Step::Accept(any, row) => if let Some((_, given)) = pick(&mut offered, any) {
                    let taken = pool.accept(row, given.index(), given.generation()).unwrap();
                    prop_assert!(generations.insert(taken.generation()), "never twice");
                    prop_assert_eq!(taken.index(), given.index());
                    held.push((row, taken));
                    stale.push(given);
                }
                Step::Publish(any) => if let Some((_, got)) = pick(&mut held, any) {
                    published.push((got.index(), pool.publish(got.index(), got.word()).unwrap()));
                    // A holder no longer has a block that it has published.
                    prop_assert!(pool.free(&got).is_err() && pool.offer(&got).is_err());
                }
                Step::Retire(any) => if let Some((index, seen)) = pick(&mut published, any) {
                    prop_assert!(pool.free_seen(index, seen).is_ok());
                }
                Step::Die(dead) => {
                    let gone = held.extract_if(.., |(row, _)| *row == dead)
                        .chain(offered.extract_if(.., |(row, _)| *row == dead)).map(|(_, got)| got);
                    let before = stale.len();
                    stale.extend(gone);
                    prop_assert_eq!(pool.recover(|row| row == dead) as usize, stale.len() - before);
                }
            }
            for old in &stale {
                prop_assert!(!pool.is_current(old.index(), old.generation()) && pool.free(old).is_err() && pool.offer(old).is_err());
                prop_assert_eq!(pool.accept(9, old.index(), old.generation()), None);
            }
            let in_hands = held.len() as u32;
            let in_transit = offered.len() as u32;
            let in_topic = published.len() as u32;
            prop_assert_eq!(pool.audit(), SlotAudit {
                free: blocks - in_hands - in_transit - in_topic,
                held: in_hands, offered: in_transit, published: in_topic,
                ..SlotAudit::default()
            });
        }
    }

    /// A broken or hostile member may leave any bytes: every call terminates without a panic, and the broker recovers
    /// everything.
    // Holds 158.
    #[test]
    fn any_bytes_can_be_recovered(
        words in vec((any::<prop::sample::Index>(), any::<u64>(), 0..5_u64), 1..400),
        blocks in 1..20_u32,
    ) {
        let fd = Pool::create(blocks).unwrap();
        let pool = Pool::map(&fd).unwrap();
        let map = SharedMap::writable(&fd).unwrap();
        // Behind the header, which is read only when the memory is mapped.
        let all = map.atomics::<AtomicU64>(64, map.len() / 8 - 8).unwrap();
        for (index, word, sort) in words {
            // Plausible but wrong words find more errors than noise.
            let word = match sort {
                0 => word,
                1 => word & 0xff,
                2 => (word & 0x3ff) << 18 | (word >> 32 & 3),
                3 => u64::from(NOBODY) << 2 | (word & 3) | (word >> 32 & 0xff) << 18,
                _ => (word & 3) << 34 | (word & 0xf_0000) | (word >> 60 & 3),
            };
            all[index.index(all.len())].store(word, Ordering::Relaxed);
        }
        pool.audit();
        pool.holders();
        for index in 0..=blocks {
            for generation in 0..4 {
                pool.is_current(index, generation);
                if let Some(held) = pool.accept(2, index, generation) {
                    pool.offer(&held).unwrap();
                }
            }
        }
        if let Some(held) = pool.try_take(1) {
            pool.free(&held).unwrap();
        }
        pool.revoke_overdue();
        pool.recover_or_publish(|row| row % 2 == 0, |index, seen| index % 2 == 0 && seen.ticket() > 4);
        pool.recover(|_| true);
        prop_assert_eq!(pool.audit(), idle(blocks));
        let held = pool.try_take(3).expect("all are free, and nobody waits");
        prop_assert!(pool.free(&held).is_ok());
    }
}
