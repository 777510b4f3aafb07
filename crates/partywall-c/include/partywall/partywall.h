/* Partywall: processes on one Linux machine share GPU memory by name, without copying it, and survive each other's
   deaths. Generated from the Rust sources of crates/partywall-c; `PARTYWALL_BLESS=1 cargo test -p partywall-c` writes
   it anew. docs/c.md is the guide. */


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

// A connection to a broker. It stays until it and everything opened through it are closed. Any thread may use it.
typedef struct pw_domain pw_domain;

// What is known about a failed call.
typedef struct pw_error pw_error;

// A block that is being filled. One thread may use it at a time.
typedef struct pw_loan pw_loan;

// A publisher of a topic. Any thread may use it.
typedef struct pw_publisher pw_publisher;

// A sample that was received. Any thread may use it. Its block stays as it is until it is closed.
typedef struct pw_sample pw_sample;

// A subscriber of a topic. Any thread may use it; each sample is received once.
typedef struct pw_subscriber pw_subscriber;

// A topic: a stream of samples, each written once and read in place. Any thread may use it.
typedef struct pw_topic pw_topic;

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

// How a topic is created, or what an existing one must agree with. What is zero is not set.
typedef struct {
    // `sizeof(pw_topic_options)`.
    size_t size;
    // Where samples are: "host", "pinned", "cuda:0", a GPU's UUID, "auto"; null for host memory.
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

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

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

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PARTYWALL_H */
