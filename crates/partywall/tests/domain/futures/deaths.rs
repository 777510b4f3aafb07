// Holds 378.
//! Deaths of peers and of the broker, and lost connections, while futures wait.

use std::time::Duration;

use partywall::{
    Domain, Error, Policy, Task, Then, TimelineEnding, WatchEvent,
    error::{Gone, Unreachable},
    info::NameEvent,
};
use partywall_harness::{Sandbox, cut_connections, kill, linger, place, say};

use super::{
    super::world::{World, commit, eventually, value as committed},
    Polled, publish, queue, runtimes, soon, submit, topic, value,
};

/// The roles of the other processes.
pub(crate) fn play(role: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    match role {
        // Has everything that others wait for.
        "futures holder" => {
            let publisher = topic(&domain).publisher().unwrap();
            publish(&publisher, 7);
            let _permit = domain.semaphore("seats", 1).unwrap().acquire(Duration::ZERO).unwrap();
            let _task = queue(&domain).claim(Duration::ZERO).unwrap();
            let writer = domain.timeline_writer("steps").unwrap();
            writer.signal(1).unwrap();
            linger();
        }
        // Waits across lost connections.
        "futures survivor" => {
            let [_, runtime] = runtimes();
            let mut watch = domain.watch("late").unwrap();
            runtime.block_on(async {
                let semaphore = domain.semaphore("seats", 1).unwrap();
                let dropped = tokio::spawn({
                    let domain = domain.clone();
                    async move { domain.open_async("late").await.map(drop) }
                });
                let open = tokio::spawn({
                    let domain = domain.clone();
                    async move { committed(&domain.open_async("late").await.unwrap()) }
                });
                let acquire = tokio::spawn(async move { semaphore.acquire_async().await.map(drop) });
                let happened = tokio::spawn(async move { watch.next_async().await });
                tokio::task::spawn_blocking(linger).await.unwrap();
                cut_connections();
                dropped.abort();
                say("cut");
                assert_eq!(soon(open).await.unwrap(), 7);
                let Ok(WatchEvent::Name(NameEvent { name, .. })) = soon(happened).await.unwrap() else {
                    panic!("an event is missing");
                };
                soon(acquire).await.unwrap().unwrap();
                say(&format!("happened {name}"));
            });
            linger();
        }
        _ => panic!("{role}"),
    }
}

#[test]
fn futures_end_when_the_peer_is_killed() {
    for runtime in runtimes() {
        let world = World::new();
        let domain = world.connect();
        let subscriber = topic(&domain).subscribe(Policy::Block).until_idle(true).join().unwrap();
        let queue = queue(&domain);
        let ticket = submit(&queue);
        let mut peer = world.play_until("futures holder", "ready");
        let semaphore = domain.semaphore("seats", 1).unwrap();
        let timeline = domain.timeline("steps").unwrap();
        runtime.block_on(async {
            assert_eq!(value(&soon(subscriber.recv_async()).await.unwrap()), 7);
            let received = subscriber.recv_async();
            let claimed = async { queue.claim_async().await.unwrap().complete() };
            let kill = async {
                // Polled last, so all others wait by now.
                assert_eq!(semaphore.waiting(), 1);
                peer.kill();
            };
            let (received, claimed, result, permit, reached, ()) = soon(async {
                tokio::join!(
                    received,
                    claimed,
                    ticket.wait_async(),
                    semaphore.acquire_async(),
                    timeline.wait_async(2),
                    kill
                )
            })
            .await;
            assert!(matches!(received, Err(Error::Gone(Gone::TopicIdle { .. }))));
            claimed.unwrap();
            assert_eq!(result.unwrap().attempt(), 2, "the killed worker had the first");
            drop(permit.unwrap());
            assert!(matches!(reached, Err(Error::Gone(Gone::Timeline { last: 1, .. }))));
        });
    }
}

#[test]
fn all_futures_end_with_the_broker() {
    for runtime in runtimes() {
        let mut world = World::new();
        let domain = world.connect();
        let subscriber = topic(&domain).subscriber(Policy::Block).unwrap();
        let queue = queue(&domain);
        let tickets: Vec<_> = (0..8).map(|_| submit(&queue)).collect();
        let claimed: Vec<_> = queue.claims(Duration::ZERO).map(Result::unwrap).collect();
        let pool = domain.pool("blocks").blocks(1).block_bytes(64).place(place()).create().unwrap();
        let semaphore = domain.semaphore("seats", 1).unwrap();
        let _held = (semaphore.try_acquire().unwrap(), pool.try_alloc().unwrap());
        let _writer = domain.timeline_writer("steps").unwrap();
        let timeline = domain.timeline("steps").unwrap();
        let mut watch = domain.watch("*").unwrap();
        let waits = |domain: &Domain| domain.members().unwrap().iter().map(|member| member.waits.len()).sum::<usize>();
        let (opening, watching) = (domain.clone(), domain.clone());
        runtime.block_on(async {
            let open = tokio::spawn(async move { opening.open_async("never").await.map(drop) });
            let end = async {
                while waits(&watching) == 0 {
                    tokio::task::yield_now().await;
                }
                world.end_broker();
            };
            let (received, claim, result, submitted, permit, block, reached, event, ()) = soon(async {
                tokio::join!(
                    subscriber.recv_async(),
                    queue.claim_async(),
                    tickets[0].wait_async(),
                    queue.submit_async(Task::new("late")),
                    semaphore.acquire_async(),
                    pool.alloc_async(),
                    timeline.wait_async(1),
                    watch.next_async(),
                    end
                )
            })
            .await;
            let errors = [
                received.map(drop).unwrap_err(),
                claim.map(drop).unwrap_err(),
                result.map(drop).unwrap_err(),
                submitted.map(drop).map_err(|refused| refused.error).unwrap_err(),
                permit.map(drop).unwrap_err(),
                block.map(drop).unwrap_err(),
                event.map(drop).unwrap_err(),
                soon(open).await.unwrap().unwrap_err(),
            ];
            for error in errors {
                assert!(matches!(error, Error::Unreachable(Unreachable::Gone { .. })), "{error}");
            }
            let ended = matches!(reached, Err(Error::Gone(Gone::Timeline { ending: TimelineEnding::BrokerGone, .. })));
            assert!(ended, "the timeline ends");
        });
        drop(claimed);
    }
}

#[test]
fn futures_end_when_the_version_is_stale() {
    let world = World::new();
    let domain = world.connect();
    let subscriber = topic(&domain).subscriber(Policy::Block).unwrap();
    let queue = queue(&domain);
    let pool = domain.pool("blocks").blocks(1).block_bytes(64).place(place()).create().unwrap();
    let _block = pool.try_alloc().unwrap();
    let (received, claimed, taken) = (subscriber.recv_async(), queue.claim_async(), pool.alloc_async());
    let (received, claimed, taken) =
        (Polled::new(received).pending(), Polled::new(claimed).pending(), Polled::new(taken).pending());
    for name in ["frames", "work", "blocks"] {
        world.connect().withdraw(name, Duration::ZERO, Then::Stale).unwrap();
    }
    let errors = [
        received.complete().map(drop).unwrap_err(),
        claimed.complete().map(drop).unwrap_err(),
        taken.complete().map(drop).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, Error::Gone(Gone::Withdrawn { .. })), "{error}");
    }
}

#[test]
fn futures_wait_on_when_the_connection_is_renewed() {
    let world = World::new();
    let domain = world.connect();
    let semaphore = domain.semaphore("seats", 1).unwrap();
    let permit = semaphore.try_acquire().unwrap().unwrap();
    let mut survivor = world.play("futures survivor");
    let waits = || domain.members().unwrap().iter().map(|member| member.waits.len()).sum::<usize>();
    eventually("all wait", || semaphore.waiting() == 1 && waits() >= 2);
    survivor.proceed();
    survivor.expect("cut");
    let _committed = commit(&domain, "late", 7, true);
    drop(permit);
    assert!(survivor.expect("happened").contains("late"));
    // The opened version was dropped, and nothing was granted to the future that was aborted.
    let holders = || domain.inspect("late").unwrap().holders.len();
    eventually("the survivor has nothing open", || holders() == 1);
    survivor.kill();
}

#[test]
fn futures_wait_on_when_the_broker_is_killed_and_restarted() {
    for runtime in runtimes() {
        let sandbox = Sandbox::new();
        let domain = sandbox.domain();
        let other = sandbox.domain();
        let subscriber = topic(&domain).subscriber(Policy::Block).unwrap();
        let publisher = topic(&other).publisher().unwrap();
        let queue = queue(&domain);
        let semaphore = domain.semaphore("seats", 1).unwrap();
        let permit = semaphore.try_acquire().unwrap();
        let mut watch = domain.watch("late").unwrap();
        let waits = || other.members().unwrap().iter().map(|member| member.waits.len()).sum::<usize>();
        let leases = other.status().unwrap().leases;
        runtime.block_on(async {
            let opening = domain.clone();
            let dropped = tokio::spawn(async move { opening.open_async("late").await.map(drop) });
            let restart = async {
                while (semaphore.waiting(), waits()) < (1, 2) {
                    tokio::task::yield_now().await;
                }
                let status = other.status().unwrap();
                kill(status.pid);
                dropped.abort();
                eventually("it is restarted", || other.status().is_ok_and(|now| now.restarts == 1));
                publish(&publisher, 7);
                drop(permit);
                (commit(&other, "late", 7, false), submit(&queue))
            };
            let claim = async { queue.claim_async().await.unwrap().complete() };
            let (opened, received, claimed, permit, event, (committed_late, ticket)) = soon(async {
                tokio::join!(
                    domain.open_async("late"),
                    subscriber.recv_async(),
                    claim,
                    semaphore.acquire_async(),
                    watch.next_async(),
                    restart
                )
            })
            .await;
            assert_eq!((committed(&opened.unwrap()), value(&received.unwrap())), (7, 7));
            claimed.unwrap();
            drop((permit.unwrap(), event.unwrap(), committed_late));
            assert_eq!(soon(ticket.wait_async()).await.unwrap().attempt(), 1);
        });
        eventually("nothing stays open", || other.status().unwrap().leases == leases);
    }
}
