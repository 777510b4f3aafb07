//! Segments that queues hold: for how long, and what tasks of any process may name.

use std::os::fd::OwnedFd;

use partywall_os::map::SealedMap;
use partywall_shm::{
    pool::Pool,
    queue::{
        AttachedPart, Contents, MAX_ATTACHMENTS, NewInput, NewTask, NotSubmitted, Pools, Queue, TaskId, TaskState,
    },
};
use partywall_wire::{Answer, Call, Control, LeaseId, Limit, QueueHolder, QueueShape, Refusal};

use crate::{
    common::{Client, TestBroker, called, eventually, full, opened},
    pools::{self, create, inspect, survive_any_control_memory},
    roles::{self, SAYS},
};

const SHAPE: QueueShape = QueueShape { tasks: 4, outputs: 1, output_bytes: 1, lease: 0 };

const QUEUE: Control = Control { blocks: 1, block_bytes: 1, zeroed: false, topic: None, queue: Some(SHAPE) };

/// A queue that a client has open.
struct Opened {
    lease: LeaseId,
    queue: Queue,
    inputs: Pool,
    outputs: Pool,
}

impl Opened {
    fn new(lease: LeaseId, fds: Vec<OwnedFd>) -> Self {
        let [inputs, outputs] = [&fds[0], &fds[1]].map(|fd| Pool::map(fd).unwrap());
        Self { lease, queue: Queue::map(&fds[2]).unwrap(), inputs, outputs }
    }

    fn create(client: &mut Client) -> Self {
        let (lease, fds) = create(client, "q", QUEUE).unwrap();
        Self::new(LeaseId(lease), fds)
    }

    fn open(client: &mut Client) -> Self {
        let (opened, fds) = pools::open(client, "q").unwrap();
        Self::new(opened.lease, fds)
    }

    /// Submits a task that names an attachment.
    fn submit(&self, row: u16, attachment: u32) -> Result<TaskId, NotSubmitted> {
        let task =
            NewTask { kind: b"", arguments: b"", ready: None, output: None, max_attempts: 1, cancel: false, now: 0 };
        let part = NewInput::Part(AttachedPart { attachment, offset: 0, contents: Contents::of_bytes(1) });
        self.queue.submit(&self.inputs, self.queue.reserve(row).unwrap(), &task, &[part])
    }

    /// Ends a task.
    fn end(&self, row: u16, id: TaskId) {
        let pools = Pools { inputs: &self.inputs, outputs: &self.outputs };
        self.queue.dispose(pools, row, id, |state| state == TaskState::Pending).unwrap();
    }

    fn attach(&self, client: &mut Client, segment: LeaseId) -> Result<u32, Refusal> {
        client.ask(Call::Attach { queue: self.lease, segment }).map(|answer| match answer {
            Answer::Attached { attachment } => attachment,
            other => panic!("{other:?}"),
        })
    }

    fn detach(&self, client: &mut Client, attachment: u32) -> Result<Answer, Refusal> {
        client.ask(Call::DetachSegment { queue: self.lease, attachment })
    }
}

/// Commits a segment, and attaches it to the queue.
pub(crate) fn attach_weights(client: &mut Client) -> u32 {
    let (_, segment) = client.commit("weights", b"weights", false);
    Opened::open(client).attach(client, segment).unwrap()
}

#[test]
fn attached_segment_outlives_every_process_but_the_queues() {
    let broker = TestBroker::start();
    let mut worker = broker.client();
    let queue = Opened::create(&mut worker);
    // Another process commits a segment, attaches it, and is killed.
    let mut attacher = roles::start("attacher", &broker.socket);
    let attachment: u32 = attacher.expect(SAYS).parse().unwrap();
    assert!(queue.queue.is_attached(attachment));
    let id = queue.submit(worker.welcome.row, attachment).unwrap();
    attacher.kill();
    eventually("it is dead", || worker.members().len() == 1);
    assert!(matches!(worker.open("weights").0, Err(Refusal::NotFound { .. })), "its name went with it");
    let call = Call::OpenAttached { queue: queue.lease, attachment };
    let (answer, fds) = worker.ask_with(call, &[]);
    let segment = opened(answer);
    assert_eq!((segment.name.as_str(), segment.version, fds.len()), ("weights", 1, 1));
    assert!(SealedMap::new(&fds[0]).unwrap().bytes().starts_with(b"weights"));
    assert_eq!(inspect(&mut worker, "q").control.unwrap().queue.unwrap().attached[0].tasks, 1);

    worker.ask(Call::Release { lease: segment.lease }).unwrap();
    queue.end(worker.welcome.row, id);
    let before = worker.status().fds;
    worker.ask(Call::Release { lease: queue.lease }).unwrap();
    assert_eq!((before, worker.status().fds), (5, 0), "the queue's four, and the segment's");
}

#[test]
fn segment_is_detached_when_no_task_names_it() {
    let broker = TestBroker::start();
    let mut one = broker.client();
    let mut two = broker.client();
    let queue = Opened::create(&mut one);
    let at_two = Opened::open(&mut two);
    let (_, segment) = one.commit("weights", b"weights", false);
    let row = one.welcome.row;
    let attachment = queue.attach(&mut one, segment).unwrap();
    assert_eq!(queue.attach(&mut one, segment), Ok(attachment), "once");
    let id = queue.submit(row, attachment).unwrap();
    let in_use = Refusal::AttachmentInUse {
        queue: called("q"),
        queue_version: 1,
        name: called("weights"),
        version: 1,
        tasks: 1,
        first: (id.index, id.generation),
    };
    assert_eq!(at_two.detach(&mut two, attachment), Err(in_use));
    let holder = QueueHolder { name: "q".into(), version: 1, attachment };
    assert_eq!(inspect(&mut two, "weights").queues, std::slice::from_ref(&holder));
    queue.end(row, id);
    assert_eq!(at_two.detach(&mut two, attachment), Ok(Answer::Done));
    assert_eq!(queue.submit(row, attachment), Err(NotSubmitted::Detached(attachment)));
    let gone = Refusal::NotAttached { queue: called("q"), attachment };
    assert_eq!(at_two.detach(&mut two, attachment), Err(gone.clone()));
    assert_eq!(two.ask(Call::OpenAttached { queue: at_two.lease, attachment }), Err(gone.clone()));
    // A number that a process made up.
    let made_up = u32::MAX;
    assert!(!queue.queue.is_attached(made_up));
    let call = Call::OpenAttached { queue: queue.lease, attachment: made_up };
    assert_eq!(one.ask(call), Err(Refusal::NotAttached { queue: called("q"), attachment: made_up }));
    assert_ne!(queue.attach(&mut one, segment), Ok(attachment), "no number comes twice");
    assert!(inspect(&mut two, "weights").queues[0] != holder);
}

#[test]
fn invalid_attachments_are_refused() {
    let broker = TestBroker::start();
    let mut one = broker.client();
    let mut two = broker.client();
    let queue = Opened::create(&mut one);
    let (pool, _) = create(&mut one, "p", Control { queue: None, ..QUEUE }).unwrap();
    let (_, segment) = one.commit("s", b"x", false);
    for (queue, segment) in
        [(queue.lease, pool), (queue.lease, queue.lease.0), (LeaseId(pool), segment.0), (segment, segment.0)]
    {
        let outcome = one.ask(Call::Attach { queue, segment: LeaseId(segment) });
        assert!(matches!(outcome, Err(Refusal::Invalid { .. })), "{outcome:?}");
    }
    assert!(matches!(queue.attach(&mut two, segment), Err(Refusal::Stale { .. })), "of another member");
    assert!(matches!(queue.detach(&mut two, 0), Err(Refusal::Stale { .. })));
    for i in 0..MAX_ATTACHMENTS {
        let (_, segment) = one.commit(&format!("many/{i}"), b"x", false);
        assert_eq!(queue.attach(&mut one, segment), Ok(i));
    }
    let limit = u64::from(MAX_ATTACHMENTS);
    assert_eq!(queue.attach(&mut one, segment), Err(full(Limit::Attachments, limit, 0)));
    queue.detach(&mut one, 5).unwrap();
    assert_eq!(queue.attach(&mut one, segment), Ok(5 + MAX_ATTACHMENTS));
}

// Holds 158.
#[test]
fn broker_survives_any_control_memory_of_queues() {
    let shape = QueueShape { tasks: 8, outputs: 3, output_bytes: 100, lease: 1 };
    let control = Control { blocks: 4, block_bytes: 100, zeroed: false, topic: None, queue: Some(shape) };
    survive_any_control_memory(control, |client, lease| {
        let (_, segment) = client.commit(&format!("weights-{}", client.welcome.member), b"weights", false);
        // The control memory may say that all entries are taken, or that tasks name this one.
        if let Ok(Answer::Attached { attachment }) = client.ask(Call::Attach { queue: LeaseId(lease), segment }) {
            let _ = client.ask(Call::DetachSegment { queue: LeaseId(lease), attachment });
        }
        let _ = client.ask(Call::Attach { queue: LeaseId(lease), segment });
    });
}
