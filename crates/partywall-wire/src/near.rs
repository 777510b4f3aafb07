//! Suggestions: names that look like one that was not found.

/// Returns a question for the end of a message, `; did you mean "x"?`, or nothing if no name looks like `wanted`.
pub fn did_you_mean<'a>(names: impl IntoIterator<Item = &'a str>, wanted: &str) -> String {
    nearest(names, wanted).first().map_or_else(String::new, |name| format!("; did you mean {name:?}?"))
}

/// Returns at most [`NEAR`] names that a person may have meant by `wanted`, likeliest first.
pub fn nearest<'a>(names: impl IntoIterator<Item = &'a str>, wanted: &str) -> Vec<&'a str> {
    let ranked = names.into_iter().filter_map(|name| rank(name, wanted).map(|rank| (rank, name)));
    let mut ranked: Vec<_> = ranked.collect();
    ranked.sort_unstable();
    ranked.dedup();
    ranked.into_iter().take(NEAR).map(|(_, name)| name).collect()
}

/// Returns how much the names differ, or `None` if they are too different to be confused.
pub fn rank(name: &str, wanted: &str) -> Option<usize> {
    if name.eq_ignore_ascii_case(wanted) {
        return Some(0);
    }
    if are_swapped(name.as_bytes(), wanted.as_bytes()) {
        return Some(1);
    }
    if let Some(distance) = distance(name.as_bytes(), wanted.as_bytes()) {
        return Some(distance);
    }
    let last = |path: &str| path.rsplit('/').next().map(str::to_owned);
    let continues = wanted.len() >= 3 && name.starts_with(wanted) || name.len() >= 3 && wanted.starts_with(name);
    (continues || last(name) == last(wanted)).then_some(FAR + 1)
}

/// Returns whether the names differ by two neighbouring letters that have changed places: one mistake in typing, and
/// two steps of the edit distance.
fn are_swapped(a: &[u8], b: &[u8]) -> bool {
    let Some(at) = a.iter().zip(b).position(|(x, y)| x != y) else { return false };
    match (&a[at..], &b[at..]) {
        ([x1, x2, x @ ..], [y1, y2, y @ ..]) => x1 == y2 && x2 == y1 && x == y,
        _ => false,
    }
}

/// Returns the edit distance of the two names, up to [`FAR`]. Two names must have most of their letters in common: `a`
/// and `b` are one replacement apart, but not alike.
pub fn distance(a: &[u8], b: &[u8]) -> Option<usize> {
    let limit = FAR.min(a.len().max(b.len()) / 3);
    if limit == 0 || a.len().abs_diff(b.len()) > limit {
        return None;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        // Cells farther than `limit` from the diagonal cannot be part of a short enough path.
        let low = i.saturating_sub(limit);
        let high = (i + limit + 1).min(b.len());
        let mut diagonal = row[low];
        row[low] = if low == 0 { i + 1 } else { FAR + 1 };
        for j in low..high {
            let replaced = diagonal + usize::from(*x != b[j]);
            diagonal = row[j + 1];
            let above = if j + 1 > i + limit { FAR + 1 } else { diagonal + 1 };
            row[j + 1] = replaced.min(above).min(row[j] + 1);
        }
    }
    Some(row[b.len()]).filter(|d| *d <= limit)
}

/// Maximum number of suggestions.
pub const NEAR: usize = 3;

/// The greatest distance that still counts as a typing error.
pub const FAR: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_suggested() {
        assert_eq!(rank("LLM", "llm"), Some(0));
        assert_eq!(rank("weights", "wieghts"), Some(1));
        assert_eq!(rank("weights", "weigth"), Some(2));
        assert_eq!(rank("ab", "ba"), Some(1));
        assert_eq!(rank("abc", "bca"), None);
        assert_eq!(rank("weights/version2", "weights"), Some(FAR + 1));
        assert_eq!(rank("models/llama", "llama"), Some(FAR + 1));
        assert_eq!(rank("a", "b"), None);
        assert_eq!(rank("weights", "tokens"), None);
    }

    #[test]
    fn likeliest_name_comes_first() {
        let names = ["host", "pinned", "auto", "pinned:1", "cuda"];
        assert_eq!(nearest(names, "pined"), ["pinned"]);
        assert_eq!(nearest(names, "x"), [""; 0]);
        assert_eq!(did_you_mean(names, "hots"), "; did you mean \"host\"?");
        assert_eq!(did_you_mean(names, "Host"), "; did you mean \"host\"?");
        assert_eq!(did_you_mean(names, "x"), "");
    }
}
