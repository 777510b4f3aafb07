// Holds 156.
//! Tables of segments: a table is refused, or all its tensors lie within the version's chunks.
#![no_main]

use libfuzzer_sys::{arbitrary::Unstructured, fuzz_target};
use partywall_shm::{Table, TableBuilder};

fuzz_target!(|input: &[u8]| {
    // The lengths of up to four chunks, then the table.
    let mut rest = Unstructured::new(input);
    let chunks: Vec<u64> =
        (0..rest.arbitrary::<u8>().unwrap_or(0) % 5).map(|_| u64::from(rest.arbitrary::<u32>().unwrap_or(0))).collect();
    let bytes = rest.take_rest().to_vec();
    let Ok(table) = Table::parse(bytes, &chunks) else { return };
    for tensor in table.iter() {
        let end = tensor.offset().checked_add(tensor.bytes()).expect("a tensor ends");
        assert!(tensor.bytes() == 0 || end <= chunks[tensor.chunk()]);
        assert_eq!((tensor.shape().len(), tensor.strides().len()), (tensor.rank(), tensor.rank()));
        let _ = (tensor.elements(), tensor.is_contiguous(), tensor.dtype());
        assert!(table.find(tensor.name()).is_some_and(|found| found == tensor));
    }
    assert_eq!(table.in_given_order().len(), table.len());
    let _ = (table.metadata().count(), table.tensor_bytes());

    // A version grows by a table that is made of its present one.
    let places: Vec<_> = table.in_given_order().iter().map(|tensor| (tensor.chunk() as u32, tensor.offset())).collect();
    let used: Vec<u64> = table.chunk_bytes().collect();
    let again = TableBuilder::from_table(&table).placed(&places, &used);
    let again = Table::parse(again, &chunks).expect("a table that is made of one is one");
    assert!(again.iter().eq(table.iter()) && again.metadata().eq(table.metadata()));
    again.check_growth_of(&table).expect("a table grows into itself");
});
