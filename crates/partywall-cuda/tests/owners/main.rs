//! The owners on the simulated driver, whose calls are made to fail.
//!
//! Each case runs in a process of its own, which runs this program again: the settings of the simulation belong to a
//! process, and at the end of a process the simulation reports what is left.
#![allow(clippy::unwrap_used, clippy::print_stdout, unsafe_code)] // tests, their helpers included; driver calls

mod memory;
mod node;
mod order;
mod sharing;

use std::ffi::CStr;
use std::process::Command;

use libloading::os::unix::Library;
use partywall_cuda::{Context, CuResult, CudaError, Device, Driver, Stream};
use partywall_harness::{Running, simulated_driver};

const ROLE: &str = "PARTYWALL_TEST_ROLE";
/// The granularity of exportable memory.
const GRANULARITY: u64 = 2 << 20;

/// Runs the body of a test once for each list of faults (`SIMCUDA_FAULTS`), and passes it a context and the list.
/// Afterwards the process must have freed everything except the listed objects, by kind.
#[track_caller]
fn on_the_simulated_gpu<F: Fn(&Context, &str)>(faults: &[&str], left: &[&str], body: F) {
    run_roles::<F>(faults, left, |faults| {
        let context = context();
        body(&context, faults);
        assert_eq!(context.take_drop_error(), None);
    });
}

/// Runs the body of a test as [`on_the_simulated_gpu`] does, in a process that has not even initialised CUDA.
#[track_caller]
fn without_a_context<F: Fn(&str)>(faults: &[&str], left: &[&str], body: F) {
    run_roles::<F>(faults, left, |faults| body(faults));
}

/// Runs `body` if this process was started for that; else starts the test that the type `F` belongs to once for each
/// list of faults.
#[track_caller]
fn run_roles<F>(faults: &[&str], left: &[&str], body: impl FnOnce(&str)) {
    if std::env::var_os(ROLE).is_some() {
        body(&std::env::var("SIMCUDA_FAULTS").unwrap());
        assert_eq!(Driver::load().unwrap().take_drop_error(), None);
        return;
    }
    // crate::module::test::{{closure}}
    let (_, test) = std::any::type_name::<F>().split_once("::").unwrap();
    for faults in faults {
        let ledger = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test.trim_end_matches("::{{closure}}"), "--nocapture"]).env(ROLE, "test");
        command.env(Driver::LIBRARY_VARIABLE, simulated_driver()).env("SIMCUDA_DEVICES", "3");
        command.env("CUDA_VISIBLE_DEVICES", "0,1").env("SIMCUDA_FAULTS", faults).env("SIMCUDA_LEDGER", ledger.path());
        let output = Running::spawn(&mut command).wait();
        assert_eq!(output.code, Some(0), "{faults}: {}{}", output.text(), output.stderr);
        let lists = std::fs::read_dir(ledger.path()).unwrap().map(|file| std::fs::read(file.unwrap().path()).unwrap());
        let lists: Vec<serde_json::Value> = lists.map(|list| serde_json::from_slice(&list).unwrap()).collect();
        assert!(!lists.is_empty(), "{test} ran with the simulated driver");
        let mut kinds: Vec<_> = lists.iter().flat_map(|list| list.as_array().unwrap()).map(|it| &it["kind"]).collect();
        kinds.sort_by_key(|kind| kind.as_str());
        assert_eq!(kinds, left, "{faults}");
    }
}

fn context() -> Context {
    Context::retain(Device::by_ordinal(Driver::load().unwrap(), 0).unwrap()).unwrap()
}

/// Returns the call that a list of one fault names.
fn call_of(faults: &str) -> &str {
    faults.split(':').next().unwrap()
}

fn is_failed(error: &CudaError, call: &str, code: CuResult) -> bool {
    error.call == call && error.code == code
}

/// Calls `action` while a stream is being captured, in the mode that forbids unsafe calls to every thread. Returns
/// whether the capture is still valid afterwards.
fn while_capturing(context: &Context, stream: &Stream, action: impl FnOnce()) -> bool {
    // SAFETY: loaded already: it is the driver of this process.
    let library = unsafe { Library::new(std::env::var_os(Driver::LIBRARY_VARIABLE).unwrap()) }.unwrap();
    let entry = |name: &CStr| {
        // SAFETY: the callers below give the signatures of cuda.h.
        unsafe { library.get::<*const ()>(name) }.map(|address| *address).unwrap()
    };
    let stream = stream.as_ref().raw().0;
    let _guard = context.guard().unwrap();
    // SAFETY: the signature of cuda.h; the stream is live.
    let begin: unsafe extern "C" fn(u64, u32) -> CuResult =
        unsafe { std::mem::transmute(entry(c"cuStreamBeginCapture_v2")) };
    // SAFETY: as above.
    let end: unsafe extern "C" fn(u64, *mut u64) -> CuResult =
        unsafe { std::mem::transmute(entry(c"cuStreamEndCapture")) };
    // SAFETY: as above.
    let destroy: unsafe extern "C" fn(u64) -> CuResult = unsafe { std::mem::transmute(entry(c"cuGraphDestroy")) };
    let mut graph = 0;
    // SAFETY: the stream is live and captures nothing yet.
    assert!(unsafe { begin(stream, 0) }.is_success());
    action();
    // SAFETY: as above; the place for the graph is live.
    let ended = unsafe { end(stream, &mut graph) };
    // SAFETY: made by the call before, destroyed once.
    ended.is_success() && unsafe { destroy(graph) }.is_success()
}
