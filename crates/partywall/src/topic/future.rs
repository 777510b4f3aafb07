//! Topics in asynchronous programs.

use std::sync::{Arc, Weak};

use futures_core::Stream;
use tokio::task::coop::consume_budget;
use tracing::Instrument;

use super::{Sample, Subscriber, Topic, TopicOptions};
use crate::{
    domain::stream,
    error::{Error, Gone, Result},
};

impl Subscriber {
    /// Receives the next sample, and waits for one without blocking a thread. Runs on any executor.
    ///
    /// A sample is noticed within a millisecond or so: while a future waits, the connection's service thread polls for
    /// samples, as for [`event`](Self::event). Several tasks may wait at a time; each sample is received once.
    ///
    /// The future may be dropped at any time, for example by `tokio::time::timeout` or `select!`: it receives a sample
    /// only in the poll that returns it. As after [`recv`](Self::recv), a stream of the publisher may still write the
    /// sample ([`Sample::wait_async`]).
    ///
    /// ```no_run
    /// # async fn receive(subscriber: &partywall::Subscriber) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// let sample = tokio::time::timeout(Duration::from_secs(1), subscriber.recv_async()).await??;
    /// println!("{:?}", sample.as_slice::<f32>()?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`recv`](Self::recv), except [`Error::Timeout`] and [`Error::Cancelled`].
    pub async fn recv_async(&self) -> Result<Sample> {
        let receive = async {
            // Before anything is received: a task that always finds a sample lets others run here.
            consume_budget().await;
            loop {
                if let Some(sample) = self.try_recv()? {
                    return Ok(sample);
                }
                let open = &self.shared.open;
                open.blocks.require_live()?;
                let port = self.shared.port.clone();
                // The connection must not end on the service thread.
                let shared = Arc::downgrade(&self.shared);
                let held = open.shape.held as usize;
                open.domain().until(move |_| port.has_next(Weak::strong_count(&shared) > held)).await;
            }
        };
        receive.instrument(tracing::trace_span!("receive", topic = self.topic())).await
    }

    /// Returns the samples as a stream. It ends once the topic is idle, with
    /// [`until_idle`](super::SubscriberOptions::until_idle), or after an error; another stream then goes on. A stream
    /// that is dropped has lost no sample.
    ///
    /// ```no_run
    /// # async fn receive(subscriber: &partywall::Subscriber) -> partywall::Result<()> {
    /// use tokio_stream::StreamExt; // or `futures::StreamExt`
    ///
    /// let mut samples = subscriber.stream();
    /// while let Some(sample) = samples.next().await {
    ///     println!("{}", sample?.position());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn stream(&self) -> impl Stream<Item = Result<Sample>> + Send + Unpin + '_ {
        stream(move || async move {
            match self.recv_async().await {
                Err(Error::Gone(Gone::TopicIdle { .. })) => Ok(None),
                received => received.map(Some),
            }
        })
    }
}

impl TopicOptions {
    /// Opens the topic as [`open`](Self::open) does, but waits for one that does not exist yet, for as long as the
    /// future is polled, without blocking a thread; needs the runtime of tokio. The [timeout](Self::timeout) has no
    /// effect.
    ///
    /// The future may be dropped at any time.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`Error::Cancelled`] if the runtime ends.
    pub async fn open_async(&self) -> Result<Topic> {
        let options = self.clone();
        let open = move |opened, fds| {
            let blocks = options.wanted.attach(opened, fds, |control| options.check(control))?;
            Topic::new(blocks, options.stamps)
        };
        self.wanted.open_async(open).await
    }
}
