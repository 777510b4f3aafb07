//! `SIMCUDA_FAULTS`: a comma-separated list of faults, each `FUNCTION:N=CODE` or `FUNCTION:N=kill`.
//!
//! The Nth call of the function in this process (from 1) does nothing and returns the code, which may be 0, or kills
//! its process. A call that releases a resource does so before it returns the code. `*` stands for any function, so N
//! counts all calls.

use std::sync::LazyLock;

use crate::abi::Code;

/// What happens instead of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Answer(Code),
    Kill,
}

#[derive(Debug, PartialEq, Eq)]
struct Fault {
    function: String,
    call: u64,
    action: Action,
}

/// Returns the fault for a call that is the `of_function`th of its function and the `of_all`th of the process.
pub(crate) fn action(function: &str, of_function: u64, of_all: u64) -> Option<Action> {
    static FAULTS: LazyLock<Vec<Fault>> = LazyLock::new(|| {
        let list = std::env::var("SIMCUDA_FAULTS").unwrap_or_default();
        parse(&list).unwrap_or_else(|wrong| {
            panic!("SIMCUDA_FAULTS={list}: {wrong:?} is not FUNCTION:N=CODE or FUNCTION:N=kill, with N from 1")
        })
    });
    let asked =
        |fault: &&Fault| if fault.function == "*" { fault.call == of_all } else { fault.hits(function, of_function) };
    FAULTS.iter().find(asked).map(|fault| fault.action)
}

impl Fault {
    fn hits(&self, function: &str, call: u64) -> bool {
        self.function == function && self.call == call
    }
}

/// Returns the faults of a list, or the entry that cannot be parsed.
fn parse(list: &str) -> Result<Vec<Fault>, &str> {
    list.split(',').filter(|entry| !entry.is_empty()).map(|entry| parse_one(entry).ok_or(entry)).collect()
}

fn parse_one(entry: &str) -> Option<Fault> {
    let (place, action) = entry.split_once('=')?;
    let (function, call) = place.split_once(':')?;
    let action = match action {
        "kill" => Action::Kill,
        code => Action::Answer(Code(code.parse().ok()?)),
    };
    let known = function == "*" || function.starts_with("cu") && !function.ends_with("_v2");
    let call = call.parse().ok().filter(|call| *call >= 1 && known)?;
    Some(Fault { function: function.to_owned(), call, action })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_of_faults_is_parsed() {
        let fault = |function: &str, call, action| Fault { function: function.to_owned(), call, action };
        assert_eq!(
            parse("cuMemMap:3=2,*:17=kill,").unwrap(),
            [fault("cuMemMap", 3, Action::Answer(Code::OUT_OF_MEMORY)), fault("*", 17, Action::Kill)]
        );
        assert_eq!(parse("").unwrap(), []);
    }

    #[test]
    fn impossible_faults_are_refused() {
        for wrong in ["cuMemMap=2", "cuMemMap:0=2", "cuMemMap:x=2", "cuMemMap:1=-1", "malloc:1=2", "cuMemFree_v2:1=2"] {
            assert_eq!(parse(&format!("cuInit:1=2,{wrong}")), Err(wrong));
        }
    }
}
