//! What a host says about a version that it exports.

use partywall::{check_name, info::Table};
use serde::{Deserialize, Serialize};

use crate::{
    content::spans,
    message::{Unanswered, decode, line},
};

/// A version, without its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) name: String,
    pub(crate) version: u64,
    /// Where its memory is, for people.
    #[serde(deserialize_with = "line")]
    pub(crate) place: String,
    /// The length of its content.
    pub(crate) length: u64,
    /// The root of its content.
    pub(crate) root: [u8; 32],
    /// The lengths of its chunks, without which its table cannot be read.
    chunks: Vec<u64>,
    /// Its table.
    table: Vec<u8>,
}

impl Manifest {
    pub(crate) fn new<B: AsRef<[u8]>>(
        (name, version, place): (String, u64, String),
        root: [u8; 32],
        chunks: Vec<u64>,
        table: &Table<B>,
    ) -> Self {
        let (_, length) = spans(table);
        Self { name, version, place, length, root, chunks, table: table.as_bytes().to_vec() }
    }

    /// Reads the manifest that a peer has sent, with its table.
    ///
    /// # Errors
    /// [`Unanswered`] if anything in it cannot be true.
    pub(crate) fn read(bytes: &[u8]) -> Result<(Self, Table<Vec<u8>>), Unanswered> {
        let mut manifest: Self = decode(bytes)?;
        if check_name(&manifest.name).is_err() || manifest.version == 0 {
            return Err(Unanswered::Malformed("its name or its version is none"));
        }
        let table = std::mem::take(&mut manifest.table);
        let table = Table::parse(table, &manifest.chunks);
        let table = table.map_err(|_| Unanswered::Malformed("its table is damaged, or of another release"))?;
        if spans(&table).1 != manifest.length {
            return Err(Unanswered::Malformed("its length is not that of its tensors"));
        }
        // Of all others each piece is proved.
        if manifest.length == 0 && blake3::hash(b"") != manifest.root {
            return Err(Unanswered::Malformed("it has no bytes, and its root is that of some"));
        }
        Ok((manifest, table))
    }
}

/// The longest manifest: one of four million tensors has some 400 MB and is refused.
pub(crate) const MAX_MANIFEST: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use partywall::{DType, TableBuilder};

    use super::*;
    use crate::message::encode;

    fn manifest() -> Manifest {
        let mut table = TableBuilder::new();
        table.add("w", DType::F32, &[100]).unwrap();
        table.add_view("v", DType::F32, &[10], &[2], "w", 40).unwrap();
        table.add("b", DType::U8, &[7]).unwrap();
        let layout = table.layout(1 << 30, 8).unwrap();
        let table = Table::parse(layout.table, &layout.chunks).unwrap();
        Manifest::new(("llm".into(), 3, "host memory".into()), [7; 32], layout.chunks, &table)
    }

    #[test]
    fn content_leaves_out_views_and_gaps() {
        let (read, table) = Manifest::read(&encode(&manifest())).unwrap();
        assert_eq!((&read.name[..], read.version, read.length), ("llm", 3, 407));
        let (spans, length) = spans(&table);
        let found: Vec<_> = spans.iter().map(|span| (&span.tensor[..], span.start, span.bytes)).collect();
        assert_eq!((found, length), (vec![("w", 0, 400), ("b", 400, 7)], 407));
    }

    #[test]
    fn false_manifests_are_refused() {
        let right = manifest();
        let refused = |change: &dyn Fn(&mut Manifest)| {
            let mut wrong = right.clone();
            change(&mut wrong);
            assert!(matches!(Manifest::read(&encode(&wrong)), Err(Unanswered::Malformed(_))), "{wrong:?}");
        };
        refused(&|wrong| wrong.length += 1);
        refused(&|wrong| wrong.version = 0);
        refused(&|wrong| wrong.name = "../x".into());
        refused(&|wrong| wrong.chunks.clear());
        refused(&|wrong| wrong.table.truncate(80));
        refused(&|wrong| wrong.table[70] ^= 0xff);
        let bytes = encode(&right);
        for end in 0..bytes.len() {
            assert!(Manifest::read(&bytes[..end]).is_err(), "{end}");
        }
        assert!(Manifest::read(&[&bytes[..], &[0]].concat()).is_err());
    }
}
