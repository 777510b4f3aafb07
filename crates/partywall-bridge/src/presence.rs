//! The names `.bridge/REALM/HOST`: one for each host that is there. So whoever watches the names of a domain is told when
//! a host is lost and when it returns, and the broker knows of no hosts.

use std::collections::BTreeMap;

use partywall::{DType, Domain, Place, Result, Segment};

use crate::{BRIDGES, message::HostView};

/// The names of the hosts that are there. They end with this value.
#[derive(Debug)]
pub(crate) struct Presence {
    domain: Domain,
    realm: String,
    /// The instance of each host, and its name.
    named: BTreeMap<String, (String, Segment)>,
}

impl Presence {
    pub(crate) fn new(domain: &Domain, realm: &str) -> Self {
        Self { domain: domain.clone(), realm: realm.to_owned(), named: BTreeMap::new() }
    }

    /// Gives a name to each host that is there, and takes it from those that are not, or are another instance by now.
    ///
    /// # Errors
    /// Those of a commit. The next call tries again.
    pub(crate) fn follow(&mut self, hosts: &[HostView]) -> Result<()> {
        let there: BTreeMap<_, _> = hosts
            .iter()
            .filter(|view| view.unreachable_ms.is_none())
            .map(|view| (&view.host, &view.instance))
            .collect();
        self.named.retain(|host, (instance, _)| there.get(host) == Some(&&*instance));
        for (host, instance) in there {
            if !self.named.contains_key(host) {
                let name = format!("{BRIDGES}{}/{host}", self.realm);
                let build = self.domain.create(&name, Place::Host).tensor("host", DType::U8, &[1]);
                let segment = build.metadata("host", host).metadata("instance", instance).allocate()?.commit()?;
                self.named.insert(host.clone(), (instance.clone(), segment));
            }
        }
        Ok(())
    }
}
