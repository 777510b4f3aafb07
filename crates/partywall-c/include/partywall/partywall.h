/* Partywall: processes on one Linux machine share GPU memory by name, without copying it, and survive each other's
   deaths. Generated from the Rust sources of crates/partywall-c; `PARTYWALL_BLESS=1 cargo test -p partywall-c` writes
   it anew. docs/c.md is the guide.

   Unless a function says that it blocks or waits, it does neither, but a close may take a round trip to the broker. Any
   thread may call any function. The comment of a type says whether several threads may use one handle at a time; none
   may while it is closed.

   A call that takes a handle over closes it on success; on failure the handle is still the caller's. Only
   `pw_block_offer`, `pw_claim_complete` and `pw_claim_fail` end their object in either case, and say so. */


#ifndef PARTYWALL_H
#define PARTYWALL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* A struct of options or information whose size is set and all else is zero:
   `pw_topic_options options = PW_INIT(pw_topic_options);` */
#ifdef __cplusplus
template <typename Struct> inline Struct pw_init() {
    Struct made = Struct();
    made.size = sizeof(Struct);
    return made;
}
#define PW_INIT(type) pw_init<type>()
#else
#define PW_INIT(type) {.size = sizeof(type)}
#endif

// A timeout that never ends, as every negative number does.
#define PW_FOREVER -1

// The longest text that names a block: a name of 255 bytes, three numbers, their signs and the final zero byte.
#define PW_BLOCK_TEXT 320

// One byte, 0 or 1.
#define PW_DTYPE_BOOL 1

// Unsigned, 8 bits.
#define PW_DTYPE_U8 2

// Signed, 8 bits.
#define PW_DTYPE_I8 3

// Unsigned, 16 bits.
#define PW_DTYPE_U16 4

// Signed, 16 bits.
#define PW_DTYPE_I16 5

// Unsigned, 32 bits.
#define PW_DTYPE_U32 6

// Signed, 32 bits.
#define PW_DTYPE_I32 7

// Unsigned, 64 bits.
#define PW_DTYPE_U64 8

// Signed, 64 bits.
#define PW_DTYPE_I64 9

// IEEE binary16.
#define PW_DTYPE_F16 10

// The upper half of a binary32.
#define PW_DTYPE_BF16 11

// IEEE binary32.
#define PW_DTYPE_F32 12

// IEEE binary64.
#define PW_DTYPE_F64 13

// Four exponent bits, three of mantissa, finite (OCP 8-bit floating point).
#define PW_DTYPE_F8E4M3 14

// Five exponent bits, two of mantissa (OCP 8-bit floating point).
#define PW_DTYPE_F8E5M2 15

// Four exponent bits, three of mantissa, no negative zero.
#define PW_DTYPE_F8E4M3FNUZ 16

// Five exponent bits, two of mantissa, no negative zero.
#define PW_DTYPE_F8E5M2FNUZ 17

// Eight exponent bits, the scale of a block (OCP microscaling).
#define PW_DTYPE_F8E8M0 18

// Three exponent bits, two of mantissa, packed (OCP microscaling).
#define PW_DTYPE_F6E3M2 19

// Two exponent bits, three of mantissa, packed (OCP microscaling).
#define PW_DTYPE_F6E2M3 20

// Two exponent bits, one of mantissa, packed (OCP microscaling).
#define PW_DTYPE_F4 21

// Two binary32: real and imaginary part.
#define PW_DTYPE_C64 22

// Two binary64: real and imaginary part.
#define PW_DTYPE_C128 23

// It waits for a worker.
#define PW_TASK_PENDING 0

// A worker has claimed it.
#define PW_TASK_CLAIMED 1

// A stream of its worker will complete it.
#define PW_TASK_ENQUEUED 2

// It has a result that no process has taken.
#define PW_TASK_DONE 3

// All its attempts have failed.
#define PW_TASK_DEAD 4

// Its result was taken, or it was cancelled or purged.
#define PW_TASK_GONE 5

// The version has not grown.
#define PW_UNCHANGED 0

// The version has grown, and all of it is mapped now.
#define PW_GROWN 1

// The version has grown beyond the addresses that this process has reserved, and keeps its former length here. Open it
// again to map all of it.
#define PW_DOES_NOT_FIT 2

// Publishers wait for the subscriber, so it misses nothing.
#define PW_BLOCK 0

// A subscriber that falls too far behind misses the oldest samples. No publisher waits for it.
#define PW_DROP_OLDEST 1

// The subscriber receives the latest sample and misses earlier ones. No publisher waits for it.
#define PW_LATEST 2

// A dimension of a topic's shape that may have any length.
#define PW_ANY UINT64_MAX

// Whether a call succeeded, and if not, what a program can do about it. `pw_last_error` has the sentence.
enum pw_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // The call has done what it says.
    PW_OK = 0,
    // An argument that no call accepts: a name, a number, a range; a handle that is null, closed or of another kind.
    PW_INVALID_ARGUMENT = 1,
    // No such name, version, tensor or member.
    PW_NOT_FOUND = 2,
    // The object exists, but has another kind, type or size.
    PW_MISMATCH = 3,
    // The operation is not allowed on this object, or for this process.
    PW_DENIED = 4,
    // A limit of the broker, an object, this process or the machine is reached.
    PW_LIMIT_REACHED = 5,
    // Another process still uses the object; the call may succeed later.
    PW_BUSY = 6,
    // The event did not happen in time.
    PW_TIMED_OUT = 7,
    // The object has ended, or the process that it belonged to: `pw_error_pid` is that process if it is known.
    PW_GONE = 8,
    // The data must not be used: it is damaged, or work that it rests on has failed.
    PW_INVALID_DATA = 9,
    // There is no broker, or none that this process can use.
    PW_UNREACHABLE = 10,
    // The GPU, its driver or MPS.
    PW_DEVICE = 11,
    // The kernel refused a call, or a file is not what it should be.
    PW_SYSTEM = 12,
    // A mistake in this library. The objects of the call may not be usable any more.
    PW_INTERNAL = 13,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum pw_status pw_status;
#else
typedef int32_t pw_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A tensor in the form of `dlpack.h` 1.x, which has this struct; include that header to look into it.
typedef struct DLManagedTensorVersioned DLManagedTensorVersioned;

// A block of memory that this process holds, of a pool or a queue. One thread may use it at a time.
typedef struct pw_block pw_block;

// A version of a segment that no other process sees yet. One thread may use it at a time.
typedef struct pw_build pw_build;

// A task that this process has claimed. One thread may use it at a time.
typedef struct pw_claim pw_claim;

// The memory of a version as file descriptors, and a lease on it. Nothing is mapped, and no driver is loaded. Any thread
// may use it.
typedef struct pw_descriptors pw_descriptors;

// A connection to a broker. It stays until it and everything opened through it are closed. Any thread may use it.
typedef struct pw_domain pw_domain;

// What is known about a failed call.
typedef struct pw_error pw_error;

// The findings of an examination. Any thread may use it.
typedef struct pw_findings pw_findings;

// What a segment is to get at its end. One thread may use it at a time.
typedef struct pw_growth pw_growth;

// A block that is being filled. One thread may use it at a time.
typedef struct pw_loan pw_loan;

// A list of members, as they were when it was opened. Any thread may use it.
typedef struct pw_members pw_members;

// A list of names, as they were when it was opened. Any thread may use it.
typedef struct pw_names pw_names;

// A permit that this process holds. It is free again if the process dies. Any thread may use it.
typedef struct pw_permit pw_permit;

// A pool of blocks. Any thread may use it.
typedef struct pw_pool pw_pool;

// Tensors in memory of a GPU that other code has allocated, to be published. One thread may use it at a time.
typedef struct pw_publication pw_publication;

// A publisher of a topic. Any thread may use it.
typedef struct pw_publisher pw_publisher;

// A queue of tasks. Any thread may use it.
typedef struct pw_queue pw_queue;

// A sample that was received. Any thread may use it. Its block stays as it is until it is closed.
typedef struct pw_sample pw_sample;

// An open version of a name: its memory, mapped into this process. Any thread may use it, except for
// `pw_segment_advance` and closing.
typedef struct pw_segment pw_segment;

// A semaphore. Any thread may use it.
typedef struct pw_semaphore pw_semaphore;

// A subscriber of a topic. Any thread may use it; each sample is received once.
typedef struct pw_subscriber pw_subscriber;

// A task that was not submitted. One thread may use it at a time.
typedef struct pw_task pw_task;

// A submitted task. Any thread may use it.
typedef struct pw_ticket pw_ticket;

// A timeline to wait for. Any thread may use it.
typedef struct pw_timeline pw_timeline;

// A descriptor that shows that a timeline has come to a value. Any thread may use it.
typedef struct pw_timeline_event pw_timeline_event;

// A topic: a stream of samples, each written once and read in place. Any thread may use it.
typedef struct pw_topic pw_topic;

// The events of names that match a pattern. One thread may use it at a time.
typedef struct pw_watch pw_watch;

// The one writer of a timeline. Any thread may use it.
typedef struct pw_writer pw_writer;

// What `pw_block_info_get` stores.
typedef struct {
    // `sizeof(pw_block_info)`, which the caller sets.
    size_t size;
    // The elements along each dimension, valid until the block is changed or closed.
    const uint64_t *shape;
    // The bytes of its range.
    uint64_t bytes;
    // Changes each time that the block is taken or accepted.
    uint64_t generation;
    // How many dimensions there are.
    uint32_t rank;
    // The element type: bytes unless `pw_block_set_tensor` set another.
    uint32_t dtype;
    // Its number in the pool.
    uint32_t index;
} pw_block_info;

// How a version of a segment is made. What is zero has its default.
typedef struct {
    // `sizeof(pw_segment_options)`.
    size_t size;
    // Where the memory is: "host", "pinned", "cuda:0", a GPU's UUID, "auto"; null for host memory. Not for published
    // memory.
    const char *device;
    // The largest chunk in bytes. For a build alone.
    uint64_t chunk_bytes;
    // The bytes that a version with `is_mutable` may grow to. For a build alone.
    uint64_t reserve;
    // Nonzero: processes may write it after the commit, and its committer may make it longer.
    uint8_t is_mutable;
    // Nonzero: the name stays until it is removed or the broker ends. By default it ends with its committer.
    uint8_t kept;
    // Nonzero: the name ends with the last process that has it open.
    uint8_t until_unused;
    // Nonzero: other users whom the broker admits may open it.
    uint8_t shared;
    // Nonzero: the commit fails if the name exists.
    uint8_t if_absent;
} pw_segment_options;

// What `pw_claim_info_get` stores.
typedef struct {
    // `sizeof(pw_claim_info)`, which the caller sets.
    size_t size;
    // The kind of work. Valid until the task is closed, as are the arguments.
    const char *kind;
    // The arguments.
    const void *arguments;
    // Their length.
    size_t arguments_length;
    // The bytes of output that the submitter asked for.
    uint64_t output_bytes;
    // How many inputs there are.
    uint32_t inputs;
    // The number of the attempt, from 1.
    uint32_t attempt;
    // The number of the last attempt that the task may have.
    uint32_t max_attempts;
    // 1 while the claim stands. If it was taken back, further work is wasted.
    uint8_t is_claimed;
} pw_claim_info;

// What `pw_claim_input_get` stores.
typedef struct {
    // `sizeof(pw_input_info)`, which the caller sets.
    size_t size;
    // The elements along each dimension. Valid until the task is closed.
    const uint64_t *shape;
    // The length in bytes.
    uint64_t bytes;
    // How many dimensions there are.
    uint32_t rank;
    // The element type: bytes if the submitter gave none.
    uint32_t dtype;
} pw_input_info;

// What `pw_descriptors_info_get` stores.
typedef struct {
    // `sizeof(pw_descriptors_info)`, which the caller sets.
    size_t size;
    // "host", whose descriptors `mmap` takes; "vmm", whose descriptors drivers import; "pinned", whose descriptors only
    // CUDA imports. Valid until the object is closed.
    const char *kind;
    // Where the memory is: "host", "pinned:0" or the GPU's UUID. Valid until the object is closed.
    const char *device;
    // The version.
    uint64_t version;
    // How many chunks there are, each with a descriptor.
    uint64_t chunks;
    // 1 if processes may write the memory. If not, map it for reading only.
    uint8_t is_mutable;
    // 1 if the version may grow. Map its chunks one after another: tensors may span them, and offsets count from the
    // beginning of the first.
    uint8_t may_grow;
} pw_descriptors_info;

// How `pw_domain_connect` connects. What is zero has its default.
typedef struct {
    // `sizeof(pw_domain_options)`.
    size_t size;
    // The name of the domain; null for `PARTYWALL_DOMAIN`, or `default`.
    const char *domain;
    // The path of the broker's socket, which takes precedence over the domain; null for `PARTYWALL_SOCKET`.
    const char *socket;
    // The path of the program `partywall`, which is started as the broker; null to search for it.
    const char *program;
    // Nonzero: fail if no broker runs, in place of starting one.
    uint8_t no_start;
    // Nonzero: connect as an operator, who may connect when the broker has as many members as it admits.
    uint8_t is_operator;
    // Nonzero: join the domain's MPS daemon, if it runs.
    uint8_t mps;
} pw_domain_options;

// What `pw_findings_get` stores. The texts are valid until the list is closed; some have several lines, or none.
typedef struct {
    // `sizeof(pw_finding_info)`, which the caller sets.
    size_t size;
    // What was tried.
    const char *title;
    // "ok", "warning", "failed" or "skipped".
    const char *outcome;
    // What was seen.
    const char *detail;
    // What it means.
    const char *meaning;
    // What to do about it.
    const char *fix;
    // 1 if it was made with the simulated driver.
    uint8_t is_simulated;
} pw_finding_info;

// What `pw_members_get` stores. The texts are valid until the list is closed.
typedef struct {
    // `sizeof(pw_member_info)`, which the caller sets.
    size_t size;
    // Its command line.
    const char *command;
    // Its state: "alive", "hung", "suspect", "evicted" and the others of `partywall ps`.
    const char *state;
    // Its number.
    uint64_t member;
    // Its process.
    uint32_t pid;
    // Its user.
    uint32_t uid;
    // How many leases it holds.
    uint32_t leases;
    // How many timelines it writes.
    uint32_t timelines;
} pw_member_info;

// What `pw_domain_info_get` stores.
typedef struct {
    // `sizeof(pw_domain_info)`, which the caller sets.
    size_t size;
    // The number of this process among the members.
    uint64_t member;
    // How many members there are besides this one.
    uint64_t members;
    // How many names there are.
    uint64_t names;
    // How many versions there are, with those that only leases keep.
    uint64_t versions;
    // How many leases there are.
    uint64_t leases;
    // How many members died since the broker started.
    uint64_t deaths;
    // How many dead members' work may not be over, so that what they held stays in quarantine.
    uint64_t unproven;
    // The process of the broker.
    uint32_t broker_pid;
    // 1 if the members use the simulated driver.
    uint8_t is_simulated;
} pw_domain_info;

// What `pw_names_get` stores. The texts are valid until the list is closed.
typedef struct {
    // `sizeof(pw_name_info)`, which the caller sets.
    size_t size;
    // The name.
    const char *name;
    // What it is: "segment", "pool", "topic", "queue".
    const char *object;
    // Where its memory is: "host", "pinned:0" or a GPU's UUID; empty if there is no latest version.
    const char *device;
    // The kind of its memory: "host", "vmm", "pinned", "legacy", "live"; empty if there is no latest version.
    const char *kind;
    // The latest version; 0 for a removed name whose versions are still held.
    uint64_t version;
    // The bytes of that version.
    uint64_t bytes;
    // The process that committed it.
    uint32_t committer;
    // How many leases there are on it.
    uint32_t leases;
    // How many older versions are still held.
    uint32_t older;
    // 1 if it may be written.
    uint8_t is_mutable;
    // 1 if it stays without its users.
    uint8_t is_kept;
    // 1 if other users may open it.
    uint8_t is_shared;
} pw_name_info;

// How a pool is created, or what an existing one must agree with. What is zero is not set.
typedef struct {
    // `sizeof(pw_pool_options)`.
    size_t size;
    // Where blocks are: "host", "pinned", "cuda:0", a GPU's UUID, "auto". Null is host memory, and any
    // for `pw_pool_open`.
    const char *device;
    // The bytes of each block. Required to create a pool.
    uint64_t block_bytes;
    // How many blocks there are. Required to create a pool.
    uint32_t blocks;
    // Nonzero: blocks are all zero when they are taken.
    uint8_t zeroed;
    // Nonzero: other users whom the broker admits may use the pool.
    uint8_t shared;
    // Nonzero: the pool stays until it is removed or the broker ends.
    uint8_t kept;
} pw_pool_options;

// What `pw_pool_info_get` stores.
typedef struct {
    // `sizeof(pw_pool_info)`, which the caller sets.
    size_t size;
    // The version of the name.
    uint64_t version;
    // The bytes of each block.
    uint64_t block_bytes;
    // How many blocks there are.
    uint32_t blocks;
    // How many of them any process may take.
    uint32_t free;
    // How many are held.
    uint32_t held;
    // How many their holders have offered to others.
    uint32_t offered;
    // How many threads of all processes wait for one.
    uint32_t waiting;
} pw_pool_info;

// How a queue is created, or what an existing one must agree with. What is zero is not set.
typedef struct {
    // `sizeof(pw_queue_options)`.
    size_t size;
    // Where inputs and outputs are: "host", "pinned", "cuda:0", a GPU's UUID, "auto". Null is host memory, and any
    // for `pw_queue_open`.
    const char *device;
    // The bytes of each input block.
    uint64_t input_bytes;
    // The bytes of each output block.
    uint64_t output_bytes;
    // How long an attempt may take before its task goes to another worker, in nanoseconds. The default is no limit.
    int64_t lease_ns;
    // How many input blocks there are. With 0 tasks have only arguments.
    uint32_t inputs;
    // How many output blocks there are. With 0 tasks have no output.
    uint32_t outputs;
    // How many tasks there may be at a time. The default is 1,024.
    uint32_t tasks;
    // Nonzero: other users whom the broker admits may use the queue.
    uint8_t shared;
    // Nonzero: the queue stays until it is removed or the broker ends.
    uint8_t kept;
} pw_queue_options;

// What `pw_queue_info_get` stores.
typedef struct {
    // `sizeof(pw_queue_info)`, which the caller sets.
    size_t size;
    // The version of the name.
    uint64_t version;
    // The bytes of each input block.
    uint64_t input_bytes;
    // The bytes of each output block.
    uint64_t output_bytes;
    // How many tasks there may be at a time.
    uint32_t capacity;
    // How many tasks wait for a worker.
    uint32_t pending;
    // How many tasks workers have claimed.
    uint32_t claimed;
    // How many results no process has taken.
    uint32_t done;
    // How many tasks have failed in all their attempts.
    uint32_t dead;
} pw_queue_info;

// What a task has besides its kind and inputs. What is zero has its default.
typedef struct {
    // `sizeof(pw_task_options)`.
    size_t size;
    // The arguments for the worker, which are copied: at most 512 bytes.
    const void *arguments;
    // Their length.
    size_t arguments_length;
    // The bytes of output; not with `output_dtype`.
    uint64_t output_bytes;
    // The shape of the output, with `output_dtype`.
    const uint64_t *output_shape;
    // How many dimensions `output_shape` has.
    uint32_t output_rank;
    // The element type of the output.
    uint32_t output_dtype;
    // How often the task may be attempted, up to 255 times. The default is 3.
    uint32_t max_attempts;
    // Nonzero: the task ends with the process that submitted it.
    uint8_t cancel_with_submitter;
} pw_task_options;

// How a version is opened. What is zero has its default.
typedef struct {
    // `sizeof(pw_open_options)`.
    size_t size;
    // The version; 0 for the latest.
    uint64_t version;
    // The bytes that the version may grow to in this process, if fewer than its committer has reserved.
    uint64_t reserve;
    // The GPU on which this process uses the memory: "cuda:0", a UUID; null for the GPU that has it.
    const char *device;
    // Nonzero: open a version with `is_mutable` for writing.
    uint8_t read_write;
    // Nonzero: map memory of another GPU, which each access then reaches over the link between them.
    uint8_t allow_peer;
} pw_open_options;

// What `pw_segment_info_get` stores.
typedef struct {
    // `sizeof(pw_segment_info)`, which the caller sets.
    size_t size;
    // The kind of memory: "host", "vmm", "pinned", "legacy", "live". Valid until the segment is closed.
    const char *kind;
    // Where the memory is: "host", "pinned:0" or a GPU's UUID. Valid until the segment is closed.
    const char *device;
    // The version.
    uint64_t version;
    // The bytes that are mapped.
    uint64_t bytes;
    // The bytes of all tensors.
    uint64_t tensor_bytes;
    // The bytes that it may grow to in this process; 0 if it cannot grow.
    uint64_t reserved;
    // How many tensors there are.
    uint64_t tensors;
    // How many pairs of metadata there are.
    uint64_t metadata;
    // 1 if processes may write it.
    uint8_t is_mutable;
    // 1 if this process may write it.
    uint8_t is_writable;
    // 1 if the name stays without its committer.
    uint8_t is_kept;
    // 1 if other users may open it.
    uint8_t is_shared;
} pw_segment_info;

// What is known about a tensor.
typedef struct {
    // `sizeof(pw_tensor_info)`, which the caller sets.
    size_t size;
    // The name. Valid until the segment is closed, as are shape and strides.
    const char *name;
    // The elements along each dimension.
    const uint64_t *shape;
    // The distance from one index to the next along each dimension, in elements.
    const uint64_t *strides;
    // How many dimensions there are.
    uint32_t rank;
    // The element type.
    uint32_t dtype;
    // The bytes from the first element to the end of the last.
    uint64_t bytes;
} pw_tensor_info;

// A tensor for programs that open memory by a 64-byte handle.
typedef struct {
    // `sizeof(pw_ipc_handle)`, which the caller sets.
    size_t size;
    // The bytes of the `cudaIpcMemHandle_t` of the allocation that contains the tensor.
    uint8_t handle[64];
    // Where the tensor begins in the allocation.
    uint64_t offset;
    // The bytes from the first element to the end of the last.
    uint64_t bytes;
    // The number of the GPU in this process. Another process may number it differently.
    uint32_t device;
} pw_ipc_handle;

// How a semaphore is opened.
typedef struct {
    // `sizeof(pw_semaphore_options)`.
    size_t size;
    // The GPU of the streams that `pw_permit_close_on` gets; null as for timelines.
    const char *device;
    // Nonzero: other users whom the broker admits may use the semaphore, if this call creates it.
    uint8_t shared;
} pw_semaphore_options;

// What `pw_semaphore_info_get` stores.
typedef struct {
    // `sizeof(pw_semaphore_info)`, which the caller sets.
    size_t size;
    // How many permits there are.
    uint32_t permits;
    // How many of them are free.
    uint32_t available;
    // How many threads of all processes wait for one.
    uint32_t waiting;
} pw_semaphore_info;

// How a subscriber joins. What is zero has its default.
typedef struct {
    // `sizeof(pw_subscriber_options)`.
    size_t size;
    // `PW_BLOCK`, `PW_DROP_OLDEST` or `PW_LATEST`.
    uint32_t policy;
    // How many samples it may be behind, with `PW_DROP_OLDEST`; the default is what the ring keeps.
    uint32_t queue;
    // How many samples published before it joined it receives, if `has_history` is not zero; otherwise the topic says.
    uint32_t history;
    // Nonzero: `history` counts.
    uint8_t has_history;
    // Nonzero: receiving ends with `PW_GONE` once the last publisher has left and every sample is received.
    uint8_t until_idle;
    // Nonzero: measure the ages of samples.
    uint8_t measure_ages;
} pw_subscriber_options;

// What `pw_sample_info_get` stores.
typedef struct {
    // `sizeof(pw_sample_info)`, which the caller sets.
    size_t size;
    // The lengths of the dimensions, valid until the sample is closed.
    const uint64_t *shape;
    // How many dimensions there are.
    uint32_t rank;
    // The element type.
    uint32_t dtype;
    // The length in bytes.
    uint64_t bytes;
    // The publisher's number.
    uint64_t publisher;
    // How many samples its publisher had published before.
    uint64_t sequence;
    // How many samples had been published in the topic before.
    uint64_t position;
    // How many samples this subscriber has missed between the previous sample and this one.
    uint64_t missed;
    // The nanoseconds since it was published; -1 if the publisher did not stamp it.
    int64_t age_ns;
} pw_sample_info;

// How a timeline is opened. What is zero has its default.
typedef struct {
    // `sizeof(pw_timeline_options)`.
    size_t size;
    // The GPU of the streams that calls get: "cuda:0", a UUID; null for the first that this connection used, else the
    // one whose context is current on the calling thread.
    const char *device;
    // Nonzero: other users whom the broker admits may use the timeline, if this call creates it.
    uint8_t shared;
} pw_timeline_options;

// What `pw_timeline_info_get` stores.
typedef struct {
    // `sizeof(pw_timeline_info)`, which the caller sets.
    size_t size;
    // The last value that was signalled.
    uint64_t value;
    // The highest value whose signal is enqueued.
    uint64_t announced;
    // 1 if it has ended: its writer closed it, died or was evicted, or it was abandoned.
    uint8_t has_ended;
} pw_timeline_info;

// How a topic is created, or what an existing one must agree with. What is zero is not set.
typedef struct {
    // `sizeof(pw_topic_options)`.
    size_t size;
    // Where samples are: "host", "pinned", "cuda:0", a GPU's UUID, "auto". Null is host memory, and any
    // for `pw_topic_open`.
    const char *device;
    // The bytes of the largest sample. Required to create a topic, unless `dtype` and `shape` determine it.
    uint64_t max_bytes;
    // The lengths of the dimensions of all samples, `PW_ANY` for any length; null if each sample has its own.
    const uint64_t *shape;
    // How many dimensions `shape` has.
    uint32_t rank;
    // The element type of all samples.
    uint32_t dtype;
    // How many samples the ring keeps. The default is 4.
    uint32_t depth;
    // How many samples published before it joined a subscriber gets. The default is 0.
    uint32_t history;
    // How many publishers there may be at a time. The default is 2.
    uint32_t publishers;
    // How many loans each publisher may have at a time. The default is 2.
    uint32_t loans;
    // How many subscribers there may be at a time.
    uint32_t subscribers;
    // How many samples each subscriber may hold at a time.
    uint32_t held;
    // How many blocks samples are in; the default suffices for all of the above.
    uint32_t blocks;
    // Nonzero: samples are not stamped with the time, and have no age.
    uint8_t no_stamps;
    // Nonzero: other users whom the broker admits may use the topic.
    uint8_t shared;
    // Nonzero: the topic stays until it is removed or the broker ends.
    uint8_t kept;
} pw_topic_options;

// What `pw_topic_info_get` stores.
typedef struct {
    // `sizeof(pw_topic_info)`, which the caller sets.
    size_t size;
    // The version of the name.
    uint64_t version;
    // The bytes of the largest sample.
    uint64_t max_bytes;
    // How many samples were published.
    uint64_t published;
    // The element type of all samples; 0 if each has its own.
    uint32_t dtype;
    // How many samples the ring keeps.
    uint32_t depth;
    // How many publishers there are.
    uint32_t publishers;
    // How many subscribers there are.
    uint32_t subscribers;
} pw_topic_info;

// What `pw_watch_next` stores. The texts are valid until the next call, or until the watch is closed.
typedef struct {
    // `sizeof(pw_event_info)`, which the caller sets.
    size_t size;
    // What happened: "created", "committed", "withdrawn", "owner_died", "reclaimed" and the others of `partywall watch`;
    // "missed" if events are lost, so that a list of names is to be made anew; null if no event came in time.
    const char *change;
    // The name; empty for "missed".
    const char *name;
    // What it is: "segment", "timeline", "semaphore", "pool", "topic", "queue"; empty for "missed".
    const char *object;
    // The version that the event is about; 0 if none.
    uint64_t version;
    // The bytes of that version; for "missed" how many events are lost, 0 if that is not known.
    uint64_t bytes;
    // When it happened, in milliseconds since 1970.
    uint64_t at_ms;
    // The process that made the change, or whose end caused it; 0 if none.
    uint32_t pid;
} pw_event_info;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Stores what is known about a block. Does not block.
//
// # Safety
// No other thread changes or closes `block`; `info` points to a struct whose size is set.
pw_status pw_block_info_get(const pw_block *block, pw_block_info *info);

// Has all calls use the `length` bytes of the block from `offset` on. Changes no byte.
//
// # Safety
// No other thread uses the handle.
pw_status pw_block_set_range(pw_block *block, uint64_t offset, uint64_t length);

// Has the block be a tensor at the beginning of its range, as a task carries it. Changes no byte.
//
// # Safety
// No other thread uses `block`; `shape` has `rank` lengths.
pw_status pw_block_set_tensor(pw_block *block, uint32_t element, const uint64_t *shape, size_t rank);

// Stores the address and length of a block in host or pinned memory, for reading and writing by the CPU until the block
// is closed. If `pw_block_device` was called, first waits until the work of this process on that GPU is done.
//
// # Safety
// No other thread uses `block`; `data` and `length` may be written.
pw_status pw_block_data(pw_block *block, void **data, size_t *length);

// Stores the device address and length of a block, for the caller's kernels and copies until the block is closed. Does
// not block.
//
// # Safety
// As `pw_block_data`.
pw_status pw_block_device(pw_block *block, void **address, size_t *length);

// Copies `length` bytes to the beginning of a block, in any kind of memory. Blocks until they are copied.
//
// # Safety
// No other thread uses `block`; `bytes` may be read.
pw_status pw_block_write(pw_block *block, const void *bytes, size_t length);

// Copies `length` bytes of a block, from `offset` on, to `bytes`, from any kind of memory. Blocks until they are copied.
//
// # Safety
// No other thread changes or closes `block`; `bytes` may be written.
pw_status pw_block_read(const pw_block *block,
                        uint64_t offset,
                        void *bytes,
                        size_t length);

// Sets all bytes of a block in host or pinned memory to zero.
//
// # Safety
// No other thread uses the handle.
pw_status pw_block_zero(pw_block *block);

// Enqueues setting all bytes of a block to zero. Does not block. Null is the legacy default stream.
//
// # Safety
// No other thread uses `block`; `stream` is a stream of the primary context of the block's GPU.
pw_status pw_block_zero_on(pw_block *block, void *stream);

// Offers a block to the process that passes the text which this stores to `pw_pool_accept`. `PW_BLOCK_TEXT` bytes
// always suffice. Its bytes are complete; work of a GPU that still uses it is ordered by other means.
//
// On success the block is closed. If the buffer is too small it is still the caller's; after another failure it is
// given back.
//
// # Safety
// No other thread uses `block`; `text` has `capacity` bytes; `length` is null or may be written.
pw_status pw_block_offer(pw_block *block, char *text, size_t capacity, size_t *length);

// Gives a block back. If `pw_block_device` was called, first waits until the work of this process on that GPU is done.
// Null is ignored.
//
// # Safety
// No other thread uses the handle, and nobody the addresses that it gave.
pw_status pw_block_close(pw_block *block);

// Gives a block back once the work that is on `stream` now is done. Does not wait. On failure the block is still the
// caller's.
//
// # Safety
// As `pw_block_close`; `stream` is a stream of the primary context of the block's GPU.
pw_status pw_block_close_on(pw_block *block, void *stream);

// Begins the next version of a name. `options` may be null. The caller owns `*build`, and commits or closes it. Does not
// block.
//
// # Safety
// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `build` may be written.
pw_status pw_build_create(const pw_domain *domain,
                          const char *name,
                          const pw_segment_options *options,
                          pw_build **build);

// Adds a tensor. Strides are in elements; null means without gaps, last dimension fastest. `pw_build_allocate` returns
// errors about the tensor.
//
// # Safety
// No other thread uses `build`; `tensor` ends with a zero byte; `shape`, and `strides` unless null, have `rank` numbers.
pw_status pw_build_tensor(pw_build *build,
                          const char *tensor,
                          uint32_t element,
                          const uint64_t *shape,
                          const uint64_t *strides,
                          size_t rank);

// Adds a tensor that shows memory of the tensor `of`, which was added before, from `offset` bytes on. Otherwise as
// `pw_build_tensor`.
//
// # Safety
// As `pw_build_tensor`; `of` ends with a zero byte.
pw_status pw_build_view(pw_build *build,
                        const char *tensor,
                        uint32_t element,
                        const uint64_t *shape,
                        const uint64_t *strides,
                        size_t rank,
                        const char *of,
                        uint64_t offset);

// Adds a pair of metadata.
//
// # Safety
// No other thread uses `build`; `key` and `value` end with a zero byte.
pw_status pw_build_metadata(pw_build *build, const char *key, const char *value);

// Allocates the memory of all tensors, which reads as zero, unless it has it. If this fails, the build can only be closed. Blocks while
// the kernel or the driver allocates.
//
// # Safety
// No other thread uses the handle.
pw_status pw_build_allocate(pw_build *build);

// Fills a tensor with a copy of `length` bytes, as many as it has, in any kind of memory. Blocks until they are copied.
//
// # Safety
// No other thread uses `build`; `tensor` ends with a zero byte; `bytes` may be read.
pw_status pw_build_write(pw_build *build, const char *tensor, const void *bytes, size_t length);

// Stores the address and length of a tensor in host or pinned memory, for writing by the CPU until the commit. If
// `pw_build_device` was called, first waits until the work of this process on that GPU is done.
//
// # Safety
// No other thread uses `build`; `tensor` ends with a zero byte; `data` and `length` may be written.
pw_status pw_build_data(pw_build *build, const char *tensor, void **data, size_t *length);

// Stores the device address and length of a tensor, for the caller's kernels and copies, all enqueued before the
// commit. Does not block.
//
// # Safety
// As `pw_build_data`.
pw_status pw_build_device(pw_build *build, const char *tensor, void **address, size_t *length);

// Makes a build the next version of its name, which other processes can open from now on. Waits for the work of this
// process on the GPU that has it. The caller owns `*segment` and closes it with `pw_segment_close`: a name that is not
// kept ends with it.
//
// On success the build is closed. On failure it is still the caller's, who may commit it again.
//
// # Safety
// No other thread uses `build`; `segment` may be written.
pw_status pw_build_commit(pw_build *build, pw_segment **segment);

// Frees a build that is not to be committed. Null is ignored.
//
// # Safety
// No other thread uses the handle; enqueued work that writes the memory is done.
pw_status pw_build_close(pw_build *build);

// Claims the next task, and waits for one up to `timeout_ns`; negative means without end. The caller owns `*claim`, and
// completes, fails or closes it. If this process dies, another worker gets the task.
//
// # Safety
// No other thread closes `queue`; `claim` may be written.
pw_status pw_queue_claim(const pw_queue *queue, int64_t timeout_ns, pw_claim **claim);

// Claims a task that waits already; otherwise stores null, which is no failure. Does not block.
//
// # Safety
// As `pw_queue_claim`.
pw_status pw_queue_try_claim(const pw_queue *queue, pw_claim **claim);

// Stores what is known about a claimed task. Does not block.
//
// # Safety
// No other thread changes or closes `claim`; `info` points to a struct whose size is set.
pw_status pw_claim_info_get(const pw_claim *claim, pw_claim_info *info);

// Stores what is known about an input, counted from 0. Does not block.
//
// # Safety
// As `pw_claim_info_get`.
pw_status pw_claim_input_get(const pw_claim *claim, size_t index, pw_input_info *info);

// Stores the address and length of an input in host or pinned memory, for reading until the task is closed.
//
// # Safety
// No other thread changes or closes `claim`; `data` and `length` may be written.
pw_status pw_claim_input_data(const pw_claim *claim, size_t index, const void **data, size_t *length);

// Stores the device address and length of an input, for kernels and copies that only read it. `pw_claim_wait_inputs_on`
// orders them behind the submitter's stream.
//
// # Safety
// As `pw_claim_input_data`.
pw_status pw_claim_input_device(const pw_claim *claim, size_t index, const void **address, size_t *length);

// Copies `length` bytes of an input, from `offset` on, to `bytes`, from any kind of memory. Blocks until they are copied.
//
// # Safety
// No other thread changes or closes `claim`; `bytes` may be written.
pw_status pw_claim_input_read(const pw_claim *claim,
                              size_t index,
                              uint64_t offset,
                              void *bytes,
                              size_t length);

// Waits until the submitter's stream has completed the inputs, up to `timeout_ns`; negative means without end.
//
// # Safety
// No other thread changes or closes the handle.
pw_status pw_claim_wait_inputs(const pw_claim *claim, int64_t timeout_ns);

// Makes a stream wait until the submitter's stream has completed the inputs. Does not block. Null is the legacy default
// stream.
//
// # Safety
// No other thread changes or closes `claim`; `stream` is a stream of the primary context of the queue's GPU.
pw_status pw_claim_wait_inputs_on(const pw_claim *claim, void *stream);

// Stores the address and length of the output in host or pinned memory, for writing until the task is closed.
//
// # Safety
// No other thread uses `claim`; `data` and `length` may be written.
pw_status pw_claim_output_data(pw_claim *claim, void **data, size_t *length);

// Stores the device address and length of the output, for the caller's kernels and copies.
//
// # Safety
// As `pw_claim_output_data`.
pw_status pw_claim_output_device(pw_claim *claim, void **address, size_t *length);

// Copies `length` bytes to the beginning of the output, in any kind of memory. Blocks until they are copied.
//
// # Safety
// No other thread uses `claim`; `bytes` may be read.
pw_status pw_claim_output_write(pw_claim *claim, const void *bytes, size_t length);

// Says which type and shape the result has, if it is less than the submitter asked for.
//
// # Safety
// No other thread uses `claim`; `shape` has `rank` lengths.
pw_status pw_claim_output_set_tensor(pw_claim *claim, uint32_t element, const uint64_t *shape, size_t rank);

// Moves the end of the claim to `from_now_ns` from now, in a queue with a lease; fails with `PW_GONE` if the claim was
// taken back.
//
// # Safety
// No other thread changes or closes the handle.
pw_status pw_claim_extend(const pw_claim *claim, uint64_t from_now_ns);

// Completes a task: its output is the result. If a device address was given, first waits for the work of this process on
// that GPU. Closes the handle, also on failure: then another worker gets the task.
//
// # Safety
// No other thread uses the handle.
pw_status pw_claim_complete(pw_claim *claim);

// Completes a task once the work that is on `stream` now is done. Does not wait. Null is the legacy default stream. On
// success the handle is closed; on failure the task is still the caller's.
//
// # Safety
// No other thread uses the handle; `stream` is a stream of the primary context of the queue's GPU.
pw_status pw_claim_complete_on(pw_claim *claim, void *stream);

// Fails an attempt, with a reason of which 127 bytes are kept: the task goes to another worker, or becomes a dead letter.
// Closes the handle, unless `reason` is no text.
//
// # Safety
// No other thread uses `claim`; `reason` ends with a zero byte.
pw_status pw_claim_fail(pw_claim *claim,
                        const char *reason);

// Gives a task back, which counts as an attempt. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_claim_close(pw_claim *claim);

// Opens the memory of a version as file descriptors, of the latest or of `NAME@V`, and waits up to `timeout_ns` until it
// exists; negative means without end. The caller owns `*descriptors`, and closes it once the memory is not used any
// more.
//
// # Safety
// No other thread closes `domain`; `name` ends with a zero byte; `descriptors` may be written.
pw_status pw_descriptors_open(const pw_domain *domain,
                              const char *name,
                              int64_t timeout_ns,
                              pw_descriptors **descriptors);

// Closes the descriptors and gives the lease back. Memory that was mapped or imported stays. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_descriptors_close(pw_descriptors *descriptors);

// Stores what is known about the memory. Does not block.
//
// # Safety
// No other thread closes `descriptors`; `info` points to a struct whose size is set.
pw_status pw_descriptors_info_get(const pw_descriptors *descriptors, pw_descriptors_info *info);

// Stores the descriptor of a chunk, counted from 0, and its length as allocated, which is the size to import. The
// descriptor belongs to the object, closes on exec, and is closed with it.
//
// # Safety
// No other thread closes `descriptors`; `fd` may be written; `bytes` is null or may be written.
pw_status pw_descriptors_chunk(const pw_descriptors *descriptors, size_t index, int *fd, uint64_t *bytes);

// Stores where a tensor is: the chunk, the offset in it and the length in bytes. Each may be null.
//
// # Safety
// No other thread closes `descriptors`; `tensor` ends with a zero byte; the others are null or may be written.
pw_status pw_descriptors_tensor(const pw_descriptors *descriptors,
                                const char *tensor,
                                size_t *chunk,
                                uint64_t *offset,
                                uint64_t *bytes);

// Stores a tensor of a segment in the form of DLPack. It keeps the segment's memory, also after `pw_segment_close`, until
// its consumer calls its deleter, which any thread may do. Read-only unless the segment `is_writable`. Does not block.
//
// # Safety
// No other thread closes `segment`; `tensor` ends with a zero byte; `managed` may be written.
pw_status pw_segment_to_dlpack(const pw_segment *segment,
                               const char *tensor,
                               DLManagedTensorVersioned **managed);

// Makes a sample a read-only tensor in the form of DLPack, for work on `stream` if it is on a GPU: that waits there for
// the publisher's stream. Fails with `PW_BUSY` while a stream still writes a sample in host or pinned memory:
// `pw_sample_wait` waits for it. The block stays as it is until the tensor's deleter is called, which any thread may do:
// it does what `pw_sample_close` does. On success the sample is closed; on failure it is still the caller's.
//
// # Safety
// No other thread uses `sample`; `stream` is a stream of the primary context of the topic's GPU; `managed` may be written.
pw_status pw_sample_to_dlpack(pw_sample *sample,
                              void *stream,
                              DLManagedTensorVersioned **managed);

// Makes a block a tensor in the form of DLPack, of the type and shape that `pw_block_set_tensor` set. The block is held
// until the tensor's deleter is called, which any thread may do: it does what `pw_block_close` does. On success the block
// is closed; on failure it is still the caller's. Does not wait for work of a GPU.
//
// # Safety
// No other thread uses `block`; `managed` may be written.
pw_status pw_block_to_dlpack(pw_block *block,
                             DLManagedTensorVersioned **managed);

// Adds a tensor of another library, on a GPU, to a publication. On success the publication owns it, and its deleter is
// called once, on any thread, when neither the publication nor a segment of this process uses it any more. It must not
// throw or jump out. On failure the tensor is still the caller's.
//
// # Safety
// No other thread uses `publication`; `tensor` ends with a zero byte; `managed` is what `dlpack.h` describes.
pw_status pw_publication_dlpack(pw_publication *publication, const char *tensor, DLManagedTensorVersioned *managed);

// Fills a loan with a copy of a tensor of another library, which has its type and shape, and no gaps. The tensor stays
// the caller's. From host memory this blocks until the bytes are copied. From a GPU, into a loan on that GPU, the copy is
// enqueued on `stream`, behind which `pw_loan_publish_on` publishes it: the tensor stays as it is until then.
//
// # Safety
// No other thread uses `loan`; `managed` is what `dlpack.h` describes; `stream` is a stream of the primary context of the
// topic's GPU.
pw_status pw_loan_copy_dlpack(pw_loan *loan,
                              const DLManagedTensorVersioned *managed,
                              void *stream);

// Tries what works on this machine, as `partywall doctor` does, each probe in a process of the program `partywall`. Needs
// no broker and starts none. `options` may be null; `device` is "auto", "all", "cuda:0" or a UUID, or null for "auto".
// Stores how many findings there are. The caller owns `*findings`. Blocks for some seconds.
//
// # Safety
// `options` is null or valid; `device` is null or ends with a zero byte; `findings` and `count` may be written.
pw_status pw_findings_open(const pw_domain_options *options,
                           const char *device,
                           pw_findings **findings,
                           size_t *count);

// Stores a finding, counted from 0. Does not block.
//
// # Safety
// No other thread closes `findings`; `info` points to a struct whose size is set.
pw_status pw_findings_get(const pw_findings *findings, size_t index, pw_finding_info *info);

// Closes a list. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_findings_close(pw_findings *findings);

// Connects to the broker of a domain, and starts the broker if none runs. `options` may be null.
//
// The caller owns `*domain` and closes it with `pw_domain_close`. Blocks until the broker answers, a few milliseconds
// if it runs. Any thread may call it, also before `main`.
//
// # Safety
// `options` is null or valid; `domain` may be written.
pw_status pw_domain_connect(const pw_domain_options *options, pw_domain **domain);

// Closes a connection. What was opened through it stays usable until it is closed, too. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_domain_close(pw_domain *domain);

// Asks the broker for an answer, to see that it serves this connection. Blocks for one round trip.
//
// # Safety
// No other thread closes the handle.
pw_status pw_domain_ping(const pw_domain *domain);

// Removes a name. Processes that have it open keep it. Blocks for a round trip to the broker.
//
// # Safety
// No other thread closes `domain`; `name` ends with a zero byte.
pw_status pw_domain_remove(const pw_domain *domain, const char *name);

// Returns the release of the library, such as "0.1.0". Never blocks, never fails.
const char *pw_version(void);

// Returns the name of an element type, such as "float32"; empty for a number that is none. It stays for ever. Does not
// block. Any thread may call it.
const char *pw_dtype_name(uint32_t dtype);

// Returns what is known about the last call of this thread that failed; null if none has. It stays until the next call
// of this thread that fails, and the thread ends; copy what is needed longer. Never blocks.
const pw_error *pw_last_error(void);

// Returns the class of an error; `PW_OK` for null.
//
// # Safety
// `error` is null or what `pw_last_error` has returned, still valid.
pw_status pw_error_status(const pw_error *error);

// Returns what happened and why, in one sentence without a full stop; empty for null. Valid as long as the error.
//
// # Safety
// As `pw_error_status`.
const char *pw_error_message(const pw_error *error);

// Returns what to do about it, as a sentence in the imperative; empty for null. Valid as long as the error.
//
// # Safety
// As `pw_error_status`.
const char *pw_error_advice(const pw_error *error);

// Returns the name of the entry of docs/troubleshooting.md about it; empty for null. Valid as long as the error.
//
// # Safety
// As `pw_error_status`.
const char *pw_error_anchor(const pw_error *error);

// Returns the process that the error is about, such as the one that died; 0 if there is none.
//
// # Safety
// As `pw_error_status`.
uint32_t pw_error_pid(const pw_error *error);

// Begins a growth. The caller owns `*growth`, and commits or closes it. Does not block.
//
// # Safety
// `growth` may be written.
pw_status pw_growth_create(pw_growth **growth);

// Gives the last tensor of the version, which must be `tensor`, a first axis of `length`.
//
// # Safety
// No other thread uses `growth`; `tensor` ends with a zero byte.
pw_status pw_growth_extend(pw_growth *growth, const char *tensor, uint64_t length);

// Adds a tensor after the others, its elements without gaps.
//
// # Safety
// As `pw_growth_extend`; `shape` has `rank` lengths.
pw_status pw_growth_tensor(pw_growth *growth, const char *tensor, uint32_t element, const uint64_t *shape, size_t rank);

// Leaves this many bytes free after the tensors. Later growths that fit there map no memory.
//
// # Safety
// No other thread uses the handle.
pw_status pw_growth_spare(pw_growth *growth, uint64_t bytes);

// Makes a version longer, in one step: processes that open it later see the new length, others after
// `pw_segment_refresh`. `segment` is the one that has committed the version, with `is_mutable`. New memory reads as
// zero. Blocks while the kernel or the driver allocates.
//
// On success the growth is closed. On failure the segment is unchanged, and the growth still the caller's.
//
// # Safety
// No other thread uses `growth` or closes `segment`.
pw_status pw_growth_commit(pw_growth *growth, const pw_segment *segment);

// Drops a growth that is not to be committed. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_growth_close(pw_growth *growth);

// Lists all members, this process among them, and stores how many there are. The caller owns `*members`. Blocks for a few
// round trips to the broker.
//
// # Safety
// No other thread closes `domain`; `members` and `count` may be written.
pw_status pw_members_open(const pw_domain *domain,
                          pw_members **members,
                          size_t *count);

// Stores what is known about a member of a list, counted from 0. Does not block.
//
// # Safety
// No other thread closes `members`; `info` points to a struct whose size is set.
pw_status pw_members_get(const pw_members *members, size_t index, pw_member_info *info);

// Closes a list. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_members_close(pw_members *members);

// Evicts the member with this number, or, if it is 0, all members of the process `pid`: ends their waits and names, and
// refuses their further calls. If `kill` is not 0 the broker also sends SIGKILL. What they hold is free once they are proved
// dead. Stores how many were evicted, unless `evicted` is null.
//
// # Safety
// No other thread closes `domain`; `evicted` is null or may be written.
pw_status pw_domain_evict(const pw_domain *domain,
                          uint64_t member,
                          uint32_t pid,
                          int kill,
                          size_t *evicted);

// Stores what is known about a domain and its broker. Blocks for a round trip to the broker.
//
// # Safety
// No other thread closes `domain`; `info` points to a struct whose size is set.
pw_status pw_domain_info_get(const pw_domain *domain, pw_domain_info *info);

// Lists the names of segments, pools, topics and queues, and stores how many there are. The caller owns `*names`. Blocks
// for a few round trips to the broker.
//
// # Safety
// No other thread closes `domain`; `names` and `count` may be written.
pw_status pw_names_open(const pw_domain *domain,
                        pw_names **names,
                        size_t *count);

// Stores what is known about a name of a list, counted from 0. Does not block.
//
// # Safety
// No other thread closes `names`; `info` points to a struct whose size is set.
pw_status pw_names_get(const pw_names *names, size_t index, pw_name_info *info);

// Closes a list. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_names_close(pw_names *names);

// Creates a pool. The caller owns `*pool` and closes it with `pw_pool_close`. Fails if the name exists. Blocks for a few
// round trips to the broker, and while the memory is allocated. Any thread may call it.
//
// # Safety
// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `pool` may be written.
pw_status pw_pool_create(const pw_domain *domain,
                         const char *name,
                         const pw_pool_options *options,
                         pw_pool **pool);

// Opens a pool that exists and agrees with each option that is set. Otherwise as `pw_pool_create`.
//
// # Safety
// As `pw_pool_create`.
pw_status pw_pool_open(const pw_domain *domain, const char *name, const pw_pool_options *options, pw_pool **pool);

// Opens a pool, or creates it if the name does not exist. Otherwise as `pw_pool_create`.
//
// # Safety
// As `pw_pool_create`.
pw_status pw_pool_open_or_create(const pw_domain *domain,
                                 const char *name,
                                 const pw_pool_options *options,
                                 pw_pool **pool);

// Closes a pool. Its blocks that this process holds stay. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_pool_close(pw_pool *pool);

// Stores what is known about a pool now. Takes time in proportion to the number of blocks.
//
// # Safety
// No other thread closes `pool`; `info` points to a struct whose size is set.
pw_status pw_pool_info_get(const pw_pool *pool, pw_pool_info *info);

// Takes a block, and waits up to `timeout_ns` for a free one; negative means without end. The caller owns `*block` and
// closes it with `pw_block_close`.
//
// # Safety
// No other thread closes `pool`; `block` may be written.
pw_status pw_pool_alloc(const pw_pool *pool, int64_t timeout_ns, pw_block **block);

// Takes a block that is free now; otherwise stores null, which is no failure. Does not block.
//
// # Safety
// As `pw_pool_alloc`.
pw_status pw_pool_try_alloc(const pw_pool *pool, pw_block **block);

// Takes over a block that its holder has offered, by the text that `pw_block_offer` stored. Does not wait for work of
// that process on a GPU: a timeline does. The caller owns `*block`. Does not block.
//
// # Safety
// As `pw_pool_alloc`; `offered` ends with a zero byte.
pw_status pw_pool_accept(const pw_pool *pool, const char *offered, pw_block **block);

// Fails if the pool must not be used any more. Takes nanoseconds.
//
// # Safety
// No other thread closes the handle.
pw_status pw_pool_check(const pw_pool *pool);

// Begins to publish memory under a name. `options` may be null. The caller owns `*publication`, and commits or closes
// it. Does not block.
//
// # Safety
// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `publication` may be
// written.
pw_status pw_publication_create(const pw_domain *domain,
                                const char *name,
                                const pw_segment_options *options,
                                pw_publication **publication);

// Adds a tensor that begins at `address`, in memory of a GPU. Strides are in elements; null means without gaps. The
// commit returns errors about the tensor.
//
// If this succeeds, the memory is not freed before `release(context)` is called: once, on any thread, when neither the
// publication nor a segment of this process uses it any more. `release` must not throw, jump out or call
// this library; it may be null for memory that is never freed. On failure it is not called.
//
// # Safety
// No other thread uses `publication`; `tensor` ends with a zero byte; `shape`, and `strides` unless null, have `rank`
// numbers; the memory stays as described.
pw_status pw_publication_tensor(pw_publication *publication,
                                const char *tensor,
                                uint32_t element,
                                const uint64_t *shape,
                                const uint64_t *strides,
                                size_t rank,
                                void *address,
                                void (*release)(void *context),
                                void *context);

// Adds a pair of metadata.
//
// # Safety
// No other thread uses `publication`; `key` and `value` end with a zero byte.
pw_status pw_publication_metadata(pw_publication *publication, const char *key, const char *value);

// Publishes the memory itself, without a copy. Waits for the work of this process on its GPU. The caller owns
// `*segment`, and the name ends when it is closed. Readers see later writes, and whole allocations: docs/from-cuda-ipc.md.
//
// On success the publication is closed. On failure its memory is released, and it can only be closed.
//
// # Safety
// No other thread uses `publication`; `segment` may be written.
pw_status pw_publication_commit(pw_publication *publication,
                                pw_segment **segment);

// Copies the tensors once, on their GPU, into a segment that depends on nobody's memory. Waits for the work of this
// process on the GPU, then for the copies. Otherwise as `pw_publication_commit`.
//
// # Safety
// As `pw_publication_commit`.
pw_status pw_publication_commit_copy(pw_publication *publication, pw_segment **segment);

// Drops a publication that is not to be committed, and releases its memory. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_publication_close(pw_publication *publication);

// Joins a topic as a publisher. The caller owns `*publisher` and closes it with `pw_publisher_close`. Blocks for a
// round trip to the broker at most.
//
// # Safety
// No other thread closes `topic`; `publisher` may be written.
pw_status pw_publisher_open(const pw_topic *topic, pw_publisher **publisher);

// Removes the publisher from its topic, once its loans are published or closed. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_publisher_close(pw_publisher *publisher);

// Publishes a copy of `length` bytes, in any kind of memory. The type and shape give the same number of bytes. Waits up
// to `timeout_ns` for a free block and for subscribers that must not miss the sample; negative means without end. Stores
// in `*sequence` how many samples this publisher had published before, unless it is null.
//
// # Safety
// No other thread closes `publisher`; `shape` has `rank` lengths; `bytes` may be read; `sequence` is null or may be
// written.
pw_status pw_publisher_send(const pw_publisher *publisher,
                            uint32_t element,
                            const uint64_t *shape,
                            size_t rank,
                            const void *bytes,
                            size_t length,
                            int64_t timeout_ns,
                            uint64_t *sequence);

// Borrows a block for a sample of this type and shape, and waits up to `timeout_ns` for a free one; negative means
// without end. The caller owns `*loan`, and publishes or closes it.
//
// # Safety
// No other thread closes `publisher`; `shape` has `rank` lengths; `loan` may be written.
pw_status pw_publisher_loan(const pw_publisher *publisher,
                            uint32_t element,
                            const uint64_t *shape,
                            size_t rank,
                            int64_t timeout_ns,
                            pw_loan **loan);

// Waits until the topic has at least `least` subscribers, up to `timeout_ns`; negative means without end.
//
// # Safety
// No other thread closes the handle.
pw_status pw_publisher_wait_for_subscribers(const pw_publisher *publisher, uint32_t least, int64_t timeout_ns);

// Waits until the streams have completed all samples that were published on them, up to `timeout_ns`; negative means
// without end.
//
// # Safety
// No other thread closes the handle.
pw_status pw_publisher_drain(const pw_publisher *publisher, int64_t timeout_ns);

// Fails if the topic cannot be found by its name any more, or if this publisher cannot publish. Does not block.
//
// # Safety
// No other thread closes the handle.
pw_status pw_publisher_check(const pw_publisher *publisher);

// Stores the address and length of the bytes of a loan in host or pinned memory, for writing by the CPU. They are valid
// until the loan is published or closed. If `pw_loan_device` was called, first waits until the work of this process on
// that GPU is done.
//
// # Safety
// No other thread uses `loan`; `data` and `length` may be written.
pw_status pw_loan_data(pw_loan *loan, void **data, size_t *length);

// Stores the device address and length of a loan, on its GPU or the one that uses pinned memory, for the caller's
// kernels and copies. They are valid until the loan is published or closed. Does not block.
//
// # Safety
// No other thread uses `loan`; `address` and `length` may be written.
pw_status pw_loan_device(pw_loan *loan, void **address, size_t *length);

// Fills a loan with a copy of `length` bytes, as many as it has, in any kind of memory. Blocks until they are copied.
//
// # Safety
// No other thread uses `loan`; `bytes` may be read.
pw_status pw_loan_write(pw_loan *loan, const void *bytes, size_t length);

// Sets the header of the sample, a copy of `length` bytes.
//
// # Safety
// No other thread uses `loan`; `header` may be read.
pw_status pw_loan_set_header(pw_loan *loan, const void *header, size_t length);

// Notes that the sample is made from `input`: if that fails, this sample has failed, too.
//
// # Safety
// No other thread uses `loan` or closes `input`.
pw_status pw_loan_rests_on(pw_loan *loan, const pw_sample *input);

// Publishes what the CPU has written. Waits up to `timeout_ns` for subscribers that must not miss the sample; negative
// means without end. Stores in `*sequence` how many samples this publisher had published before, unless it is null.
//
// On success the loan is closed. On failure it is still the caller's, who may publish it again or close it, but can no
// longer write it.
//
// # Safety
// No other thread uses `loan`; `sequence` is null or may be written.
pw_status pw_loan_publish(pw_loan *loan, int64_t timeout_ns, uint64_t *sequence);

// Publishes what work on a stream writes, which is already enqueued, and does not wait for that work: receivers' streams
// do. Null is the legacy default stream. Otherwise as `pw_loan_publish`.
//
// # Safety
// As `pw_loan_publish`; `stream` is a stream of the primary context of the topic's GPU (cudaStream_t or CUstream).
pw_status pw_loan_publish_on(pw_loan *loan,
                             void *stream,
                             int64_t timeout_ns,
                             uint64_t *sequence);

// Gives the block of a loan back that is not to be published. Null is ignored.
//
// # Safety
// No other thread uses the handle; enqueued work that writes the block is done.
pw_status pw_loan_close(pw_loan *loan);

// Creates a queue. The caller owns `*queue` and closes it with `pw_queue_close`. Fails if the name exists. Blocks for a
// few round trips to the broker, and while the memory is allocated. Any thread may call it.
//
// # Safety
// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `queue` may be written.
pw_status pw_queue_create(const pw_domain *domain, const char *name, const pw_queue_options *options, pw_queue **queue);

// Opens a queue that exists and agrees with each option that is set. Otherwise as `pw_queue_create`.
//
// # Safety
// As `pw_queue_create`.
pw_status pw_queue_open(const pw_domain *domain, const char *name, const pw_queue_options *options, pw_queue **queue);

// Opens a queue, or creates it if the name does not exist. Otherwise as `pw_queue_create`.
//
// # Safety
// As `pw_queue_create`.
pw_status pw_queue_open_or_create(const pw_domain *domain,
                                  const char *name,
                                  const pw_queue_options *options,
                                  pw_queue **queue);

// Closes a queue. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_queue_close(pw_queue *queue);

// Stores what is known about a queue now. Takes time in proportion to its capacity.
//
// # Safety
// No other thread closes `queue`; `info` points to a struct whose size is set.
pw_status pw_queue_info_get(const pw_queue *queue, pw_queue_info *info);

// Fails if the queue must not be used any more. Takes nanoseconds.
//
// # Safety
// No other thread closes the handle.
pw_status pw_queue_check(const pw_queue *queue);

// Takes an input block, and waits up to `timeout_ns` for a free one; negative means without end. The caller owns
// `*block`, and adds it to a task or closes it.
//
// # Safety
// No other thread closes `queue`; `block` may be written.
pw_status pw_queue_alloc_input(const pw_queue *queue, int64_t timeout_ns, pw_block **block);

// Stores a file descriptor for `poll` and `epoll` that becomes readable when tasks have ended. Then call
// `pw_queue_fd_clear`, and look at the tickets. It belongs to the queue, and is closed with it.
//
// # Safety
// No other thread closes `queue`; `fd` may be written.
pw_status pw_queue_fd(const pw_queue *queue, int *fd);

// Makes the descriptor of a queue unreadable until further tasks end. Does not block.
//
// # Safety
// No other thread closes the handle.
pw_status pw_queue_fd_clear(const pw_queue *queue);

// Makes a task of a kind that workers know, at most 32 bytes. `options` may be null. The caller owns `*task`, and
// submits or closes it. Does not block.
//
// # Safety
// `kind` ends with a zero byte; `options` is null or valid; `task` may be written.
pw_status pw_task_create(const char *kind, const pw_task_options *options, pw_task **task);

// Adds an input block of the queue, or the range or tensor in it that was set. A task has at most 8. On success the
// block is closed.
//
// # Safety
// No other thread uses `task` or `block`.
pw_status pw_task_input(pw_task *task, pw_block *block);

// Drops a task that is not to be submitted, and gives its inputs back. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_task_close(pw_task *task);

// Submits a task whose inputs are complete, and waits up to `timeout_ns` until the queue has room; negative means
// without end. The caller owns `*ticket`.
//
// On success the task is closed. On failure it is still the caller's, with its inputs.
//
// # Safety
// No other thread closes `queue` or uses `task`; `ticket` may be written.
pw_status pw_queue_submit(const pw_queue *queue, pw_task *task, int64_t timeout_ns, pw_ticket **ticket);

// Submits a task whose inputs are complete once the work that is on `stream` now is done. Null is the legacy default
// stream. Otherwise as `pw_queue_submit`.
//
// # Safety
// As `pw_queue_submit`; `stream` is a stream of the primary context of the queue's GPU.
pw_status pw_queue_submit_on(const pw_queue *queue,
                             pw_task *task,
                             void *stream,
                             int64_t timeout_ns,
                             pw_ticket **ticket);

// Waits until a task is done, up to `timeout_ns`, and takes its result; negative means without end. The caller owns
// `*output`, which is null for a task without output, and closes it. `attempt` may be null. Fails with
// `PW_INVALID_DATA` if all attempts have failed, with the reason in the message.
//
// # Safety
// No other thread closes `ticket`; `output` may be written; `attempt` is null or may be written.
pw_status pw_ticket_wait(const pw_ticket *ticket, int64_t timeout_ns, pw_block **output, uint32_t *attempt);

// Takes the result of a task that is done: as `pw_ticket_wait`, and `*attempt` is its number, from 1. If the task is not
// done, stores 0 in `*attempt` and null in `*output`, which is no failure. Does not block.
//
// # Safety
// As `pw_ticket_wait`; `attempt` may be written.
pw_status pw_ticket_try_take(const pw_ticket *ticket,
                             pw_block **output,
                             uint32_t *attempt);

// Stores the state of a task: a constant `PW_TASK_…`. Does not block.
//
// # Safety
// No other thread closes `ticket`; `status` may be written.
pw_status pw_ticket_status(const pw_ticket *ticket, uint32_t *status);

// Cancels a task unless a worker has claimed it: then it fails with `PW_BUSY`. Does not block.
//
// # Safety
// No other thread closes the handle.
pw_status pw_ticket_cancel(const pw_ticket *ticket);

// Drops a ticket. The task goes on, and its result waits until a process takes it. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_ticket_close(pw_ticket *ticket);

// Opens a version of a name, the latest unless the options or `NAME@V` say another, and waits up to `timeout_ns` until
// it exists; negative means without end. `options` may be null. The caller owns `*segment` and closes it with
// `pw_segment_close`. Mapping takes microseconds for host memory, up to some milliseconds a GiB for other memory.
//
// # Safety
// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `segment` may be written.
pw_status pw_segment_open(const pw_domain *domain,
                          const char *name,
                          const pw_open_options *options,
                          int64_t timeout_ns,
                          pw_segment **segment);

// Puts a model file, a folder of shards or an index under a name, as its next version: .safetensors, .npy and the other
// formats of `partywall put`. `options` may be null. The caller owns `*segment`. Blocks until all is read, by several
// threads.
//
// # Safety
// As `pw_segment_open`; `path` ends with a zero byte.
pw_status pw_segment_put_file(const pw_domain *domain,
                              const char *name,
                              const char *path,
                              const pw_segment_options *options,
                              pw_segment **segment);

// Closes a segment: unmaps its memory, after the work of this process on its GPU, and gives its lease back. The
// committer of a name that is not kept ends the name in this way. DLPack tensors of it delay both until they are deleted.
// Null is ignored.
//
// # Safety
// No other thread uses the handle, and nobody the addresses that it gave.
pw_status pw_segment_close(pw_segment *segment);

// Stores what is known about a segment. Does not block.
//
// # Safety
// No other thread closes `segment`; `info` points to a struct whose size is set.
pw_status pw_segment_info_get(const pw_segment *segment, pw_segment_info *info);

// Stores what is known about the tensor that was added at this place, from 0. Does not block.
//
// # Safety
// As `pw_segment_info_get`.
pw_status pw_segment_tensor_at(const pw_segment *segment, size_t index, pw_tensor_info *info);

// Stores what is known about a tensor. Fails with `PW_NOT_FOUND` if there is none of that name. Does not block.
//
// # Safety
// As `pw_segment_info_get`; `tensor` ends with a zero byte.
pw_status pw_segment_tensor_get(const pw_segment *segment, const char *tensor, pw_tensor_info *info);

// Stores the address and length of a tensor in host or pinned memory; null for a tensor without bytes. Valid until the
// segment is closed. Write there only if the segment `is_writable`: otherwise the process gets a signal.
//
// # Safety
// No other thread closes `segment`; `tensor` ends with a zero byte; `data` and `length` may be written.
pw_status pw_segment_data(const pw_segment *segment, const char *tensor, void **data, size_t *length);

// Stores the device address and length of a tensor, for the caller's kernels and copies. Valid until the segment is
// closed.
//
// # Safety
// As `pw_segment_data`.
pw_status pw_segment_device(const pw_segment *segment, const char *tensor, void **address, size_t *length);

// Stores the handle of a tensor that this process has published, for programs such as inference servers. Fails with
// `PW_MISMATCH` for other memory. The memory stays until the segment is closed: have the other program close the handle
// before that, because it would see whatever uses the memory next. Does not block.
//
// # Safety
// No other thread closes `segment`; `tensor` ends with a zero byte; `handle` points to a struct whose size is set.
pw_status pw_segment_ipc_handle(const pw_segment *segment, const char *tensor, pw_ipc_handle *handle);

// Copies `length` bytes of a tensor, from `offset` on, to `bytes`, from any kind of memory. Blocks until they are
// copied.
//
// # Safety
// No other thread closes `segment`; `tensor` ends with a zero byte; `bytes` may be written.
pw_status pw_segment_read(const pw_segment *segment, const char *tensor, uint64_t offset, void *bytes, size_t length);

// Copies `length` bytes into a tensor of a segment that `is_writable`, from `offset` on, in any kind of memory. Blocks
// until they are copied. Other processes see them at any moment: the processes order their accesses themselves.
//
// # Safety
// As `pw_segment_read`; `bytes` may be read.
pw_status pw_segment_write(const pw_segment *segment,
                           const char *tensor,
                           uint64_t offset,
                           const void *bytes,
                           size_t length);

// Stores the value of a key of the metadata; null if there is no such key. Valid until the segment is closed or
// advanced.
//
// # Safety
// No other thread closes `segment`; `key` ends with a zero byte; `value` may be written.
pw_status pw_segment_metadata_get(const pw_segment *segment, const char *key, const char **value);

// Stores a pair of the metadata, counted from 0. Valid until the segment is closed or advanced.
//
// # Safety
// No other thread closes `segment`; `key` and `value` may be written.
pw_status pw_segment_metadata_at(const pw_segment *segment, size_t index, const char **key, const char **value);

// Fails if the segment must not be used any more: its name was withdrawn with a deadline that has passed, or its memory
// is lost. Takes nanoseconds.
//
// # Safety
// No other thread closes the handle.
pw_status pw_segment_check(const pw_segment *segment);

// Opens a version of the segment's name that it is not itself: the latest, or `version` unless that is 0. Waits for it
// up to `timeout_ns`; negative means without end. Stores null if there is none in time. The caller owns `*newer`.
//
// # Safety
// No other thread closes `segment`; `newer` may be written.
pw_status pw_segment_newer(const pw_segment *segment, uint64_t version, int64_t timeout_ns, pw_segment **newer);

// Makes a segment on a GPU the version that `next` is, at the addresses that it has: kernels, captured graphs and
// tensors that know them see that version from then on. First waits for the work of this process on the GPU. On success
// `next` is closed; on failure it is still the caller's.
//
// # Safety
// No other thread uses `segment` or `next`, or enqueues work that uses the addresses of `segment`.
pw_status pw_segment_advance(pw_segment *segment, pw_segment *next);

// Maps what was added to the version since it was opened or refreshed, and stores `PW_UNCHANGED`, `PW_GROWN` or
// `PW_DOES_NOT_FIT`. Addresses stay. If `timeout_ns` is not 0, first waits that long for a growth; negative means
// without end.
//
// # Safety
// No other thread closes `segment`; `result` may be written.
pw_status pw_segment_refresh(const pw_segment *segment, int64_t timeout_ns, uint32_t *result);

// Opens a semaphore of `permits` permits, and creates it if it does not exist; otherwise it has as many. `options` may be
// null. The caller owns `*semaphore` and closes it with `pw_semaphore_close`. Blocks for a round trip to the broker.
//
// # Safety
// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `semaphore` may be written.
pw_status pw_semaphore_open(const pw_domain *domain,
                            const char *name,
                            uint32_t permits,
                            const pw_semaphore_options *options,
                            pw_semaphore **semaphore);

// Closes a semaphore. Permits that this process holds stay. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_semaphore_close(pw_semaphore *semaphore);

// Stores what is known about a semaphore now. Takes time in proportion to the number of permits.
//
// # Safety
// No other thread closes `semaphore`; `info` points to a struct whose size is set.
pw_status pw_semaphore_info_get(const pw_semaphore *semaphore, pw_semaphore_info *info);

// Takes a permit, and waits up to `timeout_ns` for a free one; negative means without end. The caller owns `*permit` and
// closes it.
//
// # Safety
// No other thread closes `semaphore`; `permit` may be written.
pw_status pw_semaphore_acquire(const pw_semaphore *semaphore,
                               int64_t timeout_ns,
                               pw_permit **permit);

// Takes a permit that is free now; otherwise stores null, which is no failure. Does not block.
//
// # Safety
// As `pw_semaphore_acquire`.
pw_status pw_semaphore_try_acquire(const pw_semaphore *semaphore, pw_permit **permit);

// Gives a permit back. Null is ignored. Does not block.
//
// # Safety
// No other thread uses the handle.
pw_status pw_permit_close(pw_permit *permit);

// Gives a permit back once the work that is on `stream` now is done. Does not wait. Null is the legacy default stream.
// On failure the permit is still the caller's.
//
// # Safety
// No other thread uses the handle; `stream` is a stream of the primary context of the semaphore's device.
pw_status pw_permit_close_on(pw_permit *permit, void *stream);

// Joins a topic as a subscriber. `options` may be null: then publishers wait for it. The caller owns `*subscriber` and
// closes it with `pw_subscriber_close`.
//
// # Safety
// No other thread closes `topic`; `options` is null or valid; `subscriber` may be written.
pw_status pw_subscriber_open(const pw_topic *topic, const pw_subscriber_options *options, pw_subscriber **subscriber);

// Detaches the subscriber from its topic. Samples that it has received stay. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_subscriber_close(pw_subscriber *subscriber);

// Receives the next sample, and waits for it up to `timeout_ns`; negative means without end. The caller owns `*sample`
// and closes it with `pw_sample_close`.
//
// # Safety
// No other thread closes `subscriber`; `sample` may be written.
pw_status pw_subscriber_recv(const pw_subscriber *subscriber, int64_t timeout_ns, pw_sample **sample);

// Receives a sample that is there already; otherwise stores null, which is no failure. Does not block.
//
// # Safety
// As `pw_subscriber_recv`.
pw_status pw_subscriber_try_recv(const pw_subscriber *subscriber, pw_sample **sample);

// Stores a file descriptor that is readable while `pw_subscriber_try_recv` would store a sample or fail, for `poll` and
// `epoll`. It belongs to the subscriber, and is closed with it; there is nothing to read from it.
//
// # Safety
// No other thread closes `subscriber`; `fd` may be written.
pw_status pw_subscriber_fd(const pw_subscriber *subscriber, int *fd);

// Stores what is known about a sample. Does not block; reads the clock.
//
// # Safety
// No other thread closes `sample`; `info` points to a struct whose size is set.
pw_status pw_sample_info_get(const pw_sample *sample, pw_sample_info *info);

// Stores the address and length of the bytes of a sample in host or pinned memory. They are valid until it is closed.
// Fails with `PW_BUSY` while a stream still writes them. Does not block.
//
// # Safety
// No other thread closes `sample`; `data` and `length` may be written.
pw_status pw_sample_data(const pw_sample *sample, const void **data, size_t *length);

// Stores the device address and length of a sample on the GPU of `stream`, for work that is enqueued on it from now on:
// it waits there for the publisher's stream. Null is the legacy default stream. Does not block.
//
// # Safety
// No other thread closes `sample`; `stream` is a stream of the primary context of the topic's GPU; `address` and
// `length` may be written.
pw_status pw_sample_device_on(const pw_sample *sample, void *stream, const void **address, size_t *length);

// Copies `length` bytes from `offset` on to `bytes`, from any kind of memory. Blocks until they are copied.
//
// # Safety
// No other thread closes `sample`; `bytes` may be written.
pw_status pw_sample_read(const pw_sample *sample, uint64_t offset, void *bytes, size_t length);

// Copies the header that the publisher has added, at most `capacity` bytes of it, and stores its length in `*length`.
// With a capacity of 0 `header` may be null.
//
// # Safety
// No other thread closes `sample`; `header` may be written; `length` may be written.
pw_status pw_sample_header(const pw_sample *sample, void *header, size_t capacity, size_t *length);

// Waits until the publisher's stream has completed the sample, up to `timeout_ns`; negative means without end.
//
// # Safety
// No other thread closes the handle.
pw_status pw_sample_wait(const pw_sample *sample, int64_t timeout_ns);

// Fails if the sample is not valid: `PW_INVALID_DATA` if its publisher, or that of a sample that it was made from, ended
// before it was complete. Call it once the work that has read the sample is done, before you use its results.
//
// # Safety
// No other thread closes the handle.
pw_status pw_sample_check(const pw_sample *sample);

// Closes a sample, so that its block can be written again. If `pw_sample_device_on` was called, first waits until the
// work of this process on that GPU is done. Null is ignored.
//
// # Safety
// No other thread uses the handle, and nobody the addresses that it gave.
pw_status pw_sample_close(pw_sample *sample);

// Closes a sample once the work that is on `stream` now is done. Does not wait. On failure the sample is still the
// caller's.
//
// # Safety
// As `pw_sample_close`; `stream` is a stream of the primary context of the topic's GPU.
pw_status pw_sample_close_on(pw_sample *sample, void *stream);

// Opens a timeline to wait for it, and creates it at 0 if it does not exist. `options` may be null. The caller owns
// `*timeline` and closes it with `pw_timeline_close`. Blocks for a round trip to the broker. Any thread may call it.
//
// # Safety
// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `timeline` may be written.
pw_status pw_timeline_open(const pw_domain *domain,
                           const char *name,
                           const pw_timeline_options *options,
                           pw_timeline **timeline);

// Opens a timeline to signal it, from its present value on. Fails with `PW_BUSY` while it has another writer. Otherwise
// as `pw_timeline_open`.
//
// # Safety
// As `pw_timeline_open`; `writer` may be written.
pw_status pw_writer_open(const pw_domain *domain,
                         const char *name,
                         const pw_timeline_options *options,
                         pw_writer **writer);

// Closes a timeline that was opened to wait for it. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_timeline_close(pw_timeline *timeline);

// Stores how far a timeline is. Does not block; takes nanoseconds.
//
// # Safety
// No other thread closes `timeline`; `info` points to a struct whose size is set.
pw_status pw_timeline_info_get(const pw_timeline *timeline, pw_timeline_info *info);

// Waits until the timeline has reached `value`, up to `timeout_ns`; negative means without end. Fails with `PW_GONE` as
// soon as it has ended before.
//
// # Safety
// No other thread closes the handle.
pw_status pw_timeline_wait(const pw_timeline *timeline, uint64_t value, int64_t timeout_ns);

// Makes a stream wait until the timeline has reached `value`, before work that is enqueued from now on. Does not block.
// If the timeline ends before, the stream continues, and `pw_timeline_check` says so. Null is the legacy default stream.
//
// # Safety
// No other thread closes `timeline`; `stream` is a stream of the primary context of the timeline's device.
pw_status pw_timeline_wait_on(const pw_timeline *timeline,
                              void *stream,
                              uint64_t value);

// Fails with `PW_GONE` if the timeline ended before a value that a stream waited for, and with `PW_INVALID_DATA` if such
// a value rests on a timeline that has failed. Call it when that work is done, before you use its results. Does not
// block.
//
// # Safety
// No other thread closes the handle.
pw_status pw_timeline_check(const pw_timeline *timeline);

// Ends a timeline of any process: all waits for it end with `PW_GONE`. Blocks for a round trip to the broker.
//
// # Safety
// No other thread closes the handle.
pw_status pw_timeline_abandon(const pw_timeline *timeline);

// Makes a descriptor for `poll` and `epoll`, which becomes readable, and stays so, once the timeline has reached `value`
// or ended before. It belongs to `*event`, which the caller owns, and is closed with it; there is nothing to read from
// it. Does not block.
//
// # Safety
// No other thread closes `timeline`; `event` and `fd` may be written.
pw_status pw_timeline_event_open(const pw_timeline *timeline,
                                 uint64_t value,
                                 pw_timeline_event **event,
                                 int *fd);

// Closes an event and its descriptor. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_timeline_event_close(pw_timeline_event *event);

// Signals that the work which `value` stands for is done; values only grow. Does not block.
//
// # Safety
// No other thread closes the handle.
pw_status pw_writer_signal(const pw_writer *writer, uint64_t value);

// Signals `value` once the work that is on `stream` now is done. Does not block. Null is the legacy default stream.
//
// # Safety
// No other thread closes `writer`; `stream` is a stream of the primary context of the writer's device.
pw_status pw_writer_signal_on(const pw_writer *writer, void *stream, uint64_t value);

// Notes that the values which are signalled from now on are made from those of `input`: if that fails, so have they.
//
// # Safety
// No other thread closes the handles.
pw_status pw_writer_rests_on(const pw_writer *writer, const pw_timeline *input);

// Closes a writer: waits for values that it has not signalled end with `PW_GONE`. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_writer_close(pw_writer *writer);

// Creates a topic. The caller owns `*topic` and closes it with `pw_topic_close`. Fails if the name exists. Blocks for a
// few round trips to the broker. Any thread may call it.
//
// # Safety
// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `topic` may be written.
pw_status pw_topic_create(const pw_domain *domain, const char *name, const pw_topic_options *options, pw_topic **topic);

// Opens a topic that exists and agrees with each option that is set. Otherwise as `pw_topic_create`.
//
// # Safety
// As `pw_topic_create`.
pw_status pw_topic_open(const pw_domain *domain, const char *name, const pw_topic_options *options, pw_topic **topic);

// Opens a topic, or creates it if the name does not exist. Otherwise as `pw_topic_create`.
//
// # Safety
// As `pw_topic_create`.
pw_status pw_topic_open_or_create(const pw_domain *domain,
                                  const char *name,
                                  const pw_topic_options *options,
                                  pw_topic **topic);

// Closes a topic. Its publishers and subscribers stay. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_topic_close(pw_topic *topic);

// Stores what is known about a topic now. Does not block.
//
// # Safety
// No other thread closes `topic`; `info` points to a struct whose size is set.
pw_status pw_topic_info_get(const pw_topic *topic, pw_topic_info *info);

// Fails if the topic cannot be found by its name any more. Does not block.
//
// # Safety
// No other thread closes the handle.
pw_status pw_topic_check(const pw_topic *topic);

// Watches names that match a pattern, in which `*` stands for any characters and `?` for one. Begins with the next event,
// or, unless both numbers are 0, behind the point that `pw_watch_point` of another watch stored. The caller owns
// `*watch`. Blocks for a round trip to the broker.
//
// # Safety
// No other thread closes `domain`; `pattern` ends with a zero byte; `watch` may be written.
pw_status pw_watch_open(const pw_domain *domain,
                        const char *pattern,
                        uint64_t instance,
                        uint64_t sequence,
                        pw_watch **watch);

// Waits for the next event, up to `timeout_ns`; negative means without end. If none comes in time, `change` is null,
// which is no failure.
//
// # Safety
// No other thread uses `watch`; `info` points to a struct whose size is set.
pw_status pw_watch_next(pw_watch *watch, int64_t timeout_ns, pw_event_info *info);

// Stores the point behind the events that this watch has returned, for `pw_watch_open`. Does not block.
//
// # Safety
// No other thread uses `watch`; `instance` and `sequence` may be written.
pw_status pw_watch_point(const pw_watch *watch, uint64_t *instance, uint64_t *sequence);

// Closes a watch. Null is ignored.
//
// # Safety
// No other thread uses the handle.
pw_status pw_watch_close(pw_watch *watch);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PARTYWALL_H */
