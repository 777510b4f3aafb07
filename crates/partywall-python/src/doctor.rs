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
    value::value,
    wait,
};

value! {
    /// The result of one probe.
    Finding, "partywall._doctor", "Finding", {
        title: &'static str, outcome: String, detail: String, meaning: String, fix: String, simulated: bool,
    }
}

/// Examines this machine. Each probe runs in a child process of `program`. Ctrl-C ends the wait; the running probe ends
/// by itself.
#[pyfunction]
pub(crate) fn examine(
    py: Python<'_>,
    program: PathBuf,
    domain: Option<String>,
    device: &str,
) -> PyResult<Vec<Finding>> {
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
            let finding = Finding {
                title: report.title,
                outcome: finding.outcome.to_string(),
                detail: finding.detail.to_owned(),
                meaning: finding.meaning.to_owned(),
                fix: finding.fix.to_owned(),
                simulated: finding.simulated,
            };
            // After a signal the receiver is gone.
            let _ = tell.send(finding);
        });
    };
    spawn("partywall-doctor", run).map_err(|source| Error::starting("a thread", source)).or_raise(py)?;
    let mut findings = Vec::new();
    while let Ok(finding) = wait::receive(py, &mut told, Duration::MAX)? {
        findings.push(finding);
    }
    Ok(findings)
}
