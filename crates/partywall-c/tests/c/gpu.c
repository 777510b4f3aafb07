/* Memory of a GPU: built, published as it is, advanced in place, and ordered by streams. */
#include "check.h"
#include "dlpack.h"
#include "gpu.h"

static const uint64_t FOUR[] = {4};

static pw_segment *weights(pw_domain *domain, const float *values) {
    pw_segment_options options = PW_INIT(pw_segment_options);
    options.device = "cuda:0";
    pw_build *build = NULL;
    pw_segment *segment = NULL;
    OK(pw_build_create(domain, "weights", &options, &build));
    OK(pw_build_tensor(build, "w", PW_DTYPE_F32, FOUR, NULL, 1));
    OK(pw_build_allocate(build));
    void *address = NULL;
    size_t length = 0;
    OK(pw_build_device(build, "w", &address, &length));
    CHECK(address != NULL && length == 16);
    FAILS(PW_MISMATCH, pw_build_data(build, "w", &address, &length));
    OK(pw_build_write(build, "w", values, 16));
    OK(pw_build_commit(build, &segment));
    return segment;
}

static void advance(pw_domain *domain) {
    pw_segment *first = weights(domain, (float[]){1, 2, 3, 4});
    pw_segment *reader = NULL;
    pw_open_options options = PW_INIT(pw_open_options);
    options.device = "cuda:0";
    OK(pw_segment_open(domain, "weights", &options, 0, &reader));
    void *address = NULL;
    OK(pw_segment_device(reader, "w", &address, NULL));
    pw_segment *second = weights(domain, (float[]){5, 6, 7, 8});
    pw_segment *newer = NULL;
    OK(pw_segment_newer(reader, 2, PW_FOREVER, &newer));
    OK(pw_segment_advance(reader, newer));
    void *again = NULL;
    OK(pw_segment_device(reader, "w", &again, NULL));
    CHECK(again == address);
    float seen[4] = {0};
    OK(pw_segment_read(reader, "w", 0, seen, sizeof seen));
    CHECK(seen[0] == 5 && seen[3] == 8);
    OK(pw_segment_close(reader));
    OK(pw_segment_close(first));
    OK(pw_segment_close(second));
}

static int released;

static void release(void *context) {
    CHECK(context == &released);
    released++;
}

static void publish(pw_domain *domain) {
    void *memory = gpu_memory(4096);
    void *stream = stream_create();
    copy_in(memory, (float[]){1, 2, 3, 4}, 16, stream);
    pw_publication *publication = NULL;
    pw_segment_options options = PW_INIT(pw_segment_options);
    OK(pw_publication_create(domain, "existing", &options, &publication));
    FAILS(PW_INVALID_ARGUMENT, pw_publication_tensor(publication, "x", PW_DTYPE_F32, FOUR, NULL, 1, NULL, release, &released));
    FAILS(PW_INVALID_ARGUMENT, pw_publication_tensor(publication, "x", 0, FOUR, NULL, 1, memory, release, &released));
    CHECK(released == 0);
    OK(pw_publication_tensor(publication, "x", PW_DTYPE_F32, FOUR, NULL, 1, memory, release, &released));
    OK(pw_publication_metadata(publication, "key", "value"));
    pw_segment *segment = NULL;
    OK(pw_publication_commit(publication, &segment));
    FAILS(PW_INVALID_ARGUMENT, pw_publication_close(publication));
    pw_segment_info about = PW_INIT(pw_segment_info);
    OK(pw_segment_info_get(segment, &about));
    CHECK(strcmp(about.kind, "legacy") == 0 && about.metadata == 1);
    float seen[4] = {0};
    OK(pw_segment_read(segment, "x", 0, seen, sizeof seen));
    CHECK(seen[3] == 4);
    pw_ipc_handle ipc = PW_INIT(pw_ipc_handle);
    OK(pw_segment_ipc_handle(segment, "x", &ipc));
    uint8_t expected[64];
    CUDA(cuIpcGetMemHandle, (void *, uint64_t), expected, (uint64_t)(uintptr_t)memory);
    CHECK(memcmp(ipc.handle, expected, sizeof expected) == 0);
    CHECK(ipc.offset == 0 && ipc.bytes == 16 && ipc.device == 0);
    FAILS(PW_NOT_FOUND, pw_segment_ipc_handle(segment, "y", &ipc));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_ipc_handle(segment, "x", NULL));
    CHECK(released == 0);
    OK(pw_segment_close(segment));
    CHECK(released == 1);

    /* A copy needs the memory only until it is made. */
    OK(pw_publication_create(domain, "copy", NULL, &publication));
    OK(pw_publication_tensor(publication, "x", PW_DTYPE_F32, FOUR, NULL, 1, memory, release, &released));
    OK(pw_publication_commit_copy(publication, &segment));
    CHECK(released == 2);
    OK(pw_segment_info_get(segment, &about));
    CHECK(strcmp(about.kind, "vmm") == 0);
    OK(pw_segment_close(segment));

    /* Memory that no GPU has is refused by the commit, and released. */
    OK(pw_publication_create(domain, "refused", NULL, &publication));
    OK(pw_publication_tensor(publication, "x", PW_DTYPE_F32, FOUR, NULL, 1, &released, release, &released));
    CHECK(pw_publication_commit(publication, &segment) == PW_DEVICE);
    CHECK(released == 3);
    FAILS(PW_INVALID_ARGUMENT, pw_publication_commit(publication, &segment));
    FAILS(PW_INVALID_ARGUMENT, pw_publication_metadata(publication, "key", "value"));
    OK(pw_publication_close(publication));
    OK(pw_publication_create(domain, "dropped", NULL, &publication));
    OK(pw_publication_tensor(publication, "x", PW_DTYPE_F32, FOUR, NULL, 1, memory, release, &released));
    OK(pw_publication_close(publication));
    CHECK(released == 4);
    options.device = "cuda:0";
    FAILS(PW_INVALID_ARGUMENT, pw_publication_create(domain, "x", &options, &publication));
}

/* A block, a timeline and a permit go with a stream; a sample arrives on another. */
static void order(pw_domain *domain) {
    void *producer = stream_create();
    void *consumer = stream_create();
    pw_pool_options options = PW_INIT(pw_pool_options);
    options.device = "cuda:0";
    options.blocks = 2;
    options.block_bytes = 64;
    pw_pool *pool = NULL;
    OK(pw_pool_create(domain, "frames", &options, &pool));
    pw_timeline *timeline = NULL;
    pw_writer *writer = NULL;
    pw_timeline_options where = PW_INIT(pw_timeline_options);
    where.device = "cuda:0";
    OK(pw_timeline_open(domain, "ready", &where, &timeline));
    OK(pw_writer_open(domain, "ready", NULL, &writer));
    pw_block *block = NULL;
    OK(pw_pool_alloc(pool, 0, &block));
    void *address = NULL;
    size_t length = 0;
    OK(pw_block_device(block, &address, &length));
    CHECK(length == 64);
    FAILS(PW_MISMATCH, pw_block_data(block, &address, &length));
    OK(pw_timeline_wait_on(timeline, consumer, 1));
    char seen[5] = {0};
    OK(pw_block_zero_on(block, producer));
    copy_in(address, "hello", 5, producer);
    OK(pw_writer_signal_on(writer, producer, 1));
    copy_out(seen, address, 5, consumer);
    OK(pw_block_close_on(block, consumer));
    stream_wait(consumer);
    OK(pw_timeline_check(timeline));
    CHECK(memcmp(seen, "hello", 5) == 0);

    pw_semaphore *semaphore = NULL;
    pw_permit *permit = NULL;
    OK(pw_semaphore_open(domain, "slots", 1, NULL, &semaphore));
    OK(pw_semaphore_acquire(semaphore, 0, &permit));
    OK(pw_permit_close_on(permit, producer));
    OK(pw_semaphore_acquire(semaphore, PW_FOREVER, &permit));
    OK(pw_permit_close(permit));
    OK(pw_semaphore_close(semaphore));
    OK(pw_timeline_close(timeline));
    OK(pw_writer_close(writer));
    OK(pw_pool_close(pool));

    pw_topic_options stream = PW_INIT(pw_topic_options);
    stream.device = "cuda:0";
    stream.max_bytes = 64;
    pw_topic *topic = NULL;
    pw_publisher *publisher = NULL;
    pw_subscriber *subscriber = NULL;
    OK(pw_topic_create(domain, "stream", &stream, &topic));
    OK(pw_publisher_open(topic, &publisher));
    OK(pw_subscriber_open(topic, NULL, &subscriber));
    pw_loan *loan = NULL;
    OK(pw_publisher_loan(publisher, PW_DTYPE_U8, FOUR, 1, 0, &loan));
    OK(pw_loan_device(loan, &address, &length));
    copy_in(address, "four", 4, producer);
    OK(pw_loan_publish_on(loan, producer, PW_FOREVER, NULL));
    pw_sample *sample = NULL;
    OK(pw_subscriber_recv(subscriber, PW_FOREVER, &sample));
    const void *received = NULL;
    OK(pw_sample_device_on(sample, consumer, &received, &length));
    CHECK(length == 4);
    copy_out(seen, received, 4, consumer);
    OK(pw_sample_close_on(sample, consumer));
    stream_wait(consumer);
    CHECK(memcmp(seen, "four", 4) == 0);
    OK(pw_subscriber_close(subscriber));
    OK(pw_publisher_close(publisher));
    OK(pw_topic_close(topic));
}

/* Tensors of other libraries, in memory of a GPU, and tensors for them. */
static void exchange(pw_domain *domain) {
    int64_t four = 4;
    void *memory = gpu_memory(4096);
    void *stream = stream_create();
    copy_in(memory, (float[]){1, 2, 3, 4}, 16, stream);
    DLManagedTensorVersioned given = floats(memory, 2, &four);
    pw_publication *publication = NULL;
    pw_segment *segment = NULL;
    OK(pw_publication_create(domain, "given", NULL, &publication));
    FAILS(PW_INVALID_ARGUMENT, pw_publication_dlpack(publication, "x", NULL));
    given.dl_tensor.device.device_type = 1;
    FAILS(PW_INVALID_ARGUMENT, pw_publication_dlpack(publication, "x", &given));
    CHECK(deleted == 0);
    given.dl_tensor.device.device_type = 2;
    OK(pw_publication_dlpack(publication, "x", &given));
    OK(pw_publication_commit_copy(publication, &segment));
    CHECK(deleted == 1);
    DLManagedTensorVersioned *managed = NULL;
    OK(pw_segment_to_dlpack(segment, "x", &managed));
    CHECK(managed->dl_tensor.device.device_type == 2 && managed->dl_tensor.device.device_id == 0);
    FAILS(PW_INVALID_ARGUMENT, pw_segment_advance(segment, segment));
    OK(pw_segment_close(segment));
    float seen[4] = {0};
    copy_out(seen, managed->dl_tensor.data, 16, stream);
    stream_wait(stream);
    CHECK(seen[3] == 4);
    managed->deleter(managed);

    pw_topic_options options = PW_INIT(pw_topic_options);
    options.device = "cuda:0";
    options.max_bytes = 64;
    pw_topic *topic = NULL;
    pw_publisher *publisher = NULL;
    pw_subscriber *subscriber = NULL;
    OK(pw_topic_create(domain, "given/stream", &options, &topic));
    OK(pw_publisher_open(topic, &publisher));
    OK(pw_subscriber_open(topic, NULL, &subscriber));
    pw_loan *loan = NULL;
    OK(pw_publisher_loan(publisher, PW_DTYPE_F32, FOUR, 1, 0, &loan));
    /* The sample is not complete before the host signals. */
    pw_timeline *held = NULL;
    pw_writer *go = NULL;
    void *consumer = stream_create();
    OK(pw_timeline_open(domain, "go", NULL, &held));
    OK(pw_writer_open(domain, "go", NULL, &go));
    OK(pw_timeline_wait_on(held, stream, 1));
    OK(pw_loan_copy_dlpack(loan, &given, stream));
    OK(pw_loan_publish_on(loan, stream, PW_FOREVER, NULL));
    pw_sample *sample = NULL;
    OK(pw_subscriber_recv(subscriber, PW_FOREVER, &sample));
    OK(pw_sample_to_dlpack(sample, consumer, &managed));
    OK(pw_writer_signal(go, 1));
    memset(seen, 0, sizeof seen);
    copy_out(seen, managed->dl_tensor.data, 16, consumer);
    stream_wait(consumer);
    OK(pw_writer_close(go));
    OK(pw_timeline_close(held));
    CHECK(seen[3] == 4 && managed->dl_tensor.device.device_type == 2);
    managed->deleter(managed);
    OK(pw_subscriber_close(subscriber));
    OK(pw_publisher_close(publisher));
    OK(pw_topic_close(topic));
    CHECK(deleted == 1);
}

/* Without a device memory is the host's, although there is a GPU; opening asks for no place. */
static void places(pw_domain *domain) {
    pw_pool_options options = PW_INIT(pw_pool_options);
    options.blocks = 2;
    options.block_bytes = 4096;
    pw_pool *pool = NULL;
    pw_block *block = NULL;
    void *address = NULL;
    OK(pw_pool_create(domain, "places/host", &options, &pool));
    OK(pw_pool_alloc(pool, PW_FOREVER, &block));
    OK(pw_block_data(block, &address, NULL));
    OK(pw_block_close(block));
    OK(pw_pool_close(pool));
    options.device = "cuda:0";
    OK(pw_pool_create(domain, "places/gpu", &options, &pool));
    pw_pool *other = NULL;
    OK(pw_pool_open(domain, "places/gpu", NULL, &other));
    OK(pw_pool_close(other));
    options.device = NULL;
    FAILS(PW_MISMATCH, pw_pool_open_or_create(domain, "places/gpu", &options, &other));
    OK(pw_pool_close(pool));
}

int main(void) {
    use_gpu();
    pw_domain *domain = NULL;
    OK(pw_domain_connect(NULL, &domain));
    places(domain);
    advance(domain);
    publish(domain);
    order(domain);
    exchange(domain);
    OK(pw_domain_close(domain));
    return 0;
}
