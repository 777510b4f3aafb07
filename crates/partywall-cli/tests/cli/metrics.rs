//! `partywall metrics`, as a user and as Prometheus sees it.

use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet},
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    time::Duration,
};

use partywall::{DType, Domain, Place, Policy, Task, info::Ages};
use partywall_harness::{Running, Sandbox, Signal, eventually};
use serde_json::Value;

const LONG: Duration = Duration::from_secs(60);

/// The series of a page by name and labels. Fails unless each belongs to the family that the lines above it describe.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let mut series = BTreeMap::new();
    let mut family = (String::new(), String::new());
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, words) = help.split_once(' ').unwrap();
            assert!(words.ends_with('.') && !words.ends_with(".."), "{line}");
            family = (name.to_owned(), String::new());
        } else if let Some(described) = line.strip_prefix("# TYPE ") {
            let (name, of_type) = described.split_once(' ').unwrap();
            assert_eq!(name, family.0, "{line}");
            family.1 = of_type.to_owned();
        } else {
            let (key, value) = line.rsplit_once(' ').unwrap();
            let name = key.split('{').next().unwrap();
            assert_eq!(family.1 == "counter", name.ends_with("_total"), "{line}");
            let suffixes: &[&str] = match family.1.as_str() {
                "histogram" => &["_bucket", "_count", "_sum"],
                _ => &[""],
            };
            assert!(suffixes.iter().any(|suffix| name == format!("{}{suffix}", family.0)), "{line}");
            assert!(name.starts_with("partywall_"), "{line}");
            assert!(series.insert(key.to_owned(), value.parse().unwrap()).is_none(), "twice: {line}");
        }
    }
    series
}

fn metrics(sandbox: &Sandbox, arguments: &[&str]) -> BTreeMap<String, f64> {
    let output = sandbox.run(["metrics"].iter().chain(arguments)).expect(0);
    parse(&output.text())
}

fn get(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Starts a server, and returns its address.
fn serve(sandbox: &Sandbox) -> (Running, String) {
    let mut server = sandbox.spawn(["metrics", "--json", "--listen", "127.0.0.1:0"]);
    let told: Value = serde_json::from_str(&server.line()).unwrap();
    let url = told["listening"].as_str().unwrap();
    let address = url.strip_prefix("http://").and_then(|rest| rest.strip_suffix("/metrics")).unwrap();
    (server, address.to_owned())
}

// Holds 321.
#[test]
fn every_object_has_its_series() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let build = domain.create("weights", Place::Host).kept(true).tensor("x", DType::U8, &[5000]);
    let segment = build.allocate().unwrap().commit().unwrap();
    let pool = domain.pool("blocks").blocks(3).block_bytes(10).place(Place::Host).create().unwrap();
    let block = pool.alloc(LONG).unwrap();
    let topic = domain.topic("frames").max_bytes(64).depth(4).place(Place::Host).create().unwrap();
    let subscriber = topic.subscriber(Policy::Latest).unwrap();
    let publisher = topic.publisher().unwrap();
    let publish = || publisher.loan(DType::U8, &[1], LONG).unwrap().filled().publish(LONG).unwrap();
    publish();
    publish();
    drop(subscriber.recv(LONG).unwrap());
    let queue = domain.queue("work").tasks(8).inputs(1, 8).outputs(1, 8).place(Place::Host).create().unwrap();
    let _ticket = queue.submit(Task::new("sqrt"), LONG).unwrap();
    let writer = domain.timeline_writer("steps").unwrap();
    writer.signal(7).unwrap();
    let gate = domain.semaphore("gate", 3).unwrap();
    let permit = gate.acquire(LONG).unwrap();

    let first = metrics(&sandbox, &[]);
    let pid = std::process::id();
    let expected = [
        (r#"up"#.to_owned(), 1),
        (r#"segments{place="host",kind="host",lifetime="kept",named="segment"}"#.to_owned(), 1),
        (r#"pool_blocks{name="blocks",version="1",of="blocks",state="free"}"#.to_owned(), 2),
        (r#"pool_blocks{name="blocks",version="1",of="blocks",state="held"}"#.to_owned(), 1),
        (r#"topic_published_total{name="frames",version="1"}"#.to_owned(), 2),
        (r#"queue_tasks{name="work",version="1",state="pending"}"#.to_owned(), 1),
        (r#"queue_completed_total{name="work",version="1"}"#.to_owned(), 0),
        (r#"timeline_value{name="steps",incarnation="1"}"#.to_owned(), 7),
        (r#"semaphore_permits{name="gate",state="held"}"#.to_owned(), 1),
        (r#"semaphore_permits{name="gate",state="free"}"#.to_owned(), 2),
        (r#"members{state="alive"}"#.to_owned(), 1),
        (r#"deaths_total{proof="process"}"#.to_owned(), 0),
        (r#"names_left_out"#.to_owned(), 0),
    ];
    for (key, value) in expected {
        let found = first.get(&format!("partywall_{key}"));
        assert_eq!(found, Some(&f64::from(value)), "{key} in {first:#?}");
    }
    let missed = |series: &BTreeMap<String, f64>| {
        let mut of = series.iter().filter(|(key, _)| key.starts_with("partywall_topic_missed_total{"));
        let (key, value) = of.next().expect("there is a subscriber");
        assert!(key.contains(&format!(r#"pid="{pid}""#)) && of.next().is_none(), "{key}");
        *value
    };
    assert_eq!(missed(&first), 1.0, "it takes the latest of two");
    let bytes: f64 = first.iter().filter(|(key, _)| key.starts_with("partywall_bytes{")).map(|(_, bytes)| bytes).sum();
    assert!(bytes >= 5000.0, "{first:#?}");

    publish();
    queue.claim(LONG).unwrap().complete().unwrap();
    let second = metrics(&sandbox, &[]);
    for (key, before) in first.iter().filter(|(key, _)| key.split('{').next().unwrap().ends_with("_total")) {
        assert!(second[key] >= *before, "{key} went back");
    }
    // The first page was the first question about ages.
    assert!(!first.keys().any(|key| key.contains("latency")), "{first:#?}");
    drop(subscriber.recv(LONG).unwrap());
    let third = metrics(&sandbox, &[]);
    let ages: Vec<_> = third.iter().filter(|(key, _)| key.starts_with("partywall_topic_latency_seconds")).collect();
    let value = |part: &str| {
        let (key, value) = ages.iter().find(|(key, _)| key.contains(part)).expect("there are ages");
        assert!(key.contains(&format!(r#"name="frames",version="1",subscriber="1",pid="{pid}""#)), "{key}");
        **value
    };
    assert_eq!((value("_count{"), value("le=\"+Inf\"")), (1.0, 1.0), "{ages:?}");
    assert!(value("_sum{") > 0.0 && ages.len() == Ages::BOUNDS + 3, "{ages:?}");
    assert_eq!(second[r#"partywall_queue_completed_total{name="work",version="1"}"#], 1.0);

    let few = metrics(&sandbox, &["--max-names", "1"]);
    assert_eq!(few["partywall_names_left_out"], 3.0, "two of the pool, topic and queue, one of two others: {few:#?}");
    assert_eq!(few.keys().filter(|key| key.contains("pool_waiting")).count(), 1, "{few:#?}");
    drop((segment, block, subscriber, writer, permit));
}

/// Returns the names of metrics in a text.
fn names_in(text: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
    text.split(|c| !is_part(c)).filter(|word| word.starts_with("partywall_") && !word.ends_with('_')).collect()
}

/// Returns the name of the histogram to which a series belongs, or the series' own.
fn family_of(series: &str) -> &str {
    ["_bucket", "_count", "_sum"].iter().find_map(|suffix| series.strip_suffix(suffix)).unwrap_or(series)
}

#[test]
fn dashboard_and_page_name_metrics_that_are_there() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let _objects = populate(&domain);
    let series = metrics(&sandbox, &[]);
    let there: BTreeSet<_> = series.keys().map(|key| family_of(key.split('{').next().unwrap())).collect();
    let documented = names_in(include_str!("../../../../docs/metrics.md"));
    // A member on a GPU beats, and pinned memory needs a driver; here is neither. Idle times need a page before.
    let others = BTreeSet::from([
        "partywall_heartbeat_age_seconds",
        "partywall_timeline_idle_seconds",
        "partywall_user_leases_limit",
        "partywall_user_pinned_bytes",
        "partywall_user_pinned_limit",
    ]);
    assert_eq!(documented, there.union(&others).copied().collect());
    let shown = names_in(include_str!("../../../../docs/grafana.json"));
    let shown: BTreeSet<_> = shown.into_iter().map(family_of).collect();
    assert!(shown.len() > 10 && shown.is_subset(&documented), "{:?}", shown.difference(&documented));
}

/// Creates one of each object that has series, a subscriber with ages among them.
fn populate(domain: &Domain) -> Box<dyn Any> {
    let topic = domain.topic("frames").max_bytes(64).depth(4).place(Place::Host).create().unwrap();
    let subscriber = topic.subscribe(Policy::Latest).measure_ages(true).join().unwrap();
    let publisher = topic.publisher().unwrap();
    publisher.loan(DType::U8, &[1], LONG).unwrap().filled().publish(LONG).unwrap();
    drop(subscriber.recv(LONG).unwrap());
    let queue = domain.queue("work").tasks(8).inputs(1, 8).outputs(1, 8).place(Place::Host).create().unwrap();
    let writer = domain.timeline_writer("steps").unwrap();
    let gate = domain.semaphore("gate", 3).unwrap();
    Box::new((topic, subscriber, publisher, queue, writer, gate))
}

// Holds 320.
#[test]
fn needs_prometheus_whose_checker_has_nothing_to_say() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let objects = populate(&domain);
    let page = sandbox.run(["metrics"]).expect(0).stdout;
    let mut check = Running::spawn(sandbox.program("promtool").args(["check", "metrics"]));
    check.stdin().write_all(&page).unwrap();
    let checked = check.wait().expect(0);
    assert_eq!((checked.text(), checked.stderr), (String::new(), String::new()));
    drop(objects);
}

// Holds 320.
#[test]
fn needs_prometheus_which_scrapes_each_metric_with_its_help() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let objects = populate(&domain);
    let (_server, address) = serve(&sandbox);
    let config = format!(
        "global: {{scrape_interval: 1s}}\nscrape_configs: [{{job_name: x, static_configs: [{{targets: ['{address}']}}]}}]\n"
    );
    let config = sandbox.file("prometheus.yml", config);
    // Another process may take the port before Prometheus does, but hardly so soon.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut prometheus = sandbox.program("prometheus");
    prometheus.arg(format!("--config.file={}", config.display())).arg(format!("--web.listen-address={port}"));
    prometheus.arg(format!("--storage.tsdb.path={}", sandbox.path().join("series").display()));
    let _prometheus = Running::spawn(&mut prometheus);
    let ask = |path: &str| -> Option<Value> {
        let mut stream = TcpStream::connect(&port).ok()?;
        stream.write_all(format!("GET /api/v1/{path} HTTP/1.0\r\n\r\n").as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    };
    let page = sandbox.run(["metrics"]).expect(0).text();
    let described = |line: &str, kind: &str| {
        line.strip_prefix(kind)
            .and_then(|line| line.split_once(' '))
            .map(|(name, rest)| (name.to_owned(), rest.to_owned()))
    };
    let helps: BTreeMap<_, _> = page.lines().filter_map(|line| described(line, "# HELP ")).collect();
    let types: BTreeMap<_, _> = page.lines().filter_map(|line| described(line, "# TYPE ")).collect();
    assert!(helps.len() > 20 && helps.len() == types.len(), "{page}");
    eventually("Prometheus knows all of them", || {
        let known = ask("metadata").unwrap_or_default();
        helps.iter().all(|(name, help)| {
            let of = &known["data"][name][0];
            of["help"] == *help && of["type"] == types[name]
        })
    });
    eventually("it has values", || {
        let found = ask("query?query=partywall_topic_published_total").unwrap_or_default();
        found["data"]["result"][0]["value"][1] == "1"
    });
    drop(objects);
}

#[test]
fn deaths_are_counted() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let watch = sandbox.spawn(["watch"]);
    eventually("it is a member", || metrics(&sandbox, &[]).contains_key(r#"partywall_members{state="alive"}"#));
    watch.kill();
    let key = r#"partywall_deaths_total{proof="process"}"#;
    eventually("its death is counted", || metrics(&sandbox, &[])[key] == 1.0);
}

// Holds 321.
#[test]
fn requests_are_answered_before_and_after_the_broker() {
    let sandbox = Sandbox::new();
    let (server, address) = serve(&sandbox);
    let page = |address: &str| {
        let answer = get(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(
            head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("Content-Type: text/plain; version=0.0.4;"),
            "{head}"
        );
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        parse(body)
    };
    assert_eq!(page(&address)["partywall_up"], 0.0, "there is no broker yet");
    let domain = sandbox.domain();
    let gate = domain.semaphore("gate", 3).unwrap();
    assert_eq!(page(&address)[r#"partywall_semaphore_permits{name="gate",state="free"}"#], 3.0);
    assert!(get(&address, "GET /other HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    assert!(get(&address, "DELETE /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));

    eventually("others are answered while clients are silent", || {
        let mut silent: Vec<_> = (0..16).map(|_| TcpStream::connect(&address).unwrap()).collect();
        assert_eq!(page(&address)["partywall_up"], 1.0);
        silent.iter_mut().all(|client| {
            client.set_nonblocking(true).unwrap();
            client.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
        })
    });
    drop((gate, domain));
    sandbox.run(["stop", "--force"]).expect(0);
    assert_eq!(page(&address)["partywall_up"], 0.0);
    server.signal(Signal::TERM);
    server.wait().expect(0);
}

// Holds 321.
#[test]
fn time_for_which_a_timeline_stands_still_is_counted_from_page_to_page() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let writer = domain.timeline_writer("steps").unwrap();
    let (_server, address) = serve(&sandbox);
    let idle = || {
        let answer = get(&address, "GET /metrics HTTP/1.1\r\n\r\n");
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        parse(body)[r#"partywall_timeline_idle_seconds{name="steps",incarnation="1"}"#]
    };
    writer.signal(1).unwrap();
    assert_eq!(idle(), 0.0, "no page was before");
    let mut last = 0.0;
    eventually("it stands still", || {
        let now = idle();
        assert!(now >= last, "{now} after {last}");
        last = now;
        now > 0.0
    });
    writer.signal(2).unwrap();
    assert_eq!(idle(), 0.0);
}

#[test]
fn what_cannot_be_done_is_an_error_with_advice() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(["metrics"]);
    assert!(output.code != Some(0) && output.stdout.is_empty(), "{output:?}");
    assert!(output.stderr.contains("partywall serve"), "{output:?}");

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = sandbox.run(["metrics", "--listen", &address]);
    assert!(output.code == Some(5) && output.stderr.contains(&address), "{output:?}");
    assert!(output.stderr.contains("port 0"), "{output:?}");
    for (wrong, why) in [(["--listen", "nowhere"], "write ADDRESS:PORT"), (["--max-names", "-1"], "not a whole number")]
    {
        let output = sandbox.run([&["metrics"], &wrong[..]].concat()).expect(2);
        assert!(output.stderr.contains(why), "{output:?}");
    }
}
