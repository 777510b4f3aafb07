// The kernels of `partywall lab` and `partywall bench`: one that takes its time, the square roots of `work-queue`,
// chains of dependent loads, and those of `partywall lab coherency`, which poll and change words that a kernel of
// another process polls and changes, in each way that CUDA has for a load and a store. Nothing else launches them.
//
// Compiled as partywall.cu is, and by its rules but for one: they spin, because that is the experiment. Each
// loop ends at a time limit, and at a number of rounds in case that the clock stands still.
//
// Loads and stores are inline PTX: one instruction each, so that what is seen is that instruction and not the
// compiler's choice. The exception is pw_poll_compiled, whose subject is the compiler's choice.

typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

// Nanoseconds, the same clock in all kernels of a GPU.
static __device__ uint64_t pw_now() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// A limit by rounds: some seconds if every load goes to memory.
#define PW_MOST_ROUNDS (1ull << 26)

// Runs for some nanoseconds, like a kernel that has much to do.
extern "C" __global__ void pw_delay(uint64_t time) {
    uint64_t began = pw_now();
#pragma unroll 1
    for (uint64_t rounds = 0; rounds < PW_MOST_ROUNDS && pw_now() - began < time; rounds++) {
        asm volatile("nanosleep.u32 1000;");
    }
}

// The square roots of n floats, each rounded to the nearest, as the CPU's are.
extern "C" __global__ void pw_square_roots(const float* from, float* to, uint64_t n) {
    uint64_t stride = gridDim.x * (uint64_t)blockDim.x;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n; i += stride) {
        to[i] = __fsqrt_rn(from[i]);
    }
}

// Follows a chain of words, each of which says which word the next one is, from the word *at; leaves there where it
// ended. A word behind the last one ends it.
extern "C" __global__ void pw_follow(const uint64_t* chain, uint64_t last, uint64_t links, uint64_t* at) {
    uint64_t link = *at;
#pragma unroll 1
    for (uint64_t i = 0; i < links && link <= last; i++) {
        link = chain[link];
    }
    *at = link;
}

// The same; the word behind each link is written, and visible to the whole GPU, before the link is read.
extern "C" __global__ void pw_follow_writing(volatile uint64_t* chain, uint64_t last, uint64_t links, uint64_t* at) {
    uint64_t link = *at;
#pragma unroll 1
    for (uint64_t i = 0; i < links && link <= last; i++) {
        chain[link + 1] = i;
        __threadfence();
        link = chain[link];
    }
    *at = link;
}

// Between two rounds: nothing that was loaded before it is known after it, so that every round loads anew. That is all:
// no cache is emptied, and no other thread is waited for.
static __device__ void pw_next_round() {
    asm volatile("bar.warp.sync %0;" : : "r"(1u << (threadIdx.x % 32)) : "memory");
}

#define PW_LOAD(name, instruction)                                                          \
    struct name {                                                                           \
        static __device__ uint64_t load(const uint64_t* p) {                                \
            uint64_t value;                                                                 \
            asm volatile(instruction " %0, [%1];" : "=l"(value) : "l"(p) : "memory");       \
            return value;                                                                   \
        }                                                                                   \
    }
#define PW_STORE(name, instruction)                                                         \
    struct name {                                                                           \
        static __device__ void store(uint64_t* p, uint64_t value) {                         \
            asm volatile(instruction " [%0], %1;" : : "l"(p), "l"(value) : "memory");       \
        }                                                                                   \
    }
#define PW_FENCE(name, call)                                                                \
    struct name {                                                                           \
        static __device__ void fence() { call; }                                            \
    }

PW_LOAD(LoadWeak, "ld.weak.u64");
PW_LOAD(LoadVolatile, "ld.volatile.u64");
PW_LOAD(LoadRelaxedBlock, "ld.relaxed.cta.u64");
PW_LOAD(LoadRelaxedGpu, "ld.relaxed.gpu.u64");
PW_LOAD(LoadRelaxedSystem, "ld.relaxed.sys.u64");
PW_LOAD(LoadAcquireBlock, "ld.acquire.cta.u64");
PW_LOAD(LoadAcquireGpu, "ld.acquire.gpu.u64");
PW_LOAD(LoadAcquireSystem, "ld.acquire.sys.u64");

PW_STORE(StoreWeak, "st.weak.u64");
PW_STORE(StoreVolatile, "st.volatile.u64");
PW_STORE(StoreRelaxedBlock, "st.relaxed.cta.u64");
PW_STORE(StoreRelaxedGpu, "st.relaxed.gpu.u64");
PW_STORE(StoreRelaxedSystem, "st.relaxed.sys.u64");
PW_STORE(StoreReleaseBlock, "st.release.cta.u64");
PW_STORE(StoreReleaseGpu, "st.release.gpu.u64");
PW_STORE(StoreReleaseSystem, "st.release.sys.u64");

PW_FENCE(NoFence, );
PW_FENCE(FenceBlock, __threadfence_block());
PW_FENCE(FenceGpu, __threadfence());
PW_FENCE(FenceSystem, __threadfence_system());

// The result of a poll: the number of reads, its start, when it saw the value (0 if it did not), and its end.
static __device__ void pw_report(uint64_t* result, uint64_t rounds, uint64_t began, uint64_t seen) {
    result[0] = rounds;
    result[1] = began;
    result[2] = seen;
    result[3] = pw_now();
}

template <typename Load>
static __device__ void pw_poll_by(const uint64_t* word, uint64_t value, uint64_t* started, uint64_t* answer,
                                  uint64_t limit, uint64_t* result) {
    uint64_t began = pw_now(), seen = 0, rounds = 0;
    // Whatever this thread may keep of the word is kept before the other process changes it.
    Load::load(word);
    StoreReleaseSystem::store(started, value);
#pragma unroll 1
    while (rounds < PW_MOST_ROUNDS) {
        rounds++;
        pw_next_round();
        uint64_t found = Load::load(word);
        uint64_t now = pw_now();
        if (found == value) {
            seen = now;
            StoreReleaseSystem::store(answer, value);
            break;
        }
        if (now - began > limit) {
            break;
        }
    }
    pw_report(result, rounds, began, seen);
}

// Polls *word until it is value; says that it has begun in *started, and that it has seen the value in *answer.
extern "C" __global__ void pw_poll(const uint64_t* word, uint64_t value, uint64_t* started, uint64_t* answer,
                                   uint32_t how, uint64_t limit, uint64_t* result) {
    switch (how) {
        case 0: return pw_poll_by<LoadWeak>(word, value, started, answer, limit, result);
        case 1: return pw_poll_by<LoadVolatile>(word, value, started, answer, limit, result);
        case 2: return pw_poll_by<LoadRelaxedBlock>(word, value, started, answer, limit, result);
        case 3: return pw_poll_by<LoadRelaxedGpu>(word, value, started, answer, limit, result);
        case 4: return pw_poll_by<LoadRelaxedSystem>(word, value, started, answer, limit, result);
        case 5: return pw_poll_by<LoadAcquireBlock>(word, value, started, answer, limit, result);
        case 6: return pw_poll_by<LoadAcquireGpu>(word, value, started, answer, limit, result);
        case 7: return pw_poll_by<LoadAcquireSystem>(word, value, started, answer, limit, result);
    }
}

// The same with the loop that one writes at first, with other work between its reads: no volatile, no atomic.
// The compiler may read the word once for all rounds, and does.
extern "C" __global__ void pw_poll_compiled(const uint64_t* word, uint64_t value, uint64_t* started, uint64_t* answer,
                                            uint64_t most_rounds, uint64_t* result) {
    uint64_t began = pw_now(), seen = 0, rounds = 0, work = began;
    StoreReleaseSystem::store(started, value);
    for (; rounds < most_rounds; rounds++) {
        if (*word == value) {
            seen = pw_now();
            StoreReleaseSystem::store(answer, value);
            break;
        }
        work = work * 6364136223846793005ull + 1442695040888963407ull;
    }
    pw_report(result, rounds, began, seen);
    // So that the work must be done.
    result[4] = work;
}

// Stores value to *word once, and goes on running until *answer has it.
extern "C" __global__ void pw_store(uint64_t* word, uint64_t value, const uint64_t* answer, uint32_t how,
                                    uint64_t limit, uint64_t* result) {
    uint64_t began = pw_now(), answered = 0, rounds = 0;
    switch (how) {
        case 0: StoreWeak::store(word, value); break;
        case 1: StoreVolatile::store(word, value); break;
        case 2: StoreRelaxedBlock::store(word, value); break;
        case 3: StoreRelaxedGpu::store(word, value); break;
        case 4: StoreRelaxedSystem::store(word, value); break;
        case 5: StoreReleaseBlock::store(word, value); break;
        case 6: StoreReleaseGpu::store(word, value); break;
        case 7: StoreReleaseSystem::store(word, value); break;
    }
#pragma unroll 1
    while (rounds < PW_MOST_ROUNDS) {
        rounds++;
        uint64_t found = LoadAcquireSystem::load(answer);
        uint64_t now = pw_now();
        if (found == value) {
            answered = now;
            break;
        }
        if (now - began > limit) {
            break;
        }
    }
    pw_report(result, rounds, began, answered);
}

// Counts to last in *mine, in turns with another kernel that does so in *theirs: it has the first turn, or it follows.
// Tells how many turns were taken, and when the first one and the last one were over.
extern "C" __global__ void pw_turns(uint64_t* mine, const uint64_t* theirs, uint64_t last, uint32_t follows,
                                    uint64_t limit, uint64_t* result) {
    uint64_t began = pw_now(), first = 0, now = began, turn = 0;
#pragma unroll 1
    for (uint64_t rounds = 0; rounds < PW_MOST_ROUNDS && turn < last && now - began <= limit; rounds++) {
        if (!follows && rounds == 0) {
            StoreReleaseSystem::store(mine, 1);
        }
        uint64_t found = LoadAcquireSystem::load(theirs);
        now = pw_now();
        if (found > turn) {
            turn++;
            first = turn == 1 ? now : first;
            // The follower answers; the leader has its next turn.
            if (follows || turn < last) {
                StoreReleaseSystem::store(mine, follows ? turn : turn + 1);
            }
        }
    }
    pw_report(result, turn, first, now);
}

template <typename StoreData, typename Fence, typename StoreFlag>
static __device__ void pw_write_by(uint64_t* data, uint64_t* flag, uint64_t limit) {
    uint64_t began = pw_now(), round = 0;
#pragma unroll 1
    do {
        round++;
        pw_next_round();
        StoreData::store(data, round);
        Fence::fence();
        StoreFlag::store(flag, round);
    } while (round < PW_MOST_ROUNDS && (round % 16 != 0 || pw_now() - began <= limit));
}

// Each thread counts in a word of data, and after each step in a flag, until the time is over.
extern "C" __global__ void pw_write_pairs(uint64_t* data, uint64_t* flags, uint64_t stride, uint64_t pairs,
                                          uint32_t how, uint64_t limit) {
    uint64_t pair = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    if (pair >= pairs) {
        return;
    }
    data += pair * stride;
    flags += pair * stride;
    switch (how) {
        case 0: return pw_write_by<StoreWeak, NoFence, StoreWeak>(data, flags, limit);
        case 1: return pw_write_by<StoreWeak, NoFence, StoreVolatile>(data, flags, limit);
        case 2: return pw_write_by<StoreVolatile, NoFence, StoreVolatile>(data, flags, limit);
        case 3: return pw_write_by<StoreRelaxedGpu, NoFence, StoreRelaxedGpu>(data, flags, limit);
        case 4: return pw_write_by<StoreWeak, FenceGpu, StoreVolatile>(data, flags, limit);
        case 5: return pw_write_by<StoreWeak, FenceBlock, StoreVolatile>(data, flags, limit);
        case 6: return pw_write_by<StoreWeak, FenceGpu, StoreVolatile>(data, flags, limit);
        case 7: return pw_write_by<StoreWeak, FenceSystem, StoreVolatile>(data, flags, limit);
        case 8: return pw_write_by<StoreWeak, NoFence, StoreReleaseBlock>(data, flags, limit);
        case 9: return pw_write_by<StoreWeak, NoFence, StoreReleaseGpu>(data, flags, limit);
        case 10: return pw_write_by<StoreWeak, NoFence, StoreReleaseSystem>(data, flags, limit);
    }
}

template <typename LoadFlag, typename Fence, typename LoadData>
static __device__ void pw_read_by(const uint64_t* data, const uint64_t* flag, uint64_t limit, uint64_t* result) {
    uint64_t began = pw_now(), looks = 0, last = 0, changes = 0, old = 0, worst = 0;
#pragma unroll 1
    do {
        looks++;
        pw_next_round();
        uint64_t seen = LoadFlag::load(flag);
        Fence::fence();
        uint64_t found = LoadData::load(data);
        changes += seen != last;
        last = seen;
        // Newer data than the flag says is no wonder: the writer goes on.
        if (found < seen) {
            old++;
            worst = seen - found > worst ? seen - found : worst;
        }
    } while (looks < PW_MOST_ROUNDS && (looks % 16 != 0 || pw_now() - began <= limit));
    atomicAdd(result, looks);
    atomicAdd(result + 1, changes);
    atomicAdd(result + 2, old);
    atomicMax(result + 3, worst);
}

// Each thread reads a flag and then its word of data until the time is over. Counts the reads, the changes of the flag,
// and the reads that found data older than the flag; keeps the largest number of steps by which it was older.
extern "C" __global__ void pw_read_pairs(const uint64_t* data, const uint64_t* flags, uint64_t stride, uint64_t pairs,
                                         uint32_t how, uint64_t limit, uint64_t* result) {
    uint64_t pair = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    if (pair >= pairs) {
        return;
    }
    data += pair * stride;
    flags += pair * stride;
    switch (how) {
        case 0: return pw_read_by<LoadWeak, NoFence, LoadWeak>(data, flags, limit, result);
        case 1: return pw_read_by<LoadVolatile, NoFence, LoadWeak>(data, flags, limit, result);
        case 2: return pw_read_by<LoadVolatile, NoFence, LoadVolatile>(data, flags, limit, result);
        case 3: return pw_read_by<LoadRelaxedGpu, NoFence, LoadRelaxedGpu>(data, flags, limit, result);
        case 4: return pw_read_by<LoadVolatile, NoFence, LoadWeak>(data, flags, limit, result);
        case 5: return pw_read_by<LoadVolatile, FenceBlock, LoadWeak>(data, flags, limit, result);
        case 6: return pw_read_by<LoadVolatile, FenceGpu, LoadWeak>(data, flags, limit, result);
        case 7: return pw_read_by<LoadVolatile, FenceSystem, LoadWeak>(data, flags, limit, result);
        case 8: return pw_read_by<LoadAcquireBlock, NoFence, LoadWeak>(data, flags, limit, result);
        case 9: return pw_read_by<LoadAcquireGpu, NoFence, LoadWeak>(data, flags, limit, result);
        case 10: return pw_read_by<LoadAcquireSystem, NoFence, LoadWeak>(data, flags, limit, result);
    }
}
