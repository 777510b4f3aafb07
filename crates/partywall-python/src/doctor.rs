//! `partywall.doctor`.

use std::{path::PathBuf, sync::mpsc, time::Duration};

use partywall::{
    Error,
    doctor::{Doctor, Scope},
};
use partywall_os::thread::spawn;
use pyo3::prelude::*;

use crate::{
    domain::options,
    errors::{Raise, parse},
    wait,
};

/// A probe: title, outcome, detail, meaning, remedy, whether the driver is simulated.
type Row = (&'static str, String, String, String, String, bool);

/// Examines this machine. Each probe runs in a child process of `program`. Ctrl-C ends the wait; the running probe ends
/// by itself.
#[pyfunction]
pub(crate) fn examine(py: Python<'_>, program: PathBuf, domain: Option<String>, device: &str) -> PyResult<Vec<Row>> {
    let scope: Scope = parse(device)?;
    let mut child = vec![program.into_os_string()];
    if let Some(domain) = &domain {
        child.extend(["--domain".into(), domain.into()]);
    }
    child.extend(["doctor".into(), "--device".into(), scope.to_string().into(), "--probe".into()]);
    let doctor = Doctor::new(child, options(domain, None)).scope(scope);
    let (tell, mut told) = mpsc::channel();
    let run = move || {
        doctor.examine(|report| {
            let finding = &report.finding;
            let detail = finding.detail.to_owned();
            let meaning = finding.meaning.to_owned();
            let outcome = finding.outcome.to_string();
            let remedy = finding.fix.to_owned();
            // After a signal the receiver is gone.
            let _ = tell.send((report.title, outcome, detail, meaning, remedy, finding.simulated));
        });
    };
    spawn("partywall-doctor", run).map_err(|source| Error::starting("a thread", source)).or_raise(py)?;
    let mut rows = Vec::new();
    while let Ok(row) = wait::receive(py, &mut told, Duration::MAX)? {
        rows.push(row);
    }
    Ok(rows)
}
