/* The roles of processes that are killed or stopped at each crash point: `crash ROLE NAME`. tests/kills.rs plays the
   processes that go on. */
#include "check.h"

/* Of examples/crash_points.rs. */
extern void pw_crash_arm(void);
extern void pw_crash_disarm(void);
extern void pw_crash_point(const char *name);

static const uint64_t ONE[] = {1};

/* Publishes 100, 101, 102. */
static void publish(pw_domain *domain, const char *name) {
    pw_topic *topic = NULL;
    pw_publisher *publisher = NULL;
    OK(pw_topic_open(domain, name, NULL, &topic));
    pw_crash_arm();
    OK(pw_publisher_open(topic, &publisher));
    for (uint64_t value = 100; value < 103; value++) {
        pw_loan *loan = NULL;
        void *data = NULL;
        OK(pw_publisher_loan(publisher, PW_DTYPE_U64, ONE, 1, PW_FOREVER, &loan));
        OK(pw_loan_data(loan, &data, NULL));
        memcpy(data, &value, sizeof value);
        OK(pw_loan_set_header(loan, &value, sizeof value));
        pw_crash_point("c: loan filled, not published");
        OK(pw_loan_publish(loan, PW_FOREVER, NULL));
    }
    OK(pw_publisher_close(publisher));
    pw_crash_disarm();
    OK(pw_topic_close(topic));
}

/* Receives what is in the ring, and holds two samples at a time. */
static void receive(pw_domain *domain, const char *name) {
    pw_topic *topic = NULL;
    pw_subscriber *subscriber = NULL;
    pw_sample *held = NULL;
    OK(pw_topic_open(domain, name, NULL, &topic));
    pw_subscriber_options options = PW_INIT(pw_subscriber_options);
    options.policy = PW_DROP_OLDEST;
    options.has_history = 1;
    options.history = 3;
    pw_crash_arm();
    OK(pw_subscriber_open(topic, &options, &subscriber));
    for (int i = 0; i < 3; i++) {
        pw_sample *sample = NULL;
        OK(pw_subscriber_recv(subscriber, PW_FOREVER, &sample));
        uint64_t value = 0;
        uint64_t header = 0;
        OK(pw_sample_read(sample, 0, &value, sizeof value));
        size_t length = 0;
        OK(pw_sample_header(sample, &header, sizeof header, &length));
        CHECK(length == sizeof header && value == header);
        pw_crash_point("c: sample held");
        OK(pw_sample_close(held));
        held = sample;
    }
    OK(pw_sample_close(held));
    OK(pw_subscriber_close(subscriber));
    pw_crash_disarm();
    OK(pw_topic_close(topic));
}

/* Commits a new version, whose two tensors agree. */
static void build(pw_domain *domain, const char *name) {
    const uint64_t shape[] = {512};
    static uint64_t values[512];
    for (int i = 0; i < 512; i++) {
        values[i] = 2;
    }
    pw_segment_options options = PW_INIT(pw_segment_options);
    options.is_mutable = 1;
    options.kept = 1;
    options.reserve = 1 << 16;
    pw_build *build = NULL;
    pw_segment *segment = NULL;
    pw_growth *growth = NULL;
    pw_crash_arm();
    OK(pw_build_create(domain, name, &options, &build));
    OK(pw_build_tensor(build, "a", PW_DTYPE_U64, shape, NULL, 1));
    OK(pw_build_tensor(build, "b", PW_DTYPE_U64, shape, NULL, 1));
    pw_crash_point("c: declared, not allocated");
    OK(pw_build_allocate(build));
    pw_crash_point("c: allocated, not written");
    OK(pw_build_write(build, "a", values, sizeof values));
    pw_crash_point("c: half written");
    OK(pw_build_write(build, "b", values, sizeof values));
    pw_crash_point("c: written, not committed");
    OK(pw_build_commit(build, &segment));
    pw_crash_point("c: committed, open");
    OK(pw_growth_create(&growth));
    OK(pw_growth_tensor(growth, "c", PW_DTYPE_U64, shape, 1));
    pw_crash_point("c: growth declared");
    OK(pw_growth_commit(growth, segment));
    pw_crash_point("c: grown");
    OK(pw_segment_close(segment));
    pw_crash_point("c: closed");
    pw_crash_disarm();
}

/* Completes two tasks: the output is the input plus one. */
static void work(pw_domain *domain, const char *name) {
    pw_queue *queue = NULL;
    OK(pw_queue_open(domain, name, NULL, &queue));
    pw_crash_arm();
    for (int i = 0; i < 2; i++) {
        pw_claim *claim = NULL;
        uint64_t value = 0;
        OK(pw_queue_try_claim(queue, &claim));
        if (claim == NULL) {
            break;
        }
        OK(pw_claim_input_read(claim, 0, 0, &value, sizeof value));
        value++;
        OK(pw_claim_output_write(claim, &value, sizeof value));
        pw_crash_point("c: output written, not completed");
        /* It was stopped for a while, and the task is another worker's. */
        pw_status completed = pw_claim_complete(claim);
        CHECK(completed == PW_OK || completed == PW_GONE);
        if (completed != PW_OK) {
            OK(pw_claim_close(claim));
        }
    }
    pw_crash_disarm();
    OK(pw_queue_close(queue));
}

/* Submits two tasks, and cancels each or takes its result: a worker may have been faster. */
static void submit(pw_domain *domain, const char *name) {
    pw_queue *queue = NULL;
    pw_ticket *tickets[2] = {NULL, NULL};
    OK(pw_queue_open(domain, name, NULL, &queue));
    pw_crash_arm();
    for (uint64_t i = 0; i < 2; i++) {
        pw_block *input = NULL;
        pw_task *task = NULL;
        OK(pw_queue_alloc_input(queue, PW_FOREVER, &input));
        OK(pw_block_write(input, &i, sizeof i));
        pw_crash_point("c: input written, not submitted");
        pw_task_options options = PW_INIT(pw_task_options);
        options.output_bytes = 8;
        options.cancel_with_submitter = 1;
        OK(pw_task_create("add", &options, &task));
        OK(pw_task_input(task, input));
        OK(pw_queue_submit(queue, task, PW_FOREVER, &tickets[i]));
    }
    for (int i = 0; i < 2; i++) {
        uint32_t attempt = 0;
        while (attempt == 0 && pw_ticket_cancel(tickets[i]) != PW_OK) {
            pw_block *output = NULL;
            OK(pw_ticket_try_take(tickets[i], &output, &attempt));
            OK(pw_block_close(output));
        }
        OK(pw_ticket_close(tickets[i]));
    }
    pw_crash_disarm();
    OK(pw_queue_close(queue));
}

/* Takes the only permit, twice. */
static void acquire(pw_domain *domain, const char *name) {
    pw_semaphore *semaphore = NULL;
    OK(pw_semaphore_open(domain, name, 1, NULL, &semaphore));
    pw_crash_arm();
    for (int i = 0; i < 2; i++) {
        pw_permit *permit = NULL;
        OK(pw_semaphore_acquire(semaphore, PW_FOREVER, &permit));
        pw_crash_point("c: permit held");
        OK(pw_permit_close(permit));
    }
    pw_crash_disarm();
    OK(pw_semaphore_close(semaphore));
}

/* Signals 1 and 2, and ends the timeline. */
static void signal_values(pw_domain *domain, const char *name) {
    pw_writer *writer = NULL;
    pw_crash_arm();
    OK(pw_writer_open(domain, name, NULL, &writer));
    OK(pw_writer_signal(writer, 1));
    pw_crash_point("c: one signalled");
    OK(pw_writer_signal(writer, 2));
    OK(pw_writer_close(writer));
    pw_crash_disarm();
}

/* Offers a block to itself. */
static void allocate(pw_domain *domain, const char *name) {
    pw_pool *pool = NULL;
    pw_block *block = NULL;
    char text[PW_BLOCK_TEXT];
    OK(pw_pool_open(domain, name, NULL, &pool));
    pw_crash_arm();
    OK(pw_pool_alloc(pool, PW_FOREVER, &block));
    pw_crash_point("c: block held");
    OK(pw_block_offer(block, text, sizeof text, NULL));
    pw_crash_point("c: block offered");
    OK(pw_pool_accept(pool, text, &block));
    OK(pw_block_close(block));
    pw_crash_disarm();
    OK(pw_pool_close(pool));
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*play)(pw_domain *, const char *);
    } roles[] = {
        {"publish", publish}, {"receive", receive}, {"build", build},          {"work", work},
        {"submit", submit},   {"acquire", acquire}, {"signal", signal_values}, {"allocate", allocate},
    };
    pw_domain *domain = NULL;
    CHECK(count == 3);
    OK(pw_domain_connect(NULL, &domain));
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) {
        if (strcmp(roles[i].name, arguments[1]) == 0) {
            roles[i].play(domain, arguments[2]);
            OK(pw_domain_close(domain));
            return 0;
        }
    }
    fprintf(stderr, "no role is called %s\n", arguments[1]);
    return 1;
}
