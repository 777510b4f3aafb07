//! The steps that `cargo xtask test` runs only if what they guard has changed since `main`. `cargo xtask test --long`
//! runs those that `test` leaves out, so that both together run every step once.

use std::path::{Path, PathBuf};

/// A step of `test` that guards a part of the repository.
pub(super) struct Guard {
    /// The name of the step.
    pub(super) step: &'static str,
    /// The files and folders that it guards, from the root.
    pub(super) paths: &'static [&'static str],
    /// A step that `test --long` always runs and that contains this one.
    contained_in: Option<&'static str>,
}

/// The guards. Every other step of `test` guards everything.
pub(super) const GUARDS: [Guard; 7] = [
    Guard {
        step: "sweeps",
        paths: &[
            "crates/partywall/src",
            "crates/partywall/tests/crashes",
            "crates/partywall-broker",
            "crates/partywall-os",
            "crates/partywall-shm",
            "crates/partywall-wire",
            "testing/harness",
        ],
        contained_in: None,
    },
    Guard {
        step: "bridge",
        paths: &["crates/partywall-bridge", "crates/partywall-cli/src/bridge.rs", "crates/partywall-files/src/plan.rs"],
        contained_in: None,
    },
    Guard {
        step: "python-bridge",
        paths: &[
            "crates/partywall-bridge",
            "crates/partywall-cli/src/bridge.rs",
            "docs/hosts.md",
            "python/examples",
            "python/src/partywall/_command.py",
            "python/src/partywall/_domain.py",
            "python/tests/bridge",
        ],
        contained_in: None,
    },
    Guard {
        step: "labs",
        paths: &[
            "crates/partywall-cli/src/lab.rs",
            "crates/partywall-lab",
            "crates/partywall-measure",
            "crates/partywall-simcuda",
            "crates/partywall-vulkan",
            "docs/labs.md",
            "docs/learn",
            "examples/render",
        ],
        contained_in: None,
    },
    Guard {
        step: "faults",
        paths: &["crates/partywall/src", "crates/partywall-cuda", "crates/partywall-simcuda", "testing/faults"],
        contained_in: Some("all-faults"),
    },
    Guard {
        step: "gpu-tests",
        paths: &[
            "crates/partywall/src",
            "crates/partywall-cuda",
            "crates/partywall-simcuda",
            "crates/partywall-vulkan",
            "testing/gpu",
        ],
        contained_in: None,
    },
    Guard { step: "loom", paths: &["crates/partywall-shm"], contained_in: None },
];

/// Changes of these files concern every step.
const CONCERNS_ALL: [&str; 5] = [".cargo", "Cargo.lock", "Cargo.toml", "rust-toolchain.toml", "xtask"];

/// Which part of the steps a run consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Test,
    Long,
}

/// Returns the guard of a step that does not guard everything.
pub(super) fn guard_of(step: &str) -> Option<&'static Guard> {
    GUARDS.iter().find(|guard| guard.step == step)
}

/// Returns why a run leaves a step out, if it does. `changed` are the files that have changed since `main`; without
/// them, everything may have.
pub(super) fn reason_to_leave_out(step: &str, part: Part, changed: Option<&[PathBuf]>) -> Option<String> {
    let guard = guard_of(step)?;
    let has_changed = changed.is_none_or(|files| guard.concerns(files));
    match part {
        Part::Test => (!has_changed).then(|| "nothing it guards has changed; `test --long` runs it".to_owned()),
        Part::Long if has_changed => Some("what it guards has changed, so `test` runs it".to_owned()),
        Part::Long => guard.contained_in.map(|step| format!("{step} contains it")),
    }
}

impl Guard {
    fn concerns(&self, files: &[PathBuf]) -> bool {
        let below = |file: &Path, paths: &[&str]| paths.iter().any(|path| file.starts_with(path));
        files.iter().any(|file| below(file, self.paths) || below(file, &CONCERNS_ALL))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left_out(step: &str, part: Part, files: Option<&[&str]>) -> bool {
        let files = files.map(|files| files.iter().map(PathBuf::from).collect::<Vec<_>>());
        reason_to_leave_out(step, part, files.as_deref()).is_some()
    }

    #[test]
    fn both_parts_together_run_each_step_once() {
        let states: [Option<&[&str]>; 5] =
            [None, Some(&[]), Some(&["README.md"]), Some(&["crates/partywall-shm/src/lib.rs"]), Some(&["Cargo.lock"])];
        for files in states {
            for guard in GUARDS {
                let test = !left_out(guard.step, Part::Test, files);
                let long = !left_out(guard.step, Part::Long, files) || guard.contained_in.is_some() && !test;
                assert!(test != long, "{} with {files:?}", guard.step);
            }
            assert!(!left_out("tests", Part::Test, files));
        }
    }

    #[test]
    fn step_runs_if_what_it_guards_has_changed_or_may_have() {
        assert!(left_out("loom", Part::Test, Some(&[])));
        assert!(left_out("loom", Part::Test, Some(&["crates/partywall/src/lib.rs", "crates/partywall-shmx"])));
        assert!(!left_out("loom", Part::Test, Some(&["README.md", "crates/partywall-shm/src/lib.rs"])));
        assert!(!left_out("loom", Part::Test, Some(&["Cargo.toml"])));
        assert!(!left_out("loom", Part::Test, None));
    }

    #[test]
    fn guards_are_of_steps_and_of_files_that_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for guard in GUARDS {
            assert!(super::super::TEST.iter().any(|step| step.name == guard.step), "{}", guard.step);
            let container = |name| super::super::LONG.iter().any(|step| step.name == name);
            assert!(guard.contained_in.is_none_or(container), "{}", guard.step);
            for path in guard.paths.iter().chain(&CONCERNS_ALL) {
                assert!(root.join(path).exists(), "{path}, which {} guards", guard.step);
            }
        }
    }
}
