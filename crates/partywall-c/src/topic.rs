//! Topics.

use std::ffi::c_char;

use partywall::{Domain, Place, Topic, TopicOptions, WhenSome};

use crate::{
    argument::{self, array, dtype, place_or, store_info, structs, text},
    domain::pw_domain,
    error::{Failure, call, pw_status},
    handle::{self, object},
};

/// A dimension of a topic's shape that may have any length.
pub const PW_ANY: u64 = u64::MAX;

/// A topic: a stream of samples, each written once and read in place. Any thread may use it.
pub struct pw_topic {
    _opaque: (),
}

object!(Topic, pw_topic, 2, "topic");
structs!(pw_topic_options, pw_topic_info);

/// How a topic is created, or what an existing one must agree with. What is zero is not set.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_topic_options {
    /// `sizeof(pw_topic_options)`.
    pub size: usize,
    /// Where samples are: "host", "pinned", "cuda:0", a GPU's UUID, "auto". Null is host memory, and any
    /// for `pw_topic_open`.
    pub device: *const c_char,
    /// The bytes of the largest sample. Required to create a topic, unless `dtype` and `shape` determine it.
    pub max_bytes: u64,
    /// The lengths of the dimensions of all samples, `PW_ANY` for any length; null if each sample has its own.
    pub shape: *const u64,
    /// How many dimensions `shape` has.
    pub rank: u32,
    /// The element type of all samples.
    pub dtype: u32,
    /// How many samples the ring keeps. The default is 4.
    pub depth: u32,
    /// How many samples published before it joined a subscriber gets. The default is 0.
    pub history: u32,
    /// How many publishers there may be at a time. The default is 2.
    pub publishers: u32,
    /// How many loans each publisher may have at a time. The default is 2.
    pub loans: u32,
    /// How many subscribers there may be at a time.
    pub subscribers: u32,
    /// How many samples each subscriber may hold at a time.
    pub held: u32,
    /// How many blocks samples are in; the default suffices for all of the above.
    pub blocks: u32,
    /// Nonzero: samples are not stamped with the time, and have no age.
    pub no_stamps: u8,
    /// Nonzero: other users whom the broker admits may use the topic.
    pub shared: u8,
    /// Nonzero: the topic stays until it is removed or the broker ends.
    pub kept: u8,
}

unsafe fn options_of(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_topic_options,
    unset: Option<Place>,
) -> Result<TopicOptions, Failure> {
    // SAFETY: the caller's promise.
    let (domain, name, options) =
        unsafe { (handle::get::<Domain>(domain)?, text(name, "name")?, argument::options(options)?) };
    let mut known = domain.topic(name).stamps(options.no_stamps == 0).shared(options.shared != 0);
    known = known.kept(options.kept != 0);
    // SAFETY: the caller's promise.
    known = known.when_some(unsafe { place_or(options.device, unset) }?, TopicOptions::place);
    if options.dtype != 0 {
        known = known.dtype(dtype(options.dtype)?);
    }
    if !options.shape.is_null() {
        // SAFETY: the caller's promise.
        let shape = unsafe { array(options.shape, options.rank as usize, "shape") }?;
        let shape: Vec<_> = shape.iter().map(|length| Some(*length).filter(|length| *length != PW_ANY)).collect();
        known = known.varying_shape(&shape);
    }
    if options.max_bytes != 0 {
        known = known.max_bytes(options.max_bytes);
    }
    type Setter = fn(TopicOptions, u32) -> TopicOptions;
    let numbers: [(u32, Setter); 7] = [
        (options.depth, TopicOptions::depth),
        (options.history, TopicOptions::history),
        (options.publishers, TopicOptions::publishers),
        (options.loans, TopicOptions::loans),
        (options.subscribers, TopicOptions::subscribers),
        (options.held, TopicOptions::held),
        (options.blocks, TopicOptions::blocks),
    ];
    for (number, set) in numbers {
        if number != 0 {
            known = set(known, number);
        }
    }
    Ok(known)
}

unsafe fn open(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_topic_options,
    topic: *mut *mut pw_topic,
    unset: Option<Place>,
    open: impl FnOnce(&TopicOptions) -> partywall::Result<Topic>,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe { handle::give(topic, || Ok(open(&options_of(domain, name, options, unset)?)?)) })
}

/// Creates a topic. The caller owns `*topic` and closes it with `pw_topic_close`. Fails if the name exists. Blocks for a
/// few round trips to the broker. Any thread may call it.
///
/// # Safety
/// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `topic` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_topic_create(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_topic_options,
    topic: *mut *mut pw_topic,
) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { open(domain, name, options, topic, Some(Place::Host), TopicOptions::create) }
}

/// Opens a topic that exists and agrees with each option that is set. Otherwise as `pw_topic_create`.
///
/// # Safety
/// As `pw_topic_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_topic_open(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_topic_options,
    topic: *mut *mut pw_topic,
) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { open(domain, name, options, topic, None, TopicOptions::open) }
}

/// Opens a topic, or creates it if the name does not exist. Otherwise as `pw_topic_create`.
///
/// # Safety
/// As `pw_topic_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_topic_open_or_create(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_topic_options,
    topic: *mut *mut pw_topic,
) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { open(domain, name, options, topic, Some(Place::Host), TopicOptions::open_or_create) }
}

/// Closes a topic. Its publishers and subscribers stay. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_topic_close(topic: *mut pw_topic) -> pw_status {
    call(|| handle::close::<Topic>(topic))
}

/// What `pw_topic_info_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_topic_info {
    /// `sizeof(pw_topic_info)`, which the caller sets.
    pub size: usize,
    /// The version of the name.
    pub version: u64,
    /// The bytes of the largest sample.
    pub max_bytes: u64,
    /// How many samples were published.
    pub published: u64,
    /// The element type of all samples; 0 if each has its own.
    pub dtype: u32,
    /// How many samples the ring keeps.
    pub depth: u32,
    /// How many publishers there are.
    pub publishers: u32,
    /// How many subscribers there are.
    pub subscribers: u32,
}

/// Stores what is known about a topic now. Does not block.
///
/// # Safety
/// No other thread closes `topic`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_topic_info_get(topic: *const pw_topic, info: *mut pw_topic_info) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let topic = unsafe { handle::get::<Topic>(topic) }?;
        let stats = topic.stats();
        let known = pw_topic_info {
            size: 0,
            version: topic.version(),
            max_bytes: topic.max_bytes(),
            published: stats.published,
            dtype: topic.dtype().map_or(0, |dtype| dtype.code().into()),
            depth: topic.depth(),
            publishers: stats.publishers.len() as u32,
            subscribers: stats.subscribers.len() as u32,
        };
        // SAFETY: the caller's promise.
        unsafe { store_info(info, known) }
    })
}

/// Fails if the topic cannot be found by its name any more. Does not block.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_topic_check(topic: *const pw_topic) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<Topic>(topic) }?.check()?))
}
