/* A queue of square roots; each mistake of a caller is found out. */
#include <math.h>
#include <poll.h>

#include "check.h"

static pw_queue *create(pw_domain *domain) {
    pw_queue_options options = PW_INIT(pw_queue_options);
    options.tasks = 4;
    options.inputs = 4;
    options.input_bytes = 64;
    options.outputs = 4;
    options.output_bytes = 64;
    pw_queue *queue = NULL;
    FAILS(PW_NOT_FOUND, pw_queue_open(domain, "roots", NULL, &queue));
    OK(pw_queue_create(domain, "roots", &options, &queue));
    pw_queue *again = NULL;
    FAILS(PW_DENIED, pw_queue_create(domain, "roots", &options, &again));
    OK(pw_queue_open_or_create(domain, "roots", &options, &again));
    OK(pw_queue_close(again));
    options.size = 3;
    FAILS(PW_INVALID_ARGUMENT, pw_queue_open(domain, "roots", &options, &again));
    return queue;
}

static pw_ticket *submit(pw_queue *queue) {
    const uint64_t shape[] = {4};
    pw_block *input = NULL;
    OK(pw_queue_alloc_input(queue, 0, &input));
    OK(pw_block_set_tensor(input, PW_DTYPE_F32, shape, 1));
    OK(pw_block_write(input, (float[]){1, 4, 9, 16}, 16));
    pw_task_options options = PW_INIT(pw_task_options);
    options.arguments = "fast";
    options.arguments_length = 4;
    options.output_dtype = PW_DTYPE_F32;
    options.output_shape = shape;
    options.output_rank = 1;
    options.max_attempts = 2;
    pw_task *task = NULL;
    pw_ticket *ticket = NULL;
    OK(pw_task_create("sqrt", &options, &task));
    OK(pw_task_input(task, input));
    FAILS(PW_INVALID_ARGUMENT, pw_task_input(task, input));
    FAILS(PW_INVALID_ARGUMENT, pw_block_close(input));
    OK(pw_queue_submit(queue, task, PW_FOREVER, &ticket));
    FAILS(PW_INVALID_ARGUMENT, pw_queue_submit(queue, task, 0, &ticket));
    return ticket;
}

static void work(pw_queue *queue) {
    pw_claim *claim = NULL;
    OK(pw_queue_claim(queue, PW_FOREVER, &claim));
    pw_claim_info about = PW_INIT(pw_claim_info);
    OK(pw_claim_info_get(claim, &about));
    CHECK(strcmp(about.kind, "sqrt") == 0 && about.inputs == 1 && about.attempt == 1 && about.max_attempts == 2);
    CHECK(about.arguments_length == 4 && memcmp(about.arguments, "fast", 4) == 0);
    CHECK(about.output_bytes == 16 && about.is_claimed);
    OK(pw_claim_wait_inputs(claim, PW_FOREVER));
    pw_input_info input = PW_INIT(pw_input_info);
    OK(pw_claim_input_get(claim, 0, &input));
    CHECK(input.rank == 1 && input.shape[0] == 4 && input.dtype == PW_DTYPE_F32 && input.bytes == 16);
    FAILS(PW_INVALID_ARGUMENT, pw_claim_input_get(claim, 1, &input));
    const void *numbers = NULL;
    void *roots = NULL;
    size_t length = 0;
    OK(pw_claim_input_data(claim, 0, &numbers, &length));
    CHECK(length == 16);
    float last = 0;
    OK(pw_claim_input_read(claim, 0, 12, &last, 4));
    CHECK(last == 16);
    FAILS(PW_INVALID_ARGUMENT, pw_claim_input_read(claim, 0, 13, &last, 4));
    FAILS(PW_INVALID_ARGUMENT, pw_claim_input_read(claim, SIZE_MAX, 0, &last, 4));
    FAILS(PW_MISMATCH, pw_claim_input_device(claim, 0, &numbers, NULL));
    OK(pw_claim_output_data(claim, &roots, &length));
    CHECK(length == 16);
    for (int i = 0; i < 4; i++) {
        ((float *)roots)[i] = sqrtf(((const float *)numbers)[i]);
    }
    FAILS(PW_INVALID_ARGUMENT, pw_claim_output_write(claim, roots, 17));
    FAILS(PW_MISMATCH, pw_claim_output_device(claim, &roots, NULL));
    FAILS(PW_MISMATCH, pw_claim_output_set_tensor(claim, PW_DTYPE_F32, (uint64_t[]){5}, 1));
    OK(pw_claim_output_set_tensor(claim, PW_DTYPE_F32, (uint64_t[]){2, 2}, 2));
    OK(pw_claim_extend(claim, 1000000));
    CHECK(pw_claim_complete_on(claim, NULL) != PW_OK); /* no GPU: still claimed */
    OK(pw_claim_complete(claim));
    FAILS(PW_INVALID_ARGUMENT, pw_claim_complete(claim));
    FAILS(PW_INVALID_ARGUMENT, pw_claim_info_get(claim, &about));
    OK(pw_queue_try_claim(queue, &claim));
    CHECK(claim == NULL);
    FAILS(PW_TIMED_OUT, pw_queue_claim(queue, 1000, &claim));
}

static void fail_twice(pw_queue *queue) {
    pw_claim *claim = NULL;
    OK(pw_queue_claim(queue, PW_FOREVER, &claim));
    FAILS(PW_INVALID_ARGUMENT, pw_claim_fail(claim, NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_claim_fail(claim, "\xff"));
    OK(pw_claim_fail(claim, "first"));
    OK(pw_queue_claim(queue, PW_FOREVER, &claim));
    OK(pw_claim_fail(claim, "no such number"));
}

int main(void) {
    pw_domain *domain = NULL;
    OK(pw_domain_connect(NULL, &domain));
    pw_queue *queue = create(domain);
    int fd = -1;
    OK(pw_queue_fd(queue, &fd));
    pw_ticket *ticket = submit(queue);
    uint32_t status = 99;
    uint32_t attempt = 99;
    pw_block *output = NULL;
    OK(pw_ticket_status(ticket, &status));
    CHECK(status == PW_TASK_PENDING);
    OK(pw_ticket_try_take(ticket, &output, &attempt));
    CHECK(output == NULL && attempt == 0);
    FAILS(PW_TIMED_OUT, pw_ticket_wait(ticket, 1000, &output, NULL));
    work(queue);
    struct pollfd wanted = {.fd = fd, .events = POLLIN};
    CHECK(poll(&wanted, 1, 10000) == 1);
    OK(pw_queue_fd_clear(queue));
    FAILS(PW_INVALID_ARGUMENT, pw_ticket_wait(ticket, 0, NULL, &attempt));
    OK(pw_ticket_wait(ticket, PW_FOREVER, &output, &attempt));
    CHECK(attempt == 1);
    pw_block_info result = PW_INIT(pw_block_info);
    OK(pw_block_info_get(output, &result));
    CHECK(result.rank == 2 && result.bytes == 16);
    float roots[4] = {0};
    OK(pw_block_read(output, 0, roots, sizeof roots));
    CHECK(roots[0] == 1 && roots[3] == 4);
    OK(pw_block_close(output));
    FAILS(PW_GONE, pw_ticket_wait(ticket, 0, &output, NULL));
    OK(pw_ticket_close(ticket));

    ticket = submit(queue);
    fail_twice(queue);
    FAILS(PW_INVALID_DATA, pw_ticket_wait(ticket, PW_FOREVER, &output, NULL));
    CHECK(strstr(pw_error_message(pw_last_error()), "no such number") != NULL);
    OK(pw_ticket_status(ticket, &status));
    CHECK(status == PW_TASK_DEAD);
    pw_queue_info about = PW_INIT(pw_queue_info);
    OK(pw_queue_info_get(queue, &about));
    CHECK(about.capacity == 4 && about.dead == 1 && about.pending == 0 && about.input_bytes == 64);
    OK(pw_ticket_close(ticket));
    ticket = submit(queue);
    OK(pw_ticket_cancel(ticket));
    FAILS(PW_GONE, pw_ticket_cancel(ticket));
    OK(pw_ticket_close(ticket));
    FAILS(PW_INVALID_ARGUMENT, pw_ticket_close(ticket));

    /* What is refused comes back. */
    pw_task_options options = PW_INIT(pw_task_options);
    options.output_bytes = 65;
    pw_task *task = NULL;
    OK(pw_task_create("sqrt", &options, &task));
    FAILS(PW_MISMATCH, pw_queue_submit(queue, task, 0, &ticket));
    CHECK(pw_queue_submit_on(queue, task, NULL, 0, &ticket) != PW_OK);
    FAILS(PW_INVALID_ARGUMENT, pw_queue_submit(queue, task, 0, NULL));
    OK(pw_task_close(task));
    /* A block of something else. */
    pw_pool_options other = PW_INIT(pw_pool_options);
    other.blocks = 1;
    other.block_bytes = 64;
    pw_pool *pool = NULL;
    pw_block *foreign = NULL;
    OK(pw_pool_create(domain, "other", &other, &pool));
    OK(pw_pool_alloc(pool, 0, &foreign));
    OK(pw_task_create("sqrt", NULL, &task));
    OK(pw_task_input(task, foreign));
    FAILS(PW_MISMATCH, pw_queue_submit(queue, task, 0, &ticket));
    OK(pw_task_close(task));
    OK(pw_pool_alloc(pool, 0, &foreign)); /* it was given back with the task */
    OK(pw_block_close(foreign));
    OK(pw_pool_close(pool));
    options.arguments_length = 1;
    FAILS(PW_INVALID_ARGUMENT, pw_task_create("sqrt", &options, &task));
    options.arguments_length = 0;
    options.max_attempts = 256;
    options.output_bytes = 0;
    OK(pw_task_create("sqrt", &options, &task));
    FAILS(PW_INVALID_ARGUMENT, pw_queue_submit(queue, task, 0, &ticket));
    FAILS(PW_INVALID_ARGUMENT, pw_queue_submit((pw_queue *)task, task, 0, &ticket));
    OK(pw_task_close(task));
    OK(pw_task_close(NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_task_create(NULL, NULL, &task));
    FAILS(PW_INVALID_ARGUMENT, pw_task_create("\xff", NULL, &task));
    OK(pw_queue_check(queue));
    OK(pw_queue_close(queue));
    FAILS(PW_INVALID_ARGUMENT, pw_queue_check(queue));
    OK(pw_domain_close(domain));
    return 0;
}
