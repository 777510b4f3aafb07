/* Samples go through a topic; each mistake of a caller is found out. */
#include <poll.h>

#include "check.h"

static pw_domain *connect_domain(void) {
    pw_domain *domain = NULL;
    OK(pw_domain_connect(NULL, &domain));
    OK(pw_domain_ping(domain));
    return domain;
}

static void samples(pw_domain *domain) {
    const uint64_t shape[] = {2, 3};
    pw_topic_options options = PW_INIT(pw_topic_options);
    options.dtype = PW_DTYPE_F32;
    options.shape = shape;
    options.rank = 2;
    pw_topic *topic = NULL;
    pw_publisher *publisher = NULL;
    pw_subscriber *subscriber = NULL;
    OK(pw_topic_create(domain, "numbers", &options, &topic));
    OK(pw_publisher_open(topic, &publisher));
    OK(pw_subscriber_open(topic, NULL, &subscriber));
    pw_topic_info about = PW_INIT(pw_topic_info);
    OK(pw_topic_info_get(topic, &about));
    CHECK(about.max_bytes == 24 && about.dtype == PW_DTYPE_F32 && about.publishers == 1 && about.subscribers == 1);

    pw_sample *sample = (pw_sample *)&about;
    OK(pw_subscriber_try_recv(subscriber, &sample));
    CHECK(sample == NULL);
    FAILS(PW_TIMED_OUT, pw_subscriber_recv(subscriber, 1000, &sample));
    int fd = -1;
    OK(pw_subscriber_fd(subscriber, &fd));

    pw_loan *loan = NULL;
    void *data = NULL;
    size_t length = 0;
    OK(pw_publisher_loan(publisher, PW_DTYPE_F32, shape, 2, PW_FOREVER, &loan));
    OK(pw_loan_data(loan, &data, &length));
    CHECK(length == 24);
    for (int i = 0; i < 6; i++) {
        ((float *)data)[i] = (float)i;
    }
    OK(pw_loan_set_header(loan, "header", 6));
    uint64_t sequence = 99;
    OK(pw_loan_publish(loan, PW_FOREVER, &sequence));
    CHECK(sequence == 0);
    FAILS(PW_INVALID_ARGUMENT, pw_loan_publish(loan, PW_FOREVER, NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_loan_close(loan));

    struct pollfd wanted = {.fd = fd, .events = POLLIN};
    CHECK(poll(&wanted, 1, 10000) == 1);
    OK(pw_subscriber_recv(subscriber, PW_FOREVER, &sample));
    pw_sample_info info = PW_INIT(pw_sample_info);
    OK(pw_sample_info_get(sample, &info));
    CHECK(info.rank == 2 && info.shape[0] == 2 && info.shape[1] == 3 && info.bytes == 24 && info.sequence == 0);
    CHECK(info.dtype == PW_DTYPE_F32 && info.age_ns >= 0 && info.missed == 0);
    const void *bytes = NULL;
    OK(pw_sample_data(sample, &bytes, &length));
    CHECK(((const float *)bytes)[5] == 5.0F);
    float last = 0;
    OK(pw_sample_read(sample, 20, &last, sizeof last));
    CHECK(last == 5.0F);
    FAILS(PW_INVALID_ARGUMENT, pw_sample_read(sample, 21, &last, sizeof last));
    char header[16] = {0};
    OK(pw_sample_header(sample, header, sizeof header, &length));
    CHECK(length == 6 && memcmp(header, "header", 7) == 0);
    OK(pw_sample_header(sample, NULL, 0, &length));
    OK(pw_sample_wait(sample, 0));
    OK(pw_sample_check(sample));
    CHECK(pw_sample_device_on(sample, NULL, &bytes, NULL) != PW_OK);
    OK(pw_sample_close(sample));
    FAILS(PW_INVALID_ARGUMENT, pw_sample_close(sample));
    FAILS(PW_INVALID_ARGUMENT, pw_sample_check(sample));

    OK(pw_publisher_send(publisher, PW_DTYPE_F32, shape, 2, (float[6]){0}, 24, 0, &sequence));
    CHECK(sequence == 1);
    OK(pw_publisher_close(publisher));
    OK(pw_subscriber_close(subscriber));
    OK(pw_topic_close(topic));
}

static void mistakes(pw_domain *domain) {
    pw_topic_options options = PW_INIT(pw_topic_options);
    options.max_bytes = 64;
    pw_topic *topic = NULL;
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create(NULL, "x", &options, &topic));
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create(domain, NULL, &options, &topic));
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create(domain, "x", &options, NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create((pw_domain *)&options, "x", &options, &topic));
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create(domain, "\xff\xfe", &options, &topic));
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create(domain, "", &options, &topic));
    static char endless[8192];
    memset(endless, 'n', sizeof endless);
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create(domain, endless, &options, &topic));
    FAILS(PW_NOT_FOUND, pw_topic_open(domain, "absent", NULL, &topic));
    options.device = "gpu:x";
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create(domain, "x", &options, &topic));
    options.device = NULL;
    options.dtype = 4711;
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create(domain, "x", &options, &topic));
    options.dtype = 0;

    /* Structs of other releases. */
    struct {
        pw_topic_options known;
        uint64_t later;
    } newer = {.known = options, .later = 0};
    newer.known.size = sizeof newer;
    OK(pw_topic_create(domain, "newer", &newer.known, &topic));
    OK(pw_topic_close(topic));
    newer.later = 1;
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create(domain, "x", &newer.known, &topic));
    options.size = 3;
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create(domain, "x", &options, &topic));
    options.size = (size_t)-1;
    FAILS(PW_INVALID_ARGUMENT, pw_topic_create(domain, "x", &options, &topic));
    options.size = offsetof(pw_topic_options, shape);
    options.depth = 1u << 31; /* behind the end of the older struct: not read */
    OK(pw_topic_create(domain, "older", &options, &topic));

    pw_publisher *publisher = NULL;
    OK(pw_publisher_open(topic, &publisher));
    pw_loan *loan = NULL;
    const uint64_t huge[] = {UINT64_MAX, UINT64_MAX};
    const uint64_t one[] = {1};
    FAILS(PW_INVALID_ARGUMENT, pw_publisher_loan(publisher, PW_DTYPE_F64, huge, SIZE_MAX, 0, &loan));
    CHECK(pw_publisher_loan(publisher, PW_DTYPE_F64, huge, 2, 0, &loan) != PW_OK);
    FAILS(PW_INVALID_ARGUMENT, pw_publisher_loan(publisher, PW_DTYPE_U8, NULL, 1, 0, &loan));
    FAILS(PW_INVALID_ARGUMENT, pw_publisher_send(publisher, PW_DTYPE_U8, one, 1, NULL, 1, 0, NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_publisher_send(publisher, PW_DTYPE_U8, one, 1, endless, 2, 0, NULL));
    OK(pw_publisher_loan(publisher, PW_DTYPE_U8, one, 1, 0, &loan));
    OK(pw_loan_close(loan));
    OK(pw_loan_close(NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_publisher_close((pw_publisher *)topic));
    OK(pw_publisher_close(publisher));
    OK(pw_topic_close(topic));
}

int main(void) {
    CHECK(pw_last_error() == NULL);
    pw_domain *domain = connect_domain();
    samples(domain);
    mistakes(domain);
    OK(pw_domain_close(domain));
    FAILS(PW_INVALID_ARGUMENT, pw_domain_close(domain));
    return 0;
}
