//! The NUMA nodes of the machine.

use std::fs;

/// Returns the highest number that a NUMA node of this machine may have: what the kernel says is possible, else the
/// highest that any kernel allows.
pub fn highest_node() -> u32 {
    // In a container it shows the host's nodes. A sandbox may have no such file.
    let possible = fs::read_to_string("/sys/devices/system/node/possible").ok();
    possible.as_deref().and_then(highest).unwrap_or(MOST_NODES - 1)
}

/// Returns the highest number in a list such as `0-1,4`, which is in order.
fn highest(list: &str) -> Option<u32> {
    let last = list.trim().rsplit([',', '-']).next()?;
    last.parse().ok().filter(|node| *node < MOST_NODES)
}

/// The most nodes that a kernel can be built for (`CONFIG_NODES_SHIFT` is at most 10).
const MOST_NODES: u32 = 1 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn highest_node_of_a_list_is_found() {
        for (list, node) in [("0\n", 0), ("0-3\n", 3), ("0,8", 8), ("0-1,4-7\n", 7), ("1023", 1023)] {
            assert_eq!(highest(list), Some(node), "{list:?}");
        }
        for list in ["", "\n", "x", "0-", "1024", "4294967296"] {
            assert_eq!(highest(list), None, "{list:?}");
        }
        assert!(highest_node() < MOST_NODES);
    }
}
