//! `partywall lab render`: processes that render one picture, and are killed.
#![allow(clippy::unwrap_used, reason = "helpers of tests are outside #[test]")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use partywall_harness::{Output, Running, Sandbox};
use serde_json::Value;

/// Renders a small scene, which a build without optimisation draws quickly, unless the arguments choose another one.
fn render(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    let mut command = sandbox.command(["lab", "render"]);
    for option in [["--size", "96x64"], ["--scene", "torus:500"]] {
        if !arguments.contains(&option[0]) {
            command.args(option);
        }
    }
    Running::spawn(command.args(arguments).env("PARTYWALL_LIBCUDA", "simulated")).wait()
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
    let by = if device == "host" { "host" } else { "gpu" };
    for (number, tile) in undisturbed["tiles"].as_array().unwrap().iter().enumerate() {
        assert_eq!((&tile["tile"], &tile["time_of"]), (&number.into(), &by.into()));
        let times = [&tile["p50_us"], &tile["p99_us"]].map(|time| time.as_f64().unwrap());
        assert!(tile["samples"].as_u64() > Some(0) && 0.0 < times[0] && times[0] <= times[1], "{tile}");
    }
    assert_eq!(undisturbed["tiles"].as_array().unwrap().len(), 4);
    let expected = files(&folder("none"));
    let names: Vec<_> = (0..24).map(|frame| PathBuf::from(format!("frame-{frame:05}.png"))).collect();
    assert_eq!(expected.keys().collect::<Vec<_>>(), names.iter().collect::<Vec<_>>());
    for role in ["renderer", "geometry", "compositor", "writer", "broker"] {
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

// Holds 328.
#[test]
fn no_frame_is_missing_when_a_role_is_killed_in_host_memory() {
    no_frame_is_missing("host");
}

// Holds 328.
#[test]
fn no_frame_is_missing_when_a_role_is_killed_on_the_simulated_gpu() {
    no_frame_is_missing("cuda");
}

// Holds 330.
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
        command.env("PARTYWALL_LIBCUDA", "simulated").env("SIMCUDA_LEDGER", &ledger);
        let report = lines(&Running::spawn(&mut command).wait().expect(0).text());
        let beliefs = report.last().unwrap()["beliefs"].as_array().unwrap();
        let pixels = beliefs.iter().find(|belief| belief["belief"] == "pixels").unwrap();
        assert_eq!(pixels["verdict"], if by == "cuda" { "refuted" } else { "open" });
        files(&out)
    });
    assert!(first == second && first == third && first.len() == 8);
    for file in std::fs::read_dir(&ledger).unwrap() {
        let left = std::fs::read_to_string(file.unwrap().path()).unwrap();
        let kinds: Vec<Value> = serde_json::from_str(&left).unwrap();
        // A connection ends on a thread of its own, once the GPU is idle, and gives its context back last. A process
        // may end before that.
        let ended_first = kinds.iter().any(|left| left["kind"] == "primary context");
        assert!(kinds.is_empty() || ended_first, "{left}");
    }
}

/// Draws by Vulkan under the validation layer, which must have nothing to say, and by the CPU.
// Holds 329.
#[test]
fn needs_vulkan_vulkan_draws_the_pixels_of_the_cpu() {
    let sandbox = Sandbox::new();
    let said = sandbox.path().join("validation");
    let settings = ["debug_action = VK_DBG_LAYER_ACTION_LOG_MSG", "report_flags = error,warn"];
    let settings = settings.map(|setting| format!("khronos_validation.{setting}\n")).concat();
    let log = format!("khronos_validation.log_filename = {}\n", said.display());
    let settings = sandbox.file("vk_layer_settings.txt", settings + &log);
    let run = |by: &str, out: &Path, more: &[&str]| {
        let mut command = sandbox.command(["lab", "render", "--device", "host", "--renderer", by, "--json"]);
        command.args(["--size", "100x70", "--frames", "9", "--out"]).arg(out).args(more);
        if !more.contains(&"--scene") {
            command.args(["--scene", "torus:2000"]);
        }
        if by == "vulkan" {
            command.env("VK_INSTANCE_LAYERS", "VK_LAYER_KHRONOS_validation").env("VK_LAYER_SETTINGS_PATH", &settings);
        }
        let output = Running::spawn(command.env("PARTYWALL_LIBCUDA", "simulated")).wait().expect(0);
        (last(&output), files(out))
    };
    let folder = |name: &str| sandbox.path().join(name);
    let (_, expected) = run("cpu", &folder("cpu"), &[]);
    for (name, more) in [("four", &[][..]), ("one", &["--renderers", "1"]), ("killed", &["--kill", "renderer"])] {
        let (report, drawn) = run("vulkan", &folder(name), more);
        assert!(drawn == expected && drawn.len() == 9, "{name}");
        for (count, value) in [("frames", 9), ("missing", 0), ("twice", 0), ("torn", 0)] {
            assert_eq!(report[count], value, "{name}: {count}");
        }
        assert_eq!(report["killed"].as_array().unwrap().len(), usize::from(name == "killed"));
    }
    // A workgroup draws a large triangle together.
    let obj = "v -9 -9 0\nv 9 -9 0\nv 0 9 0\nf 1 2 3\n";
    let scene = sandbox.file("large.obj", obj);
    let large = ["--scene", scene.to_str().unwrap()];
    assert!(run("cpu", &folder("large-cpu"), &large).1 == run("vulkan", &folder("large-vulkan"), &large).1);
    let said = std::fs::read_to_string(said).unwrap_or_default();
    assert!(said.trim().is_empty(), "{said}");
}

// Holds 329.
#[test]
fn missing_vulkan_is_a_sentence_and_a_code() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["lab", "render", "--device", "host", "--renderer", "vulkan"]);
    command.env("VK_DRIVER_FILES", "/nothing.json").env("VK_ICD_FILENAMES", "/nothing.json");
    let output = Running::spawn(&mut command).wait().expect(6);
    assert!(output.stderr.contains("cannot draw by Vulkan: "), "{}", output.stderr);
    assert!(output.stderr.contains("--renderer cpu"), "{}", output.stderr);
}

// Holds 329.
#[test]
fn needs_vulkan_simulated_gpu_is_no_device_of_vulkan() {
    let sandbox = Sandbox::new();
    let output = render(&sandbox, &["--device", "cuda", "--renderer", "vulkan"]).expect(6);
    assert!(output.stderr.contains("cannot draw by Vulkan: no Vulkan device is GPU-"), "{}", output.stderr);
}

#[test]
fn pipelines_without_the_library_draw_the_same_frames_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let output = render(&sandbox, &["--device", "cuda", "--frames", "20", "--json"]).expect(0);
    let report = last(&output);
    for pipeline in ["one_process", "driver", "textbook"] {
        assert!(report["baselines"][pipeline].as_f64() > Some(0.0), "{pipeline}: {report}");
    }
    assert_eq!(report["different"], 0, "{}", output.text());
    assert_eq!(report["pipeline"]["size"], "96x64");
}

#[test]
fn renderers_on_another_gpu_than_the_memory_draw_the_same_pixels_on_the_simulated_gpu() {
    let sandbox = Sandbox::simulated(2);
    let run = |name: &str, more: &[&str]| {
        let out = sandbox.path().join(name);
        let arguments = ["--device", "cuda:0", "--frames", "9", "--json", "--out", out.to_str().unwrap()];
        let lines = lines(&render(&sandbox, &[&arguments[..], more].concat()).expect(0).text());
        let report = lines.last().unwrap();
        for (count, value) in [("frames", 9), ("missing", 0), ("twice", 0), ("torn", 0)] {
            assert_eq!(report[count], value, "{more:?}: {count}");
        }
        let first = lines.iter().find(|line| line["step"] == "renderer").unwrap();
        let is_on_the_memorys = first["values"]["drawn by"] == lines[0]["uuid"];
        assert_eq!(is_on_the_memorys, more != ["--devices", "1"], "{first} {}", lines[0]);
        (report["pipeline"]["devices"].as_array().unwrap().len(), files(&out))
    };
    let (_, expected) = run("one", &[]);
    for (name, more, gpus) in [
        ("two", &["--devices", "0,1"][..], 2),
        ("other", &["--devices", "1"], 1),
        ("killed", &["--devices", "0,1", "--kill", "renderer"], 2),
    ] {
        let (chosen, drawn) = run(name, more);
        assert!(chosen == gpus && drawn == expected, "{name}");
    }
    let missing = render(&sandbox, &["--device", "cuda:0", "--devices", "0,5"]).expect(6);
    assert!(missing.stderr.contains("5"), "{}", missing.stderr);
}

#[test]
fn run_of_one_frame_has_its_death() {
    let sandbox = Sandbox::new();
    for role in ["renderer", "geometry", "compositor", "writer", "broker"] {
        let report =
            last(&render(&sandbox, &["--device", "host", "--frames", "1", "--kill", role, "--json"]).expect(0));
        assert_eq!((&report["frames"], &report["killed"][0]["role"]), (&1.into(), &role.into()));
        // The broker may die when all frames are written, which says nothing about the pipeline.
        assert_eq!(report["different"], 0, "{role}");
        assert!(report["frames_per_second"].is_number(), "{role}");
    }
}

#[test]
fn tile_of_a_killed_renderer_is_grey_at_any_rate_in_host_memory() {
    let sandbox = Sandbox::new();
    for [rate, frames] in [["3", "7"], ["240", "480"]] {
        let arguments =
            ["--device", "host", "--live", "--fps", rate, "--frames", frames, "--kill", "renderer", "--json"];
        let report = last(&render(&sandbox, &arguments).expect(0));
        assert!(report["killed"][0]["grey_after_ms"].is_f64(), "{rate}: {report}");
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
    // Of times that the frames carry; how long each is, is a matter of the machine.
    let killed = &report["killed"][0];
    assert!(
        killed["grey_after_ms"].as_f64() <= killed["gap_ms"].as_f64() && killed["grey_after_ms"].is_f64(),
        "{killed}"
    );
    assert!(killed["others_drew_meanwhile"].as_u64() > Some(0), "{killed}");
    let bytes = std::fs::read(&movie).unwrap();
    assert!(bytes.starts_with(b"GIF89a") && bytes.ends_with(&[0x3b]));
}

#[test]
fn viewer_goes_on_while_the_writer_is_dead_in_host_memory() {
    let sandbox = Sandbox::new();
    let movie = sandbox.path().join("movie.gif");
    let arguments = ["--device", "host", "--live", "--frames", "24", "--kill", "writer", "--json", "--out"];
    let report = last(&render(&sandbox, &[&arguments[..], &[movie.to_str().unwrap()]].concat()).expect(0));
    for (count, value) in [("frames", 24), ("missing", 0), ("twice", 0), ("torn", 0)] {
        assert_eq!(report[count], value, "{count}");
    }
    let killed = &report["killed"][0];
    assert_ne!(killed["pid"], killed["new_pid"]);
    assert!(killed["viewed_meanwhile"].as_u64() > Some(0), "{killed}");
    assert!(std::fs::read(&movie).unwrap().ends_with(&[0x3b]));
}

#[test]
fn viewers_come_leave_and_are_killed_while_frames_are_written_in_host_memory() {
    let sandbox = Sandbox::new();
    for more in [&[][..], &["--live"], &["--kill", "writer"], &["--kill", "broker"]] {
        let arguments = [&["--device", "host", "--frames", "24", "--json"], more].concat();
        let report = last(&render(&sandbox, &arguments).expect(0));
        for (count, value) in [("frames", 24), ("missing", 0), ("twice", 0), ("torn", 0)] {
            assert_eq!(report[count], value, "{more:?}: {count}");
        }
        let [left, killed] = report["viewers"].as_array().unwrap().as_slice() else { panic!("{report}") };
        assert_eq!((&left["killed"], &killed["killed"]), (&false.into(), &true.into()));
        assert_ne!(left["pid"], killed["pid"]);
        let times = [&left["came"], &left["went"], &killed["came"], &killed["went"]].map(|at| at.as_u64().unwrap());
        assert!(times.is_sorted() && times[0] >= 8 && times[1] >= 12 && times[3] >= 16, "{times:?}");
        assert!(left["seen"].is_u64() && killed["seen"].is_null(), "{left} {killed}");
    }
}

#[test]
fn movie_or_frame_that_exists_is_refused_and_force_replaces_a_movie() {
    let sandbox = Sandbox::new();
    let movie = sandbox.file("movie.gif", "former");
    let run = |out: &Path, more: &[&str]| {
        let out = out.to_str().unwrap();
        render(&sandbox, &[&["--device", "host", "--frames", "12", "--out", out], more].concat())
    };
    let refused = run(&movie, &[]).expect(5);
    assert!(refused.stderr.contains("movie.gif already exists"), "{}", refused.stderr);
    assert!(refused.stderr.contains("add --force to replace"), "{}", refused.stderr);
    let frame = sandbox.file("frames/frame-00000.png", "former");
    for more in [&[][..], &["--force"]] {
        let refused = run(frame.parent().unwrap(), more).expect(5);
        assert!(refused.stderr.contains("frame-00000.png already exists"), "{}", refused.stderr);
    }
    for path in [&movie, &frame] {
        assert_eq!(std::fs::read(path).unwrap(), b"former");
    }
    run(&movie, &["--force"]).expect(0);
    assert!(std::fs::read(&movie).unwrap().starts_with(b"GIF89a"));
}

// Holds 328.
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
        (&["--renderers", "100"], 2, "100 is too large: use 16 or less"),
        (&["--renderer", "cuda"], 2, "cannot draw by kernels in host memory"),
        (&["--devices", "0,1"], 2, "cannot choose GPUs with --devices: nothing is drawn by kernels"),
        (&["--devices", "0,host"], 2, "\"host\" is not a GPU, and labs run on GPUs only"),
        (&["--frames", "0"], 2, "0 is too small: use 1 or more"),
        (&["--fps", "0"], 2, "0 is too small: use 1 or more"),
        (&["--kill", "nobody"], 2, "possible values: renderer, geometry, compositor, writer, broker"),
        (&["--out", "movie.mp4"], 2, "no movie has the extension .mp4 here"),
        (&["--out", "/dev/null/folder"], 5, "cannot write /dev/null/folder"),
        (&["--out", "/dev/null/movie.gif"], 5, "cannot write /dev/null/movie.gif"),
        (&["--renderer", "opengl"], 2, "possible values: cuda, cpu, vulkan"),
        (&["--scene", "/nonexistent.obj"], 3, "cannot draw /nonexistent.obj"),
        (&["--scene", "torus:1"], 2, "a torus has 18 to 4000000 triangles"),
        (&["--scene", lies], 1, "face vertex index out of bounds"),
    ] {
        let output = render(&sandbox, &[&["--device", "host"], arguments].concat()).expect(code);
        assert!(output.stderr.contains(sentence), "{arguments:?}: {}", output.stderr);
    }
}

// Holds 328.
#[test]
fn run_that_should_have_killed_and_did_not_fails() {
    let sandbox = Sandbox::new();
    // A renderer does not finish 80 frames of so many triangles while 240 frames are composed in a second.
    let arguments = ["--device", "host", "--live", "--fps", "240", "--frames", "240", "--scene", "torus:400000"];
    let output = render(&sandbox, &[&arguments[..], &["--kill", "renderer"]].concat()).expect(1);
    let text = output.text();
    assert!(text.contains("the renderer was not killed: it has not finished 80 frames"), "{text}");
    assert!(text.lines().last().unwrap().contains(", 1 different"), "{text}");
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
            let mut running = Running::spawn(command.env("PARTYWALL_LIBCUDA", "simulated"));
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

#[test]
fn most_renderers_draw_the_picture_of_one() {
    let sandbox = Sandbox::new();
    let [one, most] = ["1", "16"].map(|renderers| {
        let out = sandbox.path().join(renderers);
        let arguments = ["--device", "host", "--renderers", renderers, "--frames", "9", "--out", out.to_str().unwrap()];
        render(&sandbox, &arguments).expect(0);
        files(&out)
    });
    assert!(one == most && one.len() == 9);
}
