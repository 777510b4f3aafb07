/* Tensors in the form of DLPack, both ways; each mistake of a caller is found out. */
#include "check.h"
#include "dlpack.h"

static void segments(pw_domain *domain) {
    const uint64_t shape[] = {2, 3};
    pw_build *build = NULL;
    pw_segment *segment = NULL;
    OK(pw_build_create(domain, "weights", NULL, &build));
    OK(pw_build_tensor(build, "w", PW_DTYPE_F32, shape, NULL, 2));
    OK(pw_build_tensor(build, "packed", PW_DTYPE_F4, shape, NULL, 2));
    OK(pw_build_allocate(build));
    OK(pw_build_write(build, "w", (float[]){0, 1, 2, 3, 4, 5}, 24));
    OK(pw_build_commit(build, &segment));
    DLManagedTensorVersioned *managed = NULL;
    FAILS(PW_NOT_FOUND, pw_segment_to_dlpack(segment, "x", &managed));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_to_dlpack(segment, "packed", &managed));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_to_dlpack(segment, NULL, &managed));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_to_dlpack(segment, "w", NULL));
    OK(pw_segment_to_dlpack(segment, "w", &managed));
    OK(pw_segment_close(segment));
    CHECK(managed->version.major == 1 && managed->flags == 1);
    DLTensor *tensor = &managed->dl_tensor;
    CHECK(tensor->ndim == 2 && tensor->shape[1] == 3 && tensor->strides[0] == 3 && tensor->device.device_type == 1);
    CHECK(tensor->dtype.code == 2 && tensor->dtype.bits == 32 && tensor->dtype.lanes == 1);
    CHECK(((float *)tensor->data)[5] == 5); /* the tensor keeps the memory */
    pw_segment *again = NULL;
    OK(pw_segment_open(domain, "weights", NULL, 0, &again));
    OK(pw_segment_close(again));
    managed->deleter(managed);
    FAILS(PW_NOT_FOUND, pw_segment_open(domain, "weights", NULL, 0, &again)); /* its committer let go */
}

static void samples(pw_domain *domain) {
    int64_t three = 3;
    float values[] = {1, 2, 3};
    const uint64_t shape[] = {3};
    pw_topic_options options = PW_INIT(pw_topic_options);
    options.max_bytes = 64;
    pw_topic *topic = NULL;
    pw_publisher *publisher = NULL;
    pw_subscriber *subscriber = NULL;
    OK(pw_topic_create(domain, "numbers", &options, &topic));
    OK(pw_publisher_open(topic, &publisher));
    OK(pw_subscriber_open(topic, NULL, &subscriber));
    pw_loan *loan = NULL;
    OK(pw_publisher_loan(publisher, PW_DTYPE_F32, shape, 1, 0, &loan));
    DLManagedTensorVersioned given = floats(values, 1, &three);
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack(loan, NULL, NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack((pw_loan *)topic, &given, NULL));
    given.version.major = 2;
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack(loan, &given, NULL));
    given = floats(values, 4, &three);
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack(loan, &given, NULL));
    given = floats(values, 1, &three);
    given.dl_tensor.dtype.bits = 24;
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack(loan, &given, NULL));
    given.dl_tensor.dtype.bits = 64;
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack(loan, &given, NULL));
    given = floats(values, 1, &three);
    given.dl_tensor.ndim = -1;
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack(loan, &given, NULL));
    given.dl_tensor.ndim = INT32_MAX;
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack(loan, &given, NULL));
    given = floats(values, 1, NULL);
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack(loan, &given, NULL));
    given = floats(NULL, 1, &three);
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack(loan, &given, NULL));
    given = floats(values, 1, &three);
    int64_t stride = 2;
    given.dl_tensor.strides = &stride;
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack(loan, &given, NULL));
    stride = -1;
    FAILS(PW_INVALID_ARGUMENT, pw_loan_copy_dlpack(loan, &given, NULL));
    stride = 1;
    OK(pw_loan_copy_dlpack(loan, &given, NULL));
    CHECK(deleted == 0);
    OK(pw_loan_publish(loan, PW_FOREVER, NULL));

    pw_sample *sample = NULL;
    DLManagedTensorVersioned *managed = NULL;
    OK(pw_subscriber_recv(subscriber, PW_FOREVER, &sample));
    FAILS(PW_INVALID_ARGUMENT, pw_sample_to_dlpack(sample, NULL, NULL));
    OK(pw_sample_to_dlpack(sample, NULL, &managed));
    FAILS(PW_INVALID_ARGUMENT, pw_sample_close(sample));
    CHECK(managed->flags == 1 && managed->dl_tensor.shape[0] == 3 && ((float *)managed->dl_tensor.data)[2] == 3);
    managed->deleter(managed);
    OK(pw_subscriber_close(subscriber));
    OK(pw_publisher_close(publisher));
    OK(pw_topic_close(topic));
}

static void blocks(pw_domain *domain) {
    const uint64_t shape[] = {2, 2};
    pw_pool_options options = PW_INIT(pw_pool_options);
    options.blocks = 1;
    options.block_bytes = 64;
    pw_pool *pool = NULL;
    pw_block *block = NULL;
    DLManagedTensorVersioned *managed = NULL;
    OK(pw_pool_create(domain, "frames", &options, &pool));
    OK(pw_pool_alloc(pool, 0, &block));
    OK(pw_block_set_tensor(block, PW_DTYPE_I16, shape, 2));
    FAILS(PW_INVALID_ARGUMENT, pw_block_to_dlpack(block, NULL));
    OK(pw_block_to_dlpack(block, &managed));
    FAILS(PW_INVALID_ARGUMENT, pw_block_to_dlpack(block, &managed));
    CHECK(managed->flags == 0 && managed->dl_tensor.ndim == 2 && managed->dl_tensor.dtype.code == 0);
    ((int16_t *)managed->dl_tensor.data)[3] = 7;
    FAILS(PW_TIMED_OUT, pw_pool_alloc(pool, 1000, &block));
    managed->deleter(managed);
    OK(pw_pool_alloc(pool, 0, &block));
    OK(pw_block_close(block));
    OK(pw_pool_close(pool));
}

int main(void) {
    pw_domain *domain = NULL;
    OK(pw_domain_connect(NULL, &domain));
    segments(domain);
    samples(domain);
    blocks(domain);
    OK(pw_domain_close(domain));
    return 0;
}
