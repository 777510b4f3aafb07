/* One thread waits for the samples of several topics with epoll, beside whatever else it waits for.

       epoll               starts two publishers, and receives from both
       epoll publish NAME  one publisher */
#include <partywall/partywall.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>

#include "process.h"

enum { TOPICS = 2, SAMPLES = 50 };
static const char *const NAMES[TOPICS] = {"examples/epoll/left", "examples/epoll/right"};

#define OK(call)                                                                       \
    do {                                                                               \
        if ((call) != PW_OK) {                                                         \
            const pw_error *error = pw_last_error();                                   \
            fprintf(stderr, "%s; %s\n", pw_error_message(error), pw_error_advice(error)); \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

static pw_topic *open_topic(pw_domain *domain, const char *name) {
    pw_topic_options options = PW_INIT(pw_topic_options);
    const uint64_t shape[] = {1};
    options.dtype = PW_DTYPE_I32;
    options.shape = shape;
    options.rank = 1;
    pw_topic *topic = NULL;
    OK(pw_topic_open_or_create(domain, name, &options, &topic));
    return topic;
}

static void publish(pw_domain *domain, const char *name) {
    const uint64_t shape[] = {1};
    pw_topic *topic = open_topic(domain, name);
    pw_publisher *publisher = NULL;
    OK(pw_publisher_open(topic, &publisher));
    OK(pw_publisher_wait_for_subscribers(publisher, 1, PW_FOREVER));
    for (int32_t n = 0; n < SAMPLES; n++) {
        OK(pw_publisher_send(publisher, PW_DTYPE_I32, shape, 1, &n, sizeof n, PW_FOREVER, NULL));
    }
    OK(pw_publisher_close(publisher));
    OK(pw_topic_close(topic));
}

/* Receives what is there. Returns whether the last publisher has left. */
static int receive(pw_subscriber *subscriber, int *received) {
    for (;;) {
        pw_sample *sample = NULL;
        pw_status status = pw_subscriber_try_recv(subscriber, &sample);
        if (status == PW_GONE) {
            return 1;
        }
        OK(status);
        if (sample == NULL) {
            return 0;
        }
        const void *data = NULL;
        OK(pw_sample_data(sample, &data, NULL));
        if (*(const int32_t *)data != (*received)++) {
            fprintf(stderr, "a sample is missing\n");
            exit(1);
        }
        OK(pw_sample_close(sample));
    }
}

int main(int count, char **arguments) {
    int publishes = count > 2 && strcmp(arguments[1], "publish") == 0;
    pid_t publishers[TOPICS] = {0};
    for (int n = 0; n < TOPICS && !publishes; n++) {
        publishers[n] = start("publish", NAMES[n]);
    }
    pw_domain *domain = NULL;
    OK(pw_domain_connect(NULL, &domain));
    if (publishes) {
        publish(domain, arguments[2]);
        OK(pw_domain_close(domain));
        return 0;
    }

    pw_topic *topics[TOPICS] = {0};
    pw_subscriber *subscribers[TOPICS] = {0};
    int received[TOPICS] = {0};
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    pw_subscriber_options until_idle = PW_INIT(pw_subscriber_options);
    until_idle.until_idle = 1;
    for (uint32_t n = 0; n < TOPICS; n++) {
        struct epoll_event wanted = {.events = EPOLLIN, .data = {.u32 = n}};
        int fd = -1;
        topics[n] = open_topic(domain, NAMES[n]);
        OK(pw_subscriber_open(topics[n], &until_idle, &subscribers[n]));
        OK(pw_subscriber_fd(subscribers[n], &fd));
        epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &wanted);
    }
    for (int open = TOPICS; open > 0;) {
        struct epoll_event event;
        if (epoll_wait(epoll, &event, 1, -1) == 1 && receive(subscribers[event.data.u32], &received[event.data.u32])) {
            /* Closing the subscriber closes its descriptor, which thereby leaves the epoll. */
            OK(pw_subscriber_close(subscribers[event.data.u32]));
            open--;
        }
    }
    close(epoll);
    int failed = 0;
    for (int n = 0; n < TOPICS; n++) {
        printf("%s: %d samples\n", NAMES[n], received[n]);
        failed |= received[n] != SAMPLES || !succeeded(publishers[n]);
        OK(pw_topic_close(topics[n]));
    }
    OK(pw_domain_close(domain));
    return failed;
}
