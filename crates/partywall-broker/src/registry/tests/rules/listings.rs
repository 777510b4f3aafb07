//! Listings and suggestions.

use super::*;

#[test]
fn unknown_name_suggests_near_ones() {
    let (mut w, [a]) = Watched::with_members();
    ["weights", "weights/v2", "Tokens", "other"].iter().for_each(|n| assert_eq!(w.commit(a, n, true).0, 1));
    let near = |w: &mut Watched, wanted| match w.open(a, wanted, None, false) {
        Err(Refusal::NotFound { near, .. }) => near.iter().map(Name::to_string).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!(near(&mut w, "wieghts"), ["weights"]);
    assert_eq!(near(&mut w, "tokens"), ["Tokens"]);
    assert_eq!(near(&mut w, "wei"), ["weights", "weights/v2"]);
    assert!(near(&mut w, "zzz").is_empty());
}

#[test]
fn listings_come_in_pages_that_fit_a_message() {
    let (mut w, [a]) = Watched::with_members();
    // Applied without the audit, which would make this quadratic.
    for i in 0..1000 {
        let memory = w.memory(&[1], false, false, Lifetime::Kept);
        let name = called(&format!("{i:04}{}", "x".repeat(251)));
        let Asked { call, received } = commit(name, memory).into();
        w.registry.apply(Event::Request { member: a, request: RequestId(i + 1), call, received }, 0);
    }
    let mut after = None;
    let mut seen = Vec::new();
    let mut pages = 0;
    loop {
        let Granted(answer, ..) = w.registry.list(a, after.as_deref());
        let Answer::Names { names, more } = answer else { panic!("names") };
        assert!(names.len() < 150 && !names.is_empty());
        after = names.last().map(|row| row.name.clone());
        seen.extend(names.into_iter().map(|row| row.name));
        pages += 1;
        if !more {
            break;
        }
    }
    assert_eq!((seen.len(), pages > 5, seen.is_sorted()), (1000, true, true));
}

#[test]
fn inspect_returns_everything_about_a_name() {
    let (mut w, [a, b]) = Watched::with_members();
    w.commit(a, "x", true);
    w.opened(b, "x");
    w.commit(b, "x", false);
    let inspect = |w: &mut Watched, version| match w.ask(a, Call::Inspect { name: name("x"), version }).1 {
        Ok(Answer::Info(info)) => *info,
        other => panic!("{other:?}"),
    };
    let info = inspect(&mut w, None);
    assert_eq!((info.version.version, info.is_latest, info.versions.len()), (2, true, 2));
    assert_eq!(info.holders.iter().map(|h| h.pid).collect::<Vec<_>>(), [102]);
    let info = inspect(&mut w, Some(1));
    assert_eq!((info.is_latest, info.holders.len(), info.builder), (false, 2, None));
    w.apply(Event::Died { member: b });
    let info = inspect(&mut w, None);
    assert_eq!((info.version.version, info.is_latest), (1, false), "withdrawn, but a still holds it");
    w.join(MemberId(3));
    w.claim(MemberId(3), "x");
    assert_eq!(inspect(&mut w, None).builder, Some(103));
    assert!(matches!(
        w.ask(a, Call::Inspect { name: name("x"), version: Some(9) }).1,
        Err(Refusal::VersionNotFound { .. })
    ));
}

#[test]
fn members_show_their_state_and_what_they_hold() {
    let (mut w, [a, b, c]) = Watched::with_members();
    w.commit(a, "x", true);
    w.opened(a, "x");
    w.apply(Event::Suspected { member: b });
    w.apply(Event::HeldByChild { member: c });
    let (_, outcome, _) = w.ask(a, Call::Members { after: None });
    let Ok(Answer::Members { members, more: false }) = outcome else { panic!("{outcome:?}") };
    let rows: Vec<_> = members.iter().map(|m| (m.state, m.leases, m.bytes)).collect();
    let expected = [(MemberState::Alive, 2, 10), (MemberState::Suspect, 0, 0), (MemberState::HeldByChild, 0, 0)];
    assert_eq!(rows, expected, "a version counts once however many leases there are");
    let (_, outcome, _) = w.ask(a, Call::Members { after: Some(b) });
    assert!(matches!(outcome, Ok(Answer::Members { members, .. }) if members.len() == 1));
}
