/* The calls of calls.rs in C. That program loads this one, so that all languages run in one process. */
#include <partywall/partywall.h>
#include <stdio.h>
#include <time.h>

#define OK(call)                                                              \
    if ((call) != PW_OK) {                                                    \
        fprintf(stderr, "%s: %s\n", #call, pw_error_message(pw_last_error())); \
        return 1;                                                             \
    }

static pw_publisher *publisher;
static pw_subscriber *subscriber;
static pw_pool *pool;
static const int64_t TIMEOUT = 10000000000;

int calls_open(void) {
    pw_domain *domain;
    pw_topic *topic;
    pw_topic_options options = PW_INIT(pw_topic_options);
    pw_pool_options pool_options = PW_INIT(pw_pool_options);
    options.max_bytes = 64;
    pool_options.blocks = 4;
    pool_options.block_bytes = 64;
    OK(pw_domain_connect(NULL, &domain));
    OK(pw_topic_open_or_create(domain, "calls/c", &options, &topic));
    OK(pw_publisher_open(topic, &publisher));
    OK(pw_subscriber_open(topic, NULL, &subscriber));
    OK(pw_pool_open_or_create(domain, "calls/c/pool", &pool_options, &pool));
    return 0;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

int calls_measure(int calls, double times[2]) {
    const uint64_t shape[] = {64};
    double start = now();
    for (int n = 0; n < calls; n++) {
        pw_loan *loan;
        pw_sample *sample;
        void *data;
        const void *received;
        OK(pw_publisher_loan(publisher, PW_DTYPE_U8, shape, 1, TIMEOUT, &loan));
        OK(pw_loan_data(loan, &data, NULL));
        *(volatile char *)data = 1;
        OK(pw_loan_publish(loan, TIMEOUT, NULL));
        OK(pw_subscriber_recv(subscriber, TIMEOUT, &sample));
        OK(pw_sample_data(sample, &received, NULL));
        (void)*(const volatile char *)received;
        OK(pw_sample_close(sample));
    }
    times[0] = (now() - start) / calls;
    start = now();
    for (int n = 0; n < calls; n++) {
        pw_block *block;
        OK(pw_pool_alloc(pool, TIMEOUT, &block));
        OK(pw_block_close(block));
    }
    times[1] = (now() - start) / calls;
    return 0;
}
