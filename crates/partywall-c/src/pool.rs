//! Pools: equal blocks of memory that processes take, give back and pass on.

use std::ffi::c_char;

use partywall::{BlockRef, Domain, Place, Pool, PoolOptions, WhenSome};

use crate::{
    argument::{self, place_or, store_info, structs, text, timeout},
    block::{HeldBlock, pw_block},
    domain::pw_domain,
    error::{Failure, call, pw_status},
    handle::{self, object},
};

/// A pool of blocks. Any thread may use it.
pub struct pw_pool {
    _opaque: (),
}

object!(Pool, pw_pool, 12, "pool");
structs!(pw_pool_options, pw_pool_info);

/// How a pool is created, or what an existing one must agree with. What is zero is not set.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_pool_options {
    /// `sizeof(pw_pool_options)`.
    pub size: usize,
    /// Where blocks are: "host", "pinned", "cuda:0", a GPU's UUID, "auto". Null is host memory, and any
    /// for `pw_pool_open`.
    pub device: *const c_char,
    /// The bytes of each block. Required to create a pool.
    pub block_bytes: u64,
    /// How many blocks there are. Required to create a pool.
    pub blocks: u32,
    /// Nonzero: blocks are all zero when they are taken.
    pub zeroed: u8,
    /// Nonzero: other users whom the broker admits may use the pool.
    pub shared: u8,
    /// Nonzero: the pool stays until it is removed or the broker ends.
    pub kept: u8,
}

unsafe fn open(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_pool_options,
    pool: *mut *mut pw_pool,
    unset: Option<Place>,
    open: impl FnOnce(&PoolOptions) -> partywall::Result<Pool>,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(pool, || {
            let options = argument::options(options)?;
            let mut known = handle::get::<Domain>(domain)?.pool(text(name, "name")?);
            known = known.shared(options.shared != 0).kept(options.kept != 0);
            known = known.when_some(place_or(options.device, unset)?, PoolOptions::place);
            if options.block_bytes != 0 {
                known = known.block_bytes(options.block_bytes);
            }
            if options.blocks != 0 {
                known = known.blocks(options.blocks);
            }
            if options.zeroed != 0 {
                known = known.zeroed(true);
            }
            Ok(open(&known)?)
        })
    })
}

/// Creates a pool. The caller owns `*pool` and closes it with `pw_pool_close`. Fails if the name exists. Blocks for a few
/// round trips to the broker, and while the memory is allocated. Any thread may call it.
///
/// # Safety
/// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `pool` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_pool_create(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_pool_options,
    pool: *mut *mut pw_pool,
) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { open(domain, name, options, pool, Some(Place::Host), PoolOptions::create) }
}

/// Opens a pool that exists and agrees with each option that is set. Otherwise as `pw_pool_create`.
///
/// # Safety
/// As `pw_pool_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_pool_open(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_pool_options,
    pool: *mut *mut pw_pool,
) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { open(domain, name, options, pool, None, PoolOptions::open) }
}

/// Opens a pool, or creates it if the name does not exist. Otherwise as `pw_pool_create`.
///
/// # Safety
/// As `pw_pool_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_pool_open_or_create(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_pool_options,
    pool: *mut *mut pw_pool,
) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { open(domain, name, options, pool, Some(Place::Host), PoolOptions::open_or_create) }
}

/// Closes a pool. Its blocks that this process holds stay. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_pool_close(pool: *mut pw_pool) -> pw_status {
    call(|| handle::close::<Pool>(pool))
}

/// What `pw_pool_info_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_pool_info {
    /// `sizeof(pw_pool_info)`, which the caller sets.
    pub size: usize,
    /// The version of the name.
    pub version: u64,
    /// The bytes of each block.
    pub block_bytes: u64,
    /// How many blocks there are.
    pub blocks: u32,
    /// How many of them any process may take.
    pub free: u32,
    /// How many are held.
    pub held: u32,
    /// How many their holders have offered to others.
    pub offered: u32,
    /// How many threads of all processes wait for one.
    pub waiting: u32,
}

/// Stores what is known about a pool now. Takes time in proportion to the number of blocks.
///
/// # Safety
/// No other thread closes `pool`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_pool_info_get(pool: *const pw_pool, info: *mut pw_pool_info) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let pool = handle::get::<Pool>(pool)?;
        let stats = pool.stats();
        let known = pw_pool_info {
            size: 0,
            version: pool.version(),
            block_bytes: pool.block_bytes(),
            blocks: stats.blocks,
            free: stats.free,
            held: stats.held,
            offered: stats.offered,
            waiting: stats.waiting,
        };
        store_info(info, known)
    })
}

/// Takes a block, and waits up to `timeout_ns` for a free one; negative means without end. The caller owns `*block` and
/// closes it with `pw_block_close`.
///
/// # Safety
/// No other thread closes `pool`; `block` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_pool_alloc(pool: *const pw_pool, timeout_ns: i64, block: *mut *mut pw_block) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe { handle::give(block, || Ok(HeldBlock(handle::get::<Pool>(pool)?.alloc(timeout(timeout_ns))?))) })
}

/// Takes a block that is free now; otherwise stores null, which is no failure. Does not block.
///
/// # Safety
/// As `pw_pool_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_pool_try_alloc(pool: *const pw_pool, block: *mut *mut pw_block) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe { handle::give_some(block, || Ok(handle::get::<Pool>(pool)?.try_alloc()?.map(HeldBlock))) })
}

/// Takes over a block that its holder has offered, by the text that `pw_block_offer` stored. Does not wait for work of
/// that process on a GPU: a timeline does. The caller owns `*block`. Does not block.
///
/// # Safety
/// As `pw_pool_alloc`; `offered` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_pool_accept(
    pool: *const pw_pool,
    offered: *const c_char,
    block: *mut *mut pw_block,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(block, || {
            let reference: BlockRef = text(offered, "offered")?.parse().map_err(Failure::from)?;
            Ok(HeldBlock(handle::get::<Pool>(pool)?.accept(&reference)?))
        })
    })
}

/// Fails if the pool must not be used any more. Takes nanoseconds.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_pool_check(pool: *const pw_pool) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<Pool>(pool) }?.check()?))
}
