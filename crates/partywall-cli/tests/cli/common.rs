//! Behaviour that all commands share: help, exit codes, notes and tables.

use std::{fs, time::Duration};

use partywall::{DType, Domain, Place};
use partywall_harness::{Running, Sandbox, Signal, Terminal, device, eventually, place};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

/// Commits a name, kept.
fn commit(domain: &Domain, name: &str) {
    let build = domain.create(name, place()).kept(true).tensor("w", DType::U8, &[64]).allocate().unwrap();
    build.commit().unwrap().release().unwrap();
}

fn names(sandbox: &Sandbox) -> Vec<String> {
    let list = sandbox.json(["ls"]);
    list["names"].as_array().unwrap().iter().map(|name| name["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn exit_codes_are_the_same_in_help_and_docs() {
    let help = Sandbox::new().run(["--help"]).expect(0).text();
    let (_, table) = help.split_once("Exit codes:\n").unwrap();
    let of_help: Vec<_> = table.lines().filter_map(|line| line.trim().split_once("  ")).collect();
    let docs = include_str!("../../../../docs/cli.md");
    let rows = docs.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
    let of_docs: Vec<_> = rows.filter(|(code, _)| code.parse::<u8>().is_ok()).collect();
    assert_eq!(of_help, of_docs);
    assert_eq!(of_help.last(), Some(&("7", "timed out")));
}

/// The pages about learning and labs, with all others below their folder.
fn pages() -> Vec<(std::path::PathBuf, String)> {
    let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let learn = docs.join("learn");
    let folders = [learn.join("calls"), learn];
    let pages = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    let pages = pages.filter(|path| path.is_file()).chain([docs.join("labs.md")]);
    pages.map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn commands_of_the_learning_pages_exist() {
    let sandbox = Sandbox::new();
    let mut tried = std::collections::BTreeSet::new();
    for (page, text) in pages() {
        let lines = text.lines().filter(|line| line.starts_with("partywall "));
        for command in lines.chain(text.split('`').skip(1).step_by(2).filter(|code| code.starts_with("partywall "))) {
            let command = command.split(" #").next().unwrap();
            let words = command.split_whitespace().skip(1);
            // A word in capitals stands for a value that the reader chooses.
            let mut words: Vec<_> = words.take_while(|word| !matches!(*word, "|" | ">" | "…")).collect();
            while let Some(at) =
                words.iter().position(|word| word.len() > 1 && word.chars().all(|c| c.is_ascii_uppercase()))
            {
                let first = if at > 0 && words[at - 1].starts_with("--") { at - 1 } else { at };
                words.drain(first..=at);
            }
            if tried.insert(words.join(" ")) {
                let output = Running::spawn(sandbox.command(&words).arg("--help")).wait();
                assert_eq!(output.code, Some(0), "{}: {command}: {}", page.display(), output.stderr);
            }
        }
    }
    assert!(tried.len() > 30, "{tried:?}");
}

#[test]
fn refused_numbers_say_which_ones_are_accepted() {
    let sandbox = Sandbox::new();
    for (arguments, why) in [
        (&["topic", "play", "file", "t", "--rate", "-1"][..], "'-1' for '--rate <FACTOR>': use a number from 0.001 to"),
        (&["topic", "pub", "t", "--rate", "-0.5"], "'-0.5' for '--rate <N>': use a number from 0.001 to"),
        (&["topic", "echo", "t", "--count", "x"], "\"x\" is not a whole number: write digits only"),
        (&["topic", "echo", "t", "--count", "0"], "use 1 or more"),
        (&["topic", "pub", "t", "--depth", "-1"], "\"-1\" is not a whole number"),
        (&["topic", "pub", "t", "--depth", "4294967296"], "\"4294967296\" is too large"),
    ] {
        let refused = sandbox.run(arguments).expect(2);
        assert!(refused.stderr.contains(why), "{why:?} is missing: {}", refused.stderr);
    }
}

#[test]
fn partywall_without_arguments_prints_help_successfully() {
    let sandbox = Sandbox::new();
    let bare = sandbox.run([""; 0]).expect(0);
    assert_eq!(bare.text(), sandbox.run(["-h"]).expect(0).text());
    assert!(bare.text().contains("Usage:") && bare.stderr.is_empty(), "{bare:?}");
    let no_command = sandbox.run(["--json"]).expect(2);
    assert_eq!(no_command.json()["error"]["code"], 2);
}

#[test]
fn quiet_leaves_notes_out_and_errors_in() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    assert!(!sandbox.run(["ls"]).expect(0).stderr.is_empty());
    assert_eq!(sandbox.run(["ls", "--quiet"]).expect(0).stderr, "");
    assert!(sandbox.run(["-q", "show", "x"]).expect(3).stderr.contains("error:"));
    let demo = sandbox.run(["-q", "demo", "--device", "host", "--corrupt", "7"]).expect(1);
    assert!(demo.stderr.contains("is wrong at index 7"), "the errors of children, too: {demo:?}");
}

// Holds 51.
#[test]
fn rm_asks_before_removing_the_matches_of_a_pattern() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    for name in ["x/1", "x/2", "y", "z1"] {
        commit(&domain, name);
    }
    // Without a terminal, no user can answer.
    let refused = sandbox.run(["rm", "y", "x*"]).expect(2);
    for part in ["matches 3 names", "\n  x/1", "\n  x/2", "--yes"] {
        assert!(refused.stderr.contains(part), "{part}: {refused:?}");
    }
    let refused = sandbox.run(["rm", "x*", "--json"]).expect(2).json();
    assert_eq!((&refused["names"], &refused["error"]["code"]), (&json!(["x/1", "x/2"]), &json!(2)));
    assert_eq!(names(&sandbox), ["x/1", "x/2", "y", "z1"]);
    let missing = sandbox.run(["rm", "--yes", "y", "nope*"]).expect(3);
    assert!(missing.stderr.contains("\"nope*\""), "{missing:?}");
    assert_eq!(names(&sandbox).len(), 4, "a pattern that matches nothing is a mistake, so nothing is removed");
    let removed = sandbox.run(["rm", "--yes", "z?", "z*", "z1"]).expect(0);
    assert_eq!(removed.text().lines().count(), 1, "each name once: {removed:?}");

    for (answer, code, left) in [("\n", 1, 3), ("n\n", 1, 3), ("y\n", 0, 1)] {
        let mut terminal = Terminal::spawn(sandbox.command(["rm", "x*"]), 80);
        terminal.wait_for("Remove 2 names? [y/N] ");
        terminal.type_in(answer);
        let (ended, screen) = terminal.wait();
        assert!(screen.contains("  x/1@1, ") && screen.contains("  x/2@1, "), "{screen}");
        assert_eq!((ended, names(&sandbox).len()), (Some(code), left), "{screen}");
        assert_eq!(screen.contains("nothing was removed"), code == 1, "{screen}");
    }
    sandbox.run(["rm", "y"]).expect(0);
}

// Holds 51.
#[test]
fn get_keeps_files_that_exist_and_terminals_readable() {
    let sandbox = Sandbox::new();
    commit(&sandbox.domain(), "x");
    let file = sandbox.file("precious", "precious");
    let refused = sandbox.run(["get", "x", "precious"]).expect(5);
    assert!(refused.stderr.contains("precious already exists") && refused.stderr.contains("--force"), "{refused:?}");
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    sandbox.run(["get", "x", "precious", "--force"]).expect(0);
    assert_eq!(fs::read(&file).unwrap(), [0; 64]);
    sandbox.run(["get", "x", "/dev/null"]).expect(0);

    let (code, screen) = Terminal::spawn(sandbox.command(["get", "x", "-"]), 80).wait();
    assert_eq!(code, Some(2), "{screen}");
    assert!(screen.contains("is a terminal") && screen.contains("pipe") && !screen.contains('\0'), "{screen}");
}

#[test]
fn tables_fit_a_narrow_terminal_and_are_whole_in_a_pipe() {
    let sandbox = Sandbox::new();
    let name = "a-name-of-forty-letters-for-a-wide-table";
    sandbox.file(name, [0; 64]);
    let mut holder = sandbox.spawn(["put", name, name, "--hold", "--device", device()]);
    holder.line();
    // What it waits for is a column, and decides which others fit.
    eventually("it waits for the removal", || sandbox.json(["ps"])["members"][0]["waits"] != json!([]));
    for arguments in [&["ps"][..], &["ls"], &["show", name], &["status"]] {
        let whole = sandbox.run(arguments).expect(0).text();
        let (code, screen) = Terminal::spawn(sandbox.command(arguments), 80).wait();
        assert_eq!(code, Some(0), "{screen}");
        let headings = |text: &str| -> Vec<String> {
            let table =
                text.lines().find(|line| ["PID", "NAME"].iter().any(|first| line.trim_start().starts_with(first)));
            table.unwrap().split_whitespace().map(str::to_owned).collect()
        };
        let is_row = |line: &&str| line.contains(name) || line.contains("put ");
        let rows: Vec<_> = screen.lines().filter(is_row).collect();
        assert!(!rows.is_empty() && rows.iter().all(|row| row.chars().count() <= 80), "{screen}");
        assert!(headings(&screen).len() <= headings(&whole).len());
        if arguments == ["ps"] {
            assert!(
                headings(&screen).contains(&"STATE".into()) && !headings(&screen).contains(&"UID".into()),
                "{screen}"
            );
            assert!(
                headings(&whole).contains(&"UID".into()) && whole.contains(&format!("put {name} {name} --hold")),
                "{whole}"
            );
            let columns = Running::spawn(sandbox.command(arguments).env("COLUMNS", "80")).wait().expect(0).text();
            assert_eq!(headings(&columns), headings(&screen));
        }
    }
}

/// The commands of the program `partywall-bridge`, which is built and tested by itself.
const OF_THE_BRIDGE: [&str; 3] = ["bridge", "hosts", "pull"];

/// Every command of these programs with its subcommands, as `--help` lists them.
fn commands(sandbox: &Sandbox, path: &[String], all: &mut Vec<Vec<String>>) {
    let help = sandbox.run([path, &["-h".to_owned()]].concat()).expect(0).text();
    all.push(path.to_vec());
    let Some((_, list)) = help.split_once("\nCommands:\n") else { return };
    for line in list.lines().take_while(|line| !line.is_empty()) {
        // The continuation of a description is indented further.
        let Some(name) = line.strip_prefix("  ").and_then(|line| line.split(' ').next()) else { continue };
        if !name.is_empty() && name != "help" && !OF_THE_BRIDGE.contains(&name) {
            commands(sandbox, &[path, &[name.to_owned()]].concat(), all);
        }
    }
}

#[test]
fn help_of_a_command_is_that_of_its_option() {
    let sandbox = Sandbox::new();
    let run = |arguments: &[&str]| sandbox.run(arguments).expect(0).text();
    for command in [&["topic", "ls"][..], &["topic"], &["put"], &["run"], &["help"], &[]] {
        assert_eq!(run(&[&["help"], command].concat()), run(&[command, &["--help"]].concat()), "{command:?}");
    }
    assert_eq!(run(&["--quiet", "help", "run", "touch", "executed"]), run(&["run", "--help"]));
    assert!(!sandbox.path().join("executed").exists());
    let unknown = sandbox.run(["help", "topic", "nosuch"]).expect(2).stderr;
    assert!(unknown.contains("unrecognized subcommand 'nosuch'"), "{unknown}");
}

#[test]
fn every_help_fits_80_columns() {
    let sandbox = Sandbox::new();
    let mut all = Vec::new();
    commands(&sandbox, &[], &mut all);
    assert!(all.len() > 20 && all.contains(&vec!["topic".to_owned(), "echo".to_owned()]), "{all:?}");
    for path in all {
        for flag in ["-h", "--help"] {
            let arguments = [&path[..], &[flag.to_owned()]].concat();
            let help = Running::spawn(sandbox.command(arguments).env("COLUMNS", "80")).wait().expect(0).text();
            let wide: Vec<_> = help.lines().filter(|line| line.chars().count() > 80).collect();
            assert!(wide.is_empty(), "partywall {} {flag}: {wide:#?}", path.join(" "));
        }
    }
}

#[test]
fn file_size_limit_is_named() {
    let sandbox = Sandbox::new();
    sandbox.file("large", vec![0; 1 << 20]);
    sandbox.run(["put", "large", "x", "--device", device()]).expect(0);
    // Bash, because it counts in blocks of 1024 bytes, and dash in blocks of 512.
    let limited = |arguments: &str| {
        let script = format!("ulimit -f 64; exec {} {arguments}", partywall_harness::binary().display());
        Running::spawn(sandbox.program("bash").args(["-c", &script])).wait()
    };
    let refused = limited("get x out").expect(5);
    assert!(refused.stderr.contains("file size limit") && refused.stderr.contains("ulimit -f"), "{refused:?}");
    assert!(!sandbox.path().join("out").exists());
    let refused = limited("get x - > out").expect(5);
    assert!(refused.stderr.contains("file size limit"), "{refused:?}");
}

#[test]
fn record_says_the_file_size_limit_host_memory() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let topic = domain.topic("t").max_bytes(1 << 20).place(Place::Host).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let script = format!("ulimit -f 64; exec {} topic record t out", partywall_harness::binary().display());
    let recording = Running::spawn(sandbox.program("bash").args(["-c", &script]));
    eventually("the limit is reached", || {
        let loan = publisher.loan(DType::U8, &[1 << 20], Duration::from_secs(60)).unwrap();
        loan.filled().publish(Duration::from_secs(60)).unwrap();
        recording.has_ended()
    });
    let refused = recording.wait().expect(5);
    assert!(refused.stderr.contains("file size limit") && refused.stderr.contains("ulimit -f"), "{refused:?}");
}

#[test]
fn program_raises_its_limit_of_open_files() {
    let sandbox = Sandbox::new();
    let script = format!("ulimit -Sn 64; exec {} serve", partywall_harness::binary().display());
    let mut serve = Running::spawn(sandbox.program("sh").args(["-c", &script]));
    serve.line();
    let limits = fs::read_to_string(format!("/proc/{}/limits", serve.pid())).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<_> = files.split_whitespace().filter(|word| word.parse::<u64>().is_ok()).collect();
    assert_eq!(numbers[0], numbers[1], "soft and hard: {files}");

    // A command that is not a broker raises its limit too; this one waits for a name.
    let script = format!("ulimit -Sn 64; exec {} get never out --wait 60", partywall_harness::binary().display());
    let waiting = Running::spawn(sandbox.program("sh").args(["-c", &script]));
    eventually("it is a member", || sandbox.json(["status"])["members"] != json!([]));
    let limits = fs::read_to_string(format!("/proc/{}/limits", waiting.pid())).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<_> = files.split_whitespace().filter(|word| word.parse::<u64>().is_ok()).collect();
    assert_eq!(numbers[0], numbers[1], "soft and hard: {files}");
    waiting.kill();

    // The library does not change the limit of its host program, which may use `select`.
    let before = Rlimit { current: Some(512), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, before).unwrap();
    drop(sandbox.domain_of_running());
    assert_eq!(getrlimit(Resource::Nofile), before);
    assert_ne!(Value::Null, sandbox.json(["stop", "--force"]));
    serve.wait().expect(0);
}

#[test]
fn ps_and_ls_repeat_until_they_are_ended() {
    let sandbox = Sandbox::new();
    commit(&sandbox.domain(), "x");
    // In a pipe, the outputs follow each other.
    let mut ls = sandbox.spawn(["ls", "--watch=0.1", "x*"]);
    for block in 0..3 {
        let first = ls.line();
        assert!(first.ends_with(" UTC, every 0.1 s"), "{first}");
        assert!(ls.line().starts_with("NAME") && ls.line().starts_with("x "), "block {block}");
        assert_eq!(ls.line(), "");
    }
    ls.signal(Signal::INT);
    assert_eq!(ls.wait().expect(0).stderr, "");
    let mut ps = sandbox.spawn(["ps", "--watch", "0.1", "--json"]);
    for _ in 0..3 {
        let block: Value = serde_json::from_str(&ps.line()).unwrap();
        assert_eq!(block["members"], json!([]));
    }
    ps.signal(Signal::INT);
    ps.wait().expect(0);
    // On a terminal, each output replaces the one before.
    let holder = sandbox.spawn(["get", "never", "out", "--wait", "60"]);
    let ps = Terminal::spawn(sandbox.command(["ps", "--watch", "0.1"]), 80);
    eventually("it is shown again", || ps.screen().matches("get never").count() > 2);
    ps.signal(Signal::INT);
    let (code, screen) = ps.wait();
    assert_eq!(code, Some(0));
    assert!(screen.starts_with("\x1b[H\x1b[J") && screen.matches("\x1b[J").count() > 2, "{screen:?}");
    holder.kill();
    sandbox.run(["ls", "--watch=0"]).expect(2);
    sandbox.run(["ps", "--watch", "soon"]).expect(2);
}

#[test]
fn logs_are_printed_and_followed_until_the_broker_ends() {
    let sandbox = Sandbox::new();
    let missing = sandbox.run(["logs"]).expect(3);
    assert!(missing.stderr.contains("no log exists at") && missing.stderr.contains("default.sock@"), "{missing:?}");
    let pid = sandbox.broker();
    let all = sandbox.run(["logs"]).expect(0).text();
    assert!(all.lines().count() > 1 && all.lines().next().unwrap().contains("listening"), "{all}");
    assert_eq!(sandbox.run(["logs", "-n", "1"]).expect(0).text().lines().count(), 1);
    let line: Value = serde_json::from_str(sandbox.run(["logs", "-n1", "--json"]).expect(0).text().trim()).unwrap();
    assert_eq!(line["log"], sandbox.log().to_str().unwrap());
    assert!(line["line"].is_string(), "{line}");

    let mut follower = sandbox.spawn(["logs", "-f"]);
    assert!(follower.line().contains("listening"));
    sandbox.run(["show", "marked-by-the-test"]).expect(3);
    while !follower.line().contains("show marked-by-the-test") {}
    // The follower is not a member, so `stop` succeeds once the earlier commands have left.
    eventually("the broker stops", || sandbox.run(["stop"]).code == Some(0));
    let ended = follower.wait().expect(0);
    assert!(ended.stderr.contains(&format!("the broker with pid {pid} has ended")), "{ended:?}");
    assert!(ended.text().contains("has ended exit="), "its last line is printed: {ended:?}");
    let alone = sandbox.run(["logs", "-f"]).expect(0);
    assert!(alone.stderr.contains("no broker runs at") && alone.text().contains("listening"), "{alone:?}");
}

#[test]
fn completions_and_manual_pages_know_every_command() {
    let sandbox = Sandbox::new();
    let mut all = Vec::new();
    commands(&sandbox, &[], &mut all);
    for shell in ["bash", "zsh", "fish"] {
        let script = sandbox.run(["completions", shell]).expect(0).text();
        assert!(all.iter().flatten().all(|command| script.contains(command)), "{shell}");
        assert!(script.contains("unproven"), "{shell}");
    }
    sandbox.run(["completions", "tcsh"]).expect(2);
    sandbox.file("bash", sandbox.run(["completions", "bash"]).expect(0).stdout);
    let typed = "source ./bash; COMP_WORDS=(partywall l); COMP_CWORD=1; _partywall partywall l partywall";
    let script = format!("{typed}; echo ${{COMPREPLY[@]}}");
    let bash = Running::spawn(sandbox.program("bash").args(["-c", &script])).wait().expect(0);
    let mut completed: Vec<_> = bash.text().split_whitespace().map(str::to_owned).collect();
    completed.sort();
    assert_eq!(completed, ["lab", "logs", "ls"], "{bash:?}");

    let page = sandbox.run(["man"]).expect(0).text();
    assert!(page.contains(".TH") && page.contains("Exit codes") && page.contains("partywall\\-get"), "{page}");
    let pages = sandbox.json(["man", "--out", "share/man1"]);
    assert_eq!(pages["pages"], all.len() + OF_THE_BRIDGE.len());
    let page = fs::read_to_string(sandbox.path().join("share/man1/partywall-topic-echo.1")).unwrap();
    assert!(page.contains(".TH") && page.contains("count"), "{page}");
}

// Holds 312.
#[test]
fn colours_are_left_out_on_request() {
    let sandbox = Sandbox::new();
    let colours = |arguments: &[&str], variable: Option<(&str, &str)>| {
        let mut command = sandbox.command(arguments.iter().copied());
        for name in ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "CI"] {
            command.env_remove(name);
        }
        command.env("TERM", "xterm-256color").envs(variable);
        let (_, screen) = Terminal::spawn(command, 80).wait();
        assert!(!screen.is_empty());
        screen.matches("\x1b[").count()
    };
    for arguments in [
        &["doctor", "--device", "host"][..],
        &["lab", "crash", "--device", "host"],
        &["show", "nothing"],
        &["show", "--nonsense"],
        &["--help"],
    ] {
        assert!(colours(arguments, None) > 0, "{arguments:?}");
        for variable in [("NO_COLOR", "1"), ("CLICOLOR", "0"), ("TERM", "dumb")] {
            assert_eq!(colours(arguments, Some(variable)), 0, "{arguments:?} with {variable:?}");
        }
    }
    let piped =
        sandbox.command(["show", "nothing"]).env("CLICOLOR_FORCE", "1").env_remove("NO_COLOR").output().unwrap();
    assert!(String::from_utf8_lossy(&piped.stderr).contains("\x1b["), "{piped:?}");
}
