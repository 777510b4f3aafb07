/* Pools, timelines and semaphores; each mistake of a caller is found out. */
#include <poll.h>

#include "check.h"

static void pools(pw_domain *domain) {
    pw_pool_options options = PW_INIT(pw_pool_options);
    options.blocks = 2;
    options.block_bytes = 64;
    options.zeroed = 1;
    pw_pool *pool = NULL;
    FAILS(PW_NOT_FOUND, pw_pool_open(domain, "frames", NULL, &pool));
    OK(pw_pool_create(domain, "frames", &options, &pool));
    FAILS(PW_DENIED, pw_pool_create(domain, "frames", &options, &pool));
    pw_pool *again = NULL;
    OK(pw_pool_open_or_create(domain, "frames", &options, &again));
    OK(pw_pool_close(again));
    options.blocks = 3;
    FAILS(PW_MISMATCH, pw_pool_open(domain, "frames", &options, &again));
    pw_segment *segment = NULL;
    FAILS(PW_MISMATCH, pw_segment_open(domain, "frames", NULL, 0, &segment));
    CHECK(strstr(pw_error_advice(pw_last_error()), "pw_pool_open") != NULL);
    pw_block *one = NULL;
    pw_block *two = NULL;
    pw_block *three = (pw_block *)&options;
    OK(pw_pool_alloc(pool, 0, &one));
    OK(pw_pool_try_alloc(pool, &two));
    OK(pw_pool_try_alloc(pool, &three));
    CHECK(two != NULL && three == NULL);
    FAILS(PW_TIMED_OUT, pw_pool_alloc(pool, 1000, &three));
    pw_pool_info about = PW_INIT(pw_pool_info);
    OK(pw_pool_info_get(pool, &about));
    CHECK(about.blocks == 2 && about.held == 2 && about.free == 0 && about.block_bytes == 64);

    void *data = NULL;
    size_t length = 0;
    OK(pw_block_data(one, &data, &length));
    CHECK(length == 64 && ((char *)data)[63] == 0);
    OK(pw_block_write(one, "hello", 5));
    char bytes[64] = {0};
    OK(pw_block_read(one, 1, bytes, 4));
    CHECK(memcmp(bytes, "ello", 4) == 0);
    FAILS(PW_INVALID_ARGUMENT, pw_block_read(one, 61, bytes, 4));
    FAILS(PW_INVALID_ARGUMENT, pw_block_read(one, UINT64_MAX, bytes, 4));
    FAILS(PW_INVALID_ARGUMENT, pw_block_write(one, bytes, 65 + 0 * sizeof bytes));
    FAILS(PW_INVALID_ARGUMENT, pw_block_write(one, NULL, 1));
    CHECK(pw_block_device(one, &data, NULL) == PW_MISMATCH);
    CHECK(pw_block_zero_on(one, NULL) != PW_OK);
    const uint64_t shape[] = {2, 2};
    const uint64_t huge[] = {UINT64_MAX, UINT64_MAX};
    OK(pw_block_set_range(one, 16, 32));
    OK(pw_block_set_tensor(one, PW_DTYPE_F32, shape, 2));
    pw_block_info info = PW_INIT(pw_block_info);
    OK(pw_block_info_get(one, &info));
    CHECK(info.rank == 2 && info.shape[1] == 2 && info.bytes == 16 && info.dtype == PW_DTYPE_F32);
    FAILS(PW_INVALID_ARGUMENT, pw_block_set_range(one, 16, UINT64_MAX));
    CHECK(pw_block_set_tensor(one, PW_DTYPE_F64, huge, 2) != PW_OK);
    FAILS(PW_INVALID_ARGUMENT, pw_block_set_tensor(one, PW_DTYPE_F64, NULL, 2));
    OK(pw_block_set_range(one, 0, 64));
    OK(pw_block_zero(one));
    OK(pw_block_read(one, 0, bytes, 5));
    CHECK(bytes[0] == 0);

    OK(pw_block_write(one, "hello", 5));
    char text[PW_BLOCK_TEXT];
    FAILS(PW_INVALID_ARGUMENT, pw_block_offer(one, text, PW_BLOCK_TEXT - 1, NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_block_offer(one, NULL, PW_BLOCK_TEXT, NULL));
    OK(pw_block_offer(one, text, sizeof text, &length));
    CHECK(strlen(text) == length && strncmp(text, "frames@1#", 9) == 0);
    FAILS(PW_INVALID_ARGUMENT, pw_block_offer(one, text, sizeof text, NULL));
    OK(pw_pool_accept(pool, text, &one));
    FAILS(PW_GONE, pw_pool_accept(pool, text, &three));
    FAILS(PW_INVALID_ARGUMENT, pw_pool_accept(pool, "frames", &three));
    FAILS(PW_INVALID_ARGUMENT, pw_pool_accept(pool, "\xff", &three));
    FAILS(PW_INVALID_ARGUMENT, pw_pool_accept(pool, NULL, &three));
    OK(pw_block_read(one, 0, bytes, 5));
    CHECK(memcmp(bytes, "hello", 5) == 0);
    CHECK(pw_block_close_on(one, NULL) != PW_OK); /* no GPU: still held */
    OK(pw_block_close(one));
    FAILS(PW_INVALID_ARGUMENT, pw_block_close(one));
    FAILS(PW_INVALID_ARGUMENT, pw_block_read(one, 0, bytes, 5));
    FAILS(PW_INVALID_ARGUMENT, pw_pool_close((pw_pool *)two));
    OK(pw_block_close(two));
    OK(pw_block_close(NULL));
    OK(pw_pool_check(pool));
    OK(pw_pool_close(pool));

    options.size = 1;
    FAILS(PW_INVALID_ARGUMENT, pw_pool_create(domain, "x", &options, &pool));
    options.size = offsetof(pw_pool_options, blocks);
    FAILS(PW_INVALID_ARGUMENT, pw_pool_create(domain, "x", &options, &pool)); /* it has no blocks */
    FAILS(PW_INVALID_ARGUMENT, pw_pool_create(domain, NULL, &options, &pool));
}

static void timelines(pw_domain *domain) {
    pw_timeline *timeline = NULL;
    pw_writer *writer = NULL;
    pw_writer *second = NULL;
    OK(pw_timeline_open(domain, "ready", NULL, &timeline));
    OK(pw_writer_open(domain, "ready", NULL, &writer));
    FAILS(PW_BUSY, pw_writer_open(domain, "ready", NULL, &second));
    CHECK(pw_error_pid(pw_last_error()) == (uint32_t)getpid());
    FAILS(PW_TIMED_OUT, pw_timeline_wait(timeline, 1, 1000));
    pw_timeline_event *event = NULL;
    int fd = -1;
    FAILS(PW_INVALID_ARGUMENT, pw_timeline_event_open(timeline, 1, &event, NULL));
    OK(pw_timeline_event_open(timeline, 1, &event, &fd));
    struct pollfd wanted = {.fd = fd, .events = POLLIN};
    CHECK(poll(&wanted, 1, 0) == 0);
    OK(pw_writer_signal(writer, 1));
    CHECK(poll(&wanted, 1, 10000) == 1);
    OK(pw_timeline_event_close(event));
    FAILS(PW_INVALID_ARGUMENT, pw_timeline_event_close(event));
    OK(pw_timeline_wait(timeline, 1, PW_FOREVER));
    FAILS(PW_INVALID_ARGUMENT, pw_writer_signal(writer, 1));
    FAILS(PW_INVALID_ARGUMENT, pw_timeline_wait(timeline, UINT64_MAX, 0));
    pw_timeline_info about = PW_INIT(pw_timeline_info);
    OK(pw_timeline_info_get(timeline, &about));
    CHECK(about.value == 1 && about.announced == 1 && !about.has_ended);
    CHECK(pw_timeline_wait_on(timeline, NULL, 2) != PW_OK); /* no GPU */
    CHECK(pw_writer_signal_on(writer, NULL, 2) != PW_OK);
    OK(pw_writer_rests_on(writer, timeline));
    OK(pw_timeline_check(timeline));
    OK(pw_writer_close(writer));
    FAILS(PW_GONE, pw_timeline_wait(timeline, 2, PW_FOREVER));
    OK(pw_timeline_info_get(timeline, &about));
    CHECK(about.has_ended);
    OK(pw_timeline_close(timeline));
    FAILS(PW_INVALID_ARGUMENT, pw_timeline_wait(timeline, 1, 0));

    OK(pw_timeline_open(domain, "left", NULL, &timeline));
    OK(pw_timeline_abandon(timeline));
    FAILS(PW_GONE, pw_timeline_wait(timeline, 1, PW_FOREVER));
    OK(pw_timeline_close(timeline));
    OK(pw_timeline_close(NULL));
    OK(pw_writer_close(NULL));
    pw_timeline_options options = PW_INIT(pw_timeline_options);
    options.device = "pinned";
    CHECK(pw_timeline_open(domain, "x", &options, &timeline) != PW_OK);
    options.device = "host";
    FAILS(PW_INVALID_ARGUMENT, pw_timeline_open(domain, "x", &options, &timeline));
    FAILS(PW_INVALID_ARGUMENT, pw_timeline_open(domain, "\xff", NULL, &timeline));
    FAILS(PW_INVALID_ARGUMENT, pw_timeline_open(domain, "x", NULL, NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_writer_signal((pw_writer *)domain, 1));
}

static void semaphores(pw_domain *domain) {
    pw_semaphore *semaphore = NULL;
    pw_permit *one = NULL;
    pw_permit *two = (pw_permit *)&semaphore;
    FAILS(PW_INVALID_ARGUMENT, pw_semaphore_open(domain, "slots", 0, NULL, &semaphore));
    OK(pw_semaphore_open(domain, "slots", 1, NULL, &semaphore));
    OK(pw_semaphore_acquire(semaphore, PW_FOREVER, &one));
    OK(pw_semaphore_try_acquire(semaphore, &two));
    CHECK(two == NULL);
    FAILS(PW_TIMED_OUT, pw_semaphore_acquire(semaphore, 1000, &two));
    FAILS(PW_INVALID_ARGUMENT, pw_semaphore_acquire(semaphore, 0, NULL));
    pw_semaphore_info about = PW_INIT(pw_semaphore_info);
    OK(pw_semaphore_info_get(semaphore, &about));
    CHECK(about.permits == 1 && about.available == 0 && about.waiting == 0);
    CHECK(pw_permit_close_on(one, NULL) != PW_OK); /* no GPU: still held */
    OK(pw_permit_close(one));
    FAILS(PW_INVALID_ARGUMENT, pw_permit_close(one));
    FAILS(PW_INVALID_ARGUMENT, pw_permit_close_on(one, NULL));
    OK(pw_semaphore_try_acquire(semaphore, &two));
    OK(pw_semaphore_close(semaphore));
    OK(pw_permit_close(two));
    OK(pw_permit_close(NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_semaphore_close(semaphore));
    FAILS(PW_INVALID_ARGUMENT, pw_semaphore_acquire((pw_semaphore *)domain, 0, &one));
}

int main(void) {
    pw_domain *domain = NULL;
    OK(pw_domain_connect(NULL, &domain));
    pools(domain);
    timelines(domain);
    semaphores(domain);
    OK(pw_domain_close(domain));
    return 0;
}
