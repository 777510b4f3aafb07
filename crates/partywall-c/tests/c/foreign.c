/* Objects of two domains are not mixed: a call that gets one of another domain fails, and changes nothing. Only what
   rests on another sample or timeline may be in another domain, because the process itself follows its inputs. */
#include "check.h"

struct side {
    pw_domain *domain;
    pw_topic *topic;
    pw_publisher *publisher;
    pw_subscriber *subscriber;
    pw_queue *queue;
    pw_pool *pool;
    pw_timeline *timeline;
    pw_writer *writer;
    pw_segment *segment;
};

static const uint64_t ONE[] = {1};

static pw_segment *commit(pw_domain *domain) {
    pw_build *build = NULL;
    pw_segment *segment = NULL;
    OK(pw_build_create(domain, "weights", NULL, &build));
    OK(pw_build_tensor(build, "w", PW_DTYPE_U8, ONE, NULL, 1));
    OK(pw_build_allocate(build));
    OK(pw_build_write(build, "w", "x", 1));
    OK(pw_build_commit(build, &segment));
    return segment;
}

/* The same names in each domain. */
static struct side start(const char *socket) {
    struct side side;
    pw_domain_options options = PW_INIT(pw_domain_options);
    options.socket = socket;
    OK(pw_domain_connect(&options, &side.domain));
    pw_topic_options topic = PW_INIT(pw_topic_options);
    topic.max_bytes = 8;
    OK(pw_topic_create(side.domain, "topic", &topic, &side.topic));
    OK(pw_publisher_open(side.topic, &side.publisher));
    OK(pw_subscriber_open(side.topic, NULL, &side.subscriber));
    pw_queue_options queue = PW_INIT(pw_queue_options);
    queue.tasks = 2;
    queue.inputs = 2;
    queue.input_bytes = 8;
    OK(pw_queue_create(side.domain, "queue", &queue, &side.queue));
    pw_pool_options pool = PW_INIT(pw_pool_options);
    pool.blocks = 1;
    pool.block_bytes = 8;
    OK(pw_pool_create(side.domain, "pool", &pool, &side.pool));
    OK(pw_timeline_open(side.domain, "timeline", NULL, &side.timeline));
    OK(pw_writer_open(side.domain, "timeline", NULL, &side.writer));
    side.segment = commit(side.domain);
    return side;
}

static void end(struct side *side) {
    OK(pw_segment_close(side->segment));
    OK(pw_writer_close(side->writer));
    OK(pw_timeline_close(side->timeline));
    OK(pw_pool_close(side->pool));
    OK(pw_queue_close(side->queue));
    OK(pw_subscriber_close(side->subscriber));
    OK(pw_publisher_close(side->publisher));
    OK(pw_topic_close(side->topic));
    OK(pw_domain_close(side->domain));
}

static void mix(struct side *here, struct side *there) {
    /* A sample on which a loan is to rest. */
    pw_sample *sample = NULL;
    pw_loan *loan = NULL;
    OK(pw_publisher_send(there->publisher, PW_DTYPE_U8, ONE, 1, "x", 1, PW_FOREVER, NULL));
    OK(pw_subscriber_recv(there->subscriber, PW_FOREVER, &sample));
    OK(pw_publisher_loan(here->publisher, PW_DTYPE_U8, ONE, 1, PW_FOREVER, &loan));
    OK(pw_loan_rests_on(loan, sample));
    OK(pw_sample_check(sample));
    OK(pw_sample_close(sample));
    OK(pw_loan_publish(loan, PW_FOREVER, NULL));
    OK(pw_subscriber_recv(here->subscriber, PW_FOREVER, &sample));
    OK(pw_sample_check(sample));
    OK(pw_sample_close(sample));

    /* Inputs of a task: of the other domain's queue, and of another object of the same one. */
    pw_block *blocks[2];
    OK(pw_queue_alloc_input(there->queue, PW_FOREVER, &blocks[0]));
    OK(pw_pool_alloc(here->pool, PW_FOREVER, &blocks[1]));
    for (int i = 0; i < 2; i++) {
        pw_task *task = NULL;
        pw_ticket *ticket = NULL;
        OK(pw_task_create("kind", NULL, &task));
        OK(pw_task_input(task, blocks[i]));
        CHECK(pw_queue_submit(here->queue, task, 0, &ticket) != PW_OK && ticket == NULL);
        CHECK(*pw_error_message(pw_last_error()) != 0);
        OK(pw_task_close(task)); /* it is still the caller's */
    }
    pw_queue_info tasks = PW_INIT(pw_queue_info);
    OK(pw_queue_info_get(here->queue, &tasks));
    CHECK(tasks.pending == 0);

    /* A text that names a block of the other domain's pool of that name. */
    pw_block *block = NULL;
    char text[PW_BLOCK_TEXT];
    OK(pw_pool_alloc(there->pool, PW_FOREVER, &block));
    OK(pw_block_offer(block, text, sizeof text, NULL));
    CHECK(pw_pool_accept(here->pool, text, &block) != PW_OK);
    OK(pw_pool_accept(there->pool, text, &block));
    OK(pw_block_close(block));

    OK(pw_writer_rests_on(here->writer, there->timeline));
}

int main(void) {
    struct side one = start(getenv("PARTYWALL_SOCKET"));
    struct side other = start(getenv("PARTYWALL_OTHER_SOCKET"));
    mix(&one, &other);
    mix(&other, &one);
    CHECK(pw_segment_advance(one.segment, other.segment) != PW_OK);
    OK(pw_segment_check(other.segment));
    OK(pw_segment_check(one.segment));
    end(&one);
    end(&other);
    return 0;
}
