//! What works on this machine.

use std::ffi::{CString, OsString, c_char};

use partywall::doctor::{Doctor, Scope};

use crate::{
    argument::{self, c_text, optional_text, store, store_info, structs},
    domain::{options_of, pw_domain_options},
    error::{Failure, call, pw_status},
    handle::{self, object},
    segment::beyond,
};

/// The findings of an examination. Any thread may use it.
pub struct pw_findings {
    _opaque: (),
}

/// A finding as C gets it by address.
struct FindingTexts {
    texts: [CString; 5],
    simulated: bool,
}

struct FindingList(Vec<FindingTexts>);

object!(FindingList, pw_findings, 26, "list of findings");
structs!(pw_finding_info);

/// What `pw_findings_get` stores. The texts are valid until the list is closed; some have several lines, or none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_finding_info {
    /// `sizeof(pw_finding_info)`, which the caller sets.
    pub size: usize,
    /// What was tried.
    pub title: *const c_char,
    /// "ok", "warning", "failed" or "skipped".
    pub outcome: *const c_char,
    /// What was seen.
    pub detail: *const c_char,
    /// What it means.
    pub meaning: *const c_char,
    /// What to do about it.
    pub fix: *const c_char,
    /// 1 if it was made with the simulated driver.
    pub is_simulated: u8,
}

/// Tries what works on this machine, as `partywall doctor` does, each probe in a process of the program `partywall`. Needs
/// no broker and starts none. `options` may be null; `device` is "auto", "all", "cuda:0" or a UUID, or null for "auto".
/// Stores how many findings there are. The caller owns `*findings`. Blocks for some seconds.
///
/// # Safety
/// `options` is null or valid; `device` is null or ends with a zero byte; `findings` and `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_findings_open(
    options: *const pw_domain_options,
    device: *const c_char,
    findings: *mut *mut pw_findings,
    count: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        argument::check_out(count, "count")?;
        handle::give(findings, || {
            let scope: Scope = optional_text(device, "device")?
                .unwrap_or("auto")
                .parse()
                .map_err(|error| Failure::argument(format!("{error}"), "`nvidia-smi -L` lists the GPUs"))?;
            let domain = options_of(options)?;
            let given = argument::options(options)?;
            let mut child: Vec<OsString> = vec![domain.find_program()?.into()];
            for (option, text) in [("--domain", given.domain), ("--socket", given.socket)] {
                if let Some(text) = optional_text(text, option)? {
                    child.extend([option.into(), text.into()]);
                }
            }
            child.extend(["doctor".into(), "--device".into(), scope.to_string().into(), "--probe".into()]);
            let mut found = Vec::new();
            Doctor::new(child, domain).scope(scope).examine(|report| {
                let finding = &report.finding;
                let outcome = finding.outcome.to_string();
                let texts = [report.title, &outcome, &finding.detail, &finding.meaning, &finding.fix].map(c_text);
                found.push(FindingTexts { texts, simulated: finding.simulated });
            });
            store(count, found.len(), "count")?;
            Ok(FindingList(found))
        })
    })
}

/// Stores a finding, counted from 0. Does not block.
///
/// # Safety
/// No other thread closes `findings`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_findings_get(
    findings: *const pw_findings,
    index: usize,
    info: *mut pw_finding_info,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let FindingList(findings) = handle::get::<FindingList>(findings)?;
        let found = findings.get(index).ok_or_else(|| beyond("finding", index, findings.len()))?;
        let [title, outcome, detail, meaning, fix] = found.texts.each_ref().map(|text| text.as_ptr());
        let is_simulated = found.simulated.into();
        store_info(info, pw_finding_info { size: 0, title, outcome, detail, meaning, fix, is_simulated })
    })
}

/// Closes a list. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_findings_close(findings: *mut pw_findings) -> pw_status {
    call(|| handle::close::<FindingList>(findings))
}
