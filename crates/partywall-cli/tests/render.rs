//! `partywall lab render`: processes that render one picture, and are killed.
#![allow(clippy::unwrap_used)] // tests, their helpers included

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use partywall_harness::{Output, Running, Sandbox, simulated_driver};
use serde_json::Value;

/// Renders a small scene, which a build without optimisation draws quickly, unless the arguments choose another one.
fn render(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    let mut command = sandbox.command(["lab", "render"]);
    for option in [["--size", "96x64"], ["--scene", "torus:500"]] {
        if !arguments.contains(&option[0]) {
            command.args(option);
        }
    }
    Running::spawn(command.args(arguments).env("PARTYWALL_LIBCUDA", simulated_driver())).wait()
}

/// The lines of a report in JSON.
fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn last(output: &Output) -> Value {
    lines(&output.text()).pop().unwrap()
}

/// The files of a folder and their bytes.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().into(), std::fs::read(path).unwrap())).collect()
}

/// Each role is killed in turn in the middle of a frame. All frames are there, and the same as without a death.
#[track_caller]
fn no_frame_is_missing(device: &str) {
    let sandbox = Sandbox::new();
    let run = |out: &Path, more: &[&str]| {
        let out = out.to_str().unwrap();
        let arguments = [&["--device", device, "--frames", "24", "--json", "--out", out], more].concat();
        let output = render(&sandbox, &arguments).expect(0);
        assert!(lines(&output.text()).iter().all(|line| line["verdict"] != "different"), "{}", output.text());
        last(&output)
    };
    let folder = |name: &str| sandbox.path().join(name);
    let undisturbed = run(&folder("none"), &[]);
    assert_eq!((&undisturbed["frames"], &undisturbed["killed"]), (&24.into(), &Value::Array(Vec::new())));
    let expected = files(&folder("none"));
    let names: Vec<_> = (0..24).map(|frame| PathBuf::from(format!("frame-{frame:05}.png"))).collect();
    assert_eq!(expected.keys().collect::<Vec<_>>(), names.iter().collect::<Vec<_>>());
    for role in ["renderer", "geometry", "compositor", "writer"] {
        let report = run(&folder(role), &["--kill", role]);
        for (count, value) in [("frames", 24), ("missing", 0), ("twice", 0), ("torn", 0)] {
            assert_eq!(report[count], value, "{role}: {count}");
        }
        let [killed] = report["killed"].as_array().unwrap().as_slice() else { panic!("{role}: {report}") };
        assert_eq!((&killed["role"], &killed["frame"]), (&role.into(), &8.into()));
        assert_ne!(killed["pid"], killed["new_pid"]);
        assert!(killed["new_pid"].as_u64() > Some(0) && killed["gap_ms"].as_f64() >= Some(0.0), "{killed}");
        assert!(files(&folder(role)) == expected, "{role}: the same files");
    }
    let left: Vec<_> = std::fs::read_dir(sandbox.path().join("run/partywall")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn no_frame_is_missing_when_a_role_is_killed_in_host_memory() {
    no_frame_is_missing("host");
}

#[test]
fn no_frame_is_missing_when_a_role_is_killed_on_the_simulated_gpu() {
    no_frame_is_missing("cuda");
}

#[test]
fn kernels_and_the_cpu_draw_the_same_pixels_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let ledger = sandbox.path().join("ledger");
    std::fs::create_dir(&ledger).unwrap();
    let [first, second, third] = [("host", "cpu"), ("cuda", "cuda"), ("cuda", "cpu")].map(|(device, by)| {
        let out = sandbox.path().join(format!("{device}-{by}"));
        let arguments = ["lab", "render", "--size", "100x70", "--scene", "torus:2000", "--frames", "8", "--json"];
        let mut command = sandbox.command(arguments);
        command.args(["--device", device, "--renderer", by, "--out"]).arg(&out);
        command.env("PARTYWALL_LIBCUDA", simulated_driver()).env("SIMCUDA_LEDGER", &ledger);
        let report = lines(&Running::spawn(&mut command).wait().expect(0).text());
        let claims = report.last().unwrap()["claims"].as_array().unwrap();
        let pixels = claims.iter().find(|claim| claim["claim"] == "pixels").unwrap();
        assert_eq!(pixels["verdict"], if by == "cuda" { "did-not-hold" } else { "not-tried" });
        files(&out)
    });
    assert!(first == second && first == third && first.len() == 8);
    for file in std::fs::read_dir(&ledger).unwrap() {
        let left = std::fs::read_to_string(file.unwrap().path()).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&left).unwrap(), Value::Array(Vec::new()), "{left}");
    }
}

#[test]
fn run_of_one_frame_has_its_death() {
    let sandbox = Sandbox::new();
    for role in ["renderer", "geometry", "compositor", "writer"] {
        let report =
            last(&render(&sandbox, &["--device", "host", "--frames", "1", "--kill", role, "--json"]).expect(0));
        assert_eq!((&report["frames"], &report["killed"][0]["role"]), (&1.into(), &role.into()));
    }
}

#[test]
fn tile_of_a_killed_renderer_is_grey_until_its_successor_draws_in_host_memory() {
    let sandbox = Sandbox::new();
    let movie = sandbox.path().join("movie.gif");
    let arguments = ["--device", "host", "--live", "--frames", "60", "--kill", "renderer", "--json", "--out"];
    let output = render(&sandbox, &[&arguments[..], &[movie.to_str().unwrap()]].concat()).expect(0);
    let report = last(&output);
    assert_eq!((&report["frames"], &report["missing"], &report["torn"]), (&60.into(), &0.into(), &0.into()));
    assert_ne!(report["killed"][0]["pid"], report["killed"][0]["new_pid"]);
    let steps = lines(&output.text());
    let killed = steps.iter().find(|step| step["step"] == "killed").unwrap();
    let grey: u32 = killed["values"]["frames with a grey tile"].as_str().unwrap().parse().unwrap();
    assert!((1..60).contains(&grey), "{killed}");
    let bytes = std::fs::read(&movie).unwrap();
    assert!(bytes.starts_with(b"GIF89a") && bytes.ends_with(&[0x3b]));
}

#[test]
fn movie_on_standard_output_is_y4m_and_the_report_is_elsewhere() {
    let sandbox = Sandbox::new();
    let frames = 12;
    let output = render(&sandbox, &["--device", "host", "--frames", "12", "--kill", "writer", "--out", "-", "--json"]);
    let head = b"YUV4MPEG2 W96 H64 F25:1 Ip A1:1 C444\n";
    let stdout = &output.clone().expect(0).stdout;
    assert!(stdout.starts_with(head));
    assert_eq!(stdout.len(), head.len() + frames * (6 + 3 * 96 * 64));
    assert_eq!(lines(&output.stderr).last().unwrap()["frames"], frames);
    let file = sandbox.path().join("movie.y4m");
    render(&sandbox, &["--device", "host", "--frames", "12", "--out", file.to_str().unwrap()]).expect(0);
    assert!(std::fs::read(file).unwrap() == *stdout, "a killed writer changes no byte");
}

#[test]
fn obj_file_is_drawn() {
    let sandbox = Sandbox::new();
    let scene =
        sandbox.file("pyramid.obj", "v -1 0 -1\nv 1 0 -1\nv 1 0 1\nv -1 0 1\nv 0 2 0\nf 1 2 3 4\nf 1 2 5\nf 3 4 5\n");
    let report = last(
        &render(
            &sandbox,
            &["--device", "host", "--frames", "3", "--renderers", "6", "--json", "--scene", scene.to_str().unwrap()],
        )
        .expect(0),
    );
    assert_eq!(report["frames"], 3);
}

#[test]
fn bad_input_is_refused_by_a_sentence_and_a_code() {
    let sandbox = Sandbox::new();
    let lies = sandbox.file("lies.obj", "v 0 0 0\nv 1 0 0\nf 1 2 7\n");
    let lies = lies.to_str().unwrap();
    for (arguments, code, sentence) in [
        (&["--size", "0x0"][..], 2, "use WIDTHxHEIGHT in pixels, each from 16 to 4096"),
        (&["--size", "480"], 2, "use WIDTHxHEIGHT"),
        (&["--renderers", "100"], 2, "100 is not in 1..=16"),
        (&["--renderer", "cuda"], 2, "cannot draw by kernels in host memory"),
        (&["--frames", "0"], 2, "0 is not in 1..="),
        (&["--fps", "0"], 2, "0 is not in 1..=240"),
        (&["--kill", "nobody"], 2, "possible values: renderer, geometry, compositor, writer, broker"),
        (&["--kill", "broker"], 2, "cannot kill the broker of this lab"),
        (&["--out", "movie.mp4"], 2, "no movie has the extension .mp4 here"),
        (&["--out", "/dev/null/folder"], 5, "cannot write /dev/null/folder"),
        (&["--out", "/dev/null/movie.gif"], 5, "cannot write /dev/null/movie.gif"),
        (&["--scene", "/nonexistent.obj"], 3, "cannot draw /nonexistent.obj"),
        (&["--scene", "torus:1"], 2, "a torus has 18 to 4000000 triangles"),
        (&["--scene", lies], 1, "face vertex index out of bounds"),
    ] {
        let output = render(&sandbox, &[&["--device", "host"], arguments].concat()).expect(code);
        assert!(output.stderr.contains(sentence), "{arguments:?}: {}", output.stderr);
    }
}

#[test]
fn run_that_should_have_killed_and_did_not_fails() {
    let sandbox = Sandbox::new();
    // A renderer does not finish 80 frames of so many triangles while 240 frames are composed in a second.
    let arguments = ["--device", "host", "--live", "--fps", "240", "--frames", "240", "--scene", "torus:400000"];
    let output = render(&sandbox, &[&arguments[..], &["--kill", "renderer"]].concat()).expect(1);
    assert!(output.stderr.contains("the renderer was not killed: it has not finished 80 frames"), "{}", output.stderr);
}

#[test]
fn roles_have_terminals_of_their_own() {
    let sandbox = Sandbox::new();
    let missing = render(&sandbox, &["watcher", "--device", "host"]).expect(3);
    assert!(missing.stderr.contains("partywall lab render geometry"), "{}", missing.stderr);
    let roles = ["geometry", "renderer", "compositor", "writer", "viewer"];
    let start = |roles: &[&str]| {
        let started = roles.iter().map(|role| {
            let mut command = sandbox.command(["lab", "render", role, "--device", "host"]);
            let mut running = Running::spawn(command.env("PARTYWALL_LIBCUDA", simulated_driver()));
            while !running.line().starts_with("Waiting for") {}
            running
        });
        started.collect::<Vec<_>>()
    };
    let running = start(&roles);
    let watcher =
        render(&sandbox, &["watcher", "--device", "host", "--frames", "9", "--json", "--kill", "renderer"]).expect(0);
    let report = last(&watcher);
    assert_eq!(
        (&report["frames"], &report["missing"], &report["killed"][0]["frame"]),
        (&9.into(), &0.into(), &3.into())
    );
    for (role, running) in roles.into_iter().zip(running) {
        let told = running.wait().expect(0).text().to_owned();
        assert!(told.contains(&format!("{role:<10} │ {role} ")), "{told}");
    }
    let running = start(&["geometry", "writer"]);
    let refused = render(&sandbox, &["watcher", "--device", "host", "--kill", "writer"]).expect(2);
    assert!(refused.stderr.contains("cannot kill the writer: it runs in a terminal of its own"), "{}", refused.stderr);
    for role in running {
        role.kill();
    }
}
