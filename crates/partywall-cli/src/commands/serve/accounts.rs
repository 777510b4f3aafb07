//! Users and groups by number or name.
//!
//! Names are looked up in `/etc/passwd` and `/etc/group` alone: other sources need the C library's resolver, which
//! loads libraries into the process that becomes the broker. Accounts of a directory service are given by number.

use std::path::Path;

/// Returns a user's number.
pub(super) fn user(text: &str) -> Result<u32, String> {
    number(text, "user", Path::new("/etc/passwd"))
}

/// Returns a group's number.
pub(super) fn group(text: &str) -> Result<u32, String> {
    number(text, "group", Path::new("/etc/group"))
}

fn number(text: &str, what: &str, file: &Path) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let entries = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    find(&entries, text).ok_or_else(|| format!("no {what} in {} has this name; give its number", file.display()))
}

/// Returns the number in the third field of the entry with this name.
fn find(entries: &str, name: &str) -> Option<u32> {
    let mut fields = entries.lines().map(|line| line.split(':'));
    fields.find_map(|mut entry| (entry.next() == Some(name)).then(|| entry.nth(1)?.parse().ok()).flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_found_by_number_and_name() {
        assert_eq!((user("1001"), user("root"), group("root")), (Ok(1001), Ok(0), Ok(0)));
        let entries = "root:x:0:0:root:/root:/bin/sh\nbroken\nbob:x:1001:100::/home/bob:/bin/sh\n";
        assert_eq!((find(entries, "bob"), find(entries, "x"), find(entries, "broken")), (Some(1001), None, None));
        assert!(user("no such user").unwrap_err().contains("/etc/passwd"));
        assert!(user("-1").is_err());
    }
}
