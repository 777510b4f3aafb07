//! Pages of listings. Every answer stays below the smallest message limit, however much exists.

/// Collects rows until they fill one answer. `text` returns the length of a row's text. Returns the rows, and whether
/// more follow.
pub(super) fn page<T>(rows: impl Iterator<Item = T>, text: impl Fn(&T) -> usize) -> (Vec<T>, bool) {
    let mut rows = rows.fuse();
    let mut page = Vec::new();
    let mut bytes = 0;
    while bytes <= PAGE_BYTES
        && let Some(row) = rows.next()
    {
        bytes += text(&row) + ROW_BYTES;
        page.push(row);
    }
    (page, rows.next().is_some())
}

/// Merges two ordered sequences.
pub(super) fn in_order<K: Ord, V>(
    a: impl Iterator<Item = (K, V)>,
    b: impl Iterator<Item = (K, V)>,
) -> impl Iterator<Item = (K, V)> {
    let mut a = a.peekable();
    let mut b = b.peekable();
    std::iter::from_fn(move || match (a.peek(), b.peek()) {
        (Some(x), Some(y)) if y.0 < x.0 => b.next(),
        (Some(_), _) => a.next(),
        (None, _) => b.next(),
    })
}

pub(super) fn count(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// A page ends with the row that exceeds this number of bytes: half of the smallest message limit (64 KiB).
const PAGE_BYTES: usize = 32 * 1024;

/// Upper bound on a row without its text: at most twenty numbers of ten bytes and a UUID.
const ROW_BYTES: usize = 220;

/// The number of permits or blocks that count as one byte of a page. Counting a page full of them takes about two
/// milliseconds.
pub(super) const SLOTS_AS_A_BYTE: usize = 16;
