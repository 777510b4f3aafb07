/* An open handle of each kind, under the name that parameters have. */
#include "check.h"

static pw_domain *domain;
static pw_build *build;
static pw_segment *segment;
static pw_growth *growth;
static pw_publication *publication;
static pw_descriptors *descriptors;
static pw_pool *pool;
static pw_block *block;
static pw_topic *topic;
static pw_publisher *publisher;
static pw_subscriber *subscriber;
static pw_loan *loan;
static pw_sample *sample;
static pw_queue *queue;
static pw_task *task;
static pw_ticket *ticket;
static pw_claim *claim;
static pw_semaphore *semaphore;
static pw_permit *permit;
static pw_timeline *timeline;
static pw_timeline_event *timeline_event;
static pw_writer *writer;
static pw_watch *watch;
static pw_names *names;
static pw_members *members;
static pw_findings *findings;

static void open_every(void) {
    const uint64_t one[] = {1};
    size_t count = 0;
    int fd = -1;
    OK(pw_domain_connect(NULL, &domain));
    OK(pw_build_create(domain, "segment", NULL, &build));
    OK(pw_build_tensor(build, "name", PW_DTYPE_U8, one, NULL, 1));
    OK(pw_build_allocate(build));
    OK(pw_build_commit(build, &segment));
    OK(pw_build_create(domain, "build", NULL, &build));
    OK(pw_growth_create(&growth));
    OK(pw_publication_create(domain, "publication", NULL, &publication));
    OK(pw_descriptors_open(domain, "segment", PW_FOREVER, &descriptors));

    pw_pool_options blocks = PW_INIT(pw_pool_options);
    blocks.blocks = 1;
    blocks.block_bytes = 8;
    OK(pw_pool_create(domain, "pool", &blocks, &pool));
    OK(pw_pool_alloc(pool, PW_FOREVER, &block));

    pw_topic_options samples = PW_INIT(pw_topic_options);
    samples.max_bytes = 8;
    OK(pw_topic_create(domain, "topic", &samples, &topic));
    OK(pw_publisher_open(topic, &publisher));
    OK(pw_subscriber_open(topic, NULL, &subscriber));
    OK(pw_publisher_send(publisher, PW_DTYPE_U8, one, 1, "x", 1, PW_FOREVER, NULL));
    OK(pw_subscriber_recv(subscriber, PW_FOREVER, &sample));
    OK(pw_publisher_loan(publisher, PW_DTYPE_U8, one, 1, PW_FOREVER, &loan));

    pw_queue_options tasks = PW_INIT(pw_queue_options);
    tasks.tasks = 2;
    OK(pw_queue_create(domain, "queue", &tasks, &queue));
    OK(pw_task_create("kind", NULL, &task));
    OK(pw_queue_submit(queue, task, PW_FOREVER, &ticket));
    OK(pw_queue_claim(queue, PW_FOREVER, &claim));
    OK(pw_task_create("kind", NULL, &task));

    OK(pw_semaphore_open(domain, "semaphore", 1, NULL, &semaphore));
    OK(pw_semaphore_acquire(semaphore, PW_FOREVER, &permit));
    OK(pw_timeline_open(domain, "timeline", NULL, &timeline));
    OK(pw_writer_open(domain, "timeline", NULL, &writer));
    OK(pw_timeline_event_open(timeline, 1, &timeline_event, &fd));
    OK(pw_watch_open(domain, "*", 0, 0, &watch));
    OK(pw_names_open(domain, &names, &count));
    OK(pw_members_open(domain, &members, &count));
    OK(pw_findings_open(NULL, NULL, &findings, &count));
}
