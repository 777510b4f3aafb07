/* Segments: built, written, opened, read, replaced, grown; each mistake of a caller is found out. */
#include "check.h"

#define SIZE(array) (sizeof(array) / sizeof *(array))

static void build(pw_domain *domain) {
    const uint64_t shape[] = {2, 3};
    const uint64_t column[] = {2};
    const uint64_t stride[] = {3};
    pw_segment_options options = PW_INIT(pw_segment_options);
    options.kept = 1;
    pw_build *build = NULL;
    OK(pw_build_create(domain, "weights", &options, &build));
    OK(pw_build_tensor(build, "w", PW_DTYPE_F32, shape, NULL, 2));
    OK(pw_build_tensor(build, "b", PW_DTYPE_U8, shape, NULL, 1));
    OK(pw_build_tensor(build, "strided", PW_DTYPE_U8, column, stride, 1));
    OK(pw_build_view(build, "column", PW_DTYPE_F32, column, stride, 1, "w", 4));
    OK(pw_build_metadata(build, "format", "pt"));
    static char config[100001];
    memset(config, 'c', sizeof config - 1);
    OK(pw_build_metadata(build, "config", config));
    FAILS(PW_INVALID_ARGUMENT, pw_build_metadata(build, config, "key"));
    FAILS(PW_INVALID_ARGUMENT, pw_build_metadata(build, "config", NULL));
    void *data = NULL;
    size_t length = 0;
    FAILS(PW_INVALID_ARGUMENT, pw_build_data(build, "w", &data, &length));
    pw_segment *segment = NULL;
    FAILS(PW_INVALID_ARGUMENT, pw_build_commit(build, &segment));
    OK(pw_build_allocate(build));
    OK(pw_build_allocate(build));
    FAILS(PW_INVALID_ARGUMENT, pw_build_metadata(build, "too", "late"));
    OK(pw_build_data(build, "w", &data, &length));
    CHECK(length == 24);
    for (int i = 0; i < 6; i++) {
        ((float *)data)[i] = (float)i;
    }
    OK(pw_build_write(build, "b", "ab", 2));
    FAILS(PW_INVALID_ARGUMENT, pw_build_write(build, "b", "abc", 3));
    FAILS(PW_INVALID_ARGUMENT, pw_build_write(build, "b", NULL, 2));
    FAILS(PW_NOT_FOUND, pw_build_write(build, "c", "ab", 2));
    CHECK(pw_build_device(build, "w", &data, &length) != PW_OK);
    FAILS(PW_INVALID_ARGUMENT, pw_build_commit(build, NULL));
    OK(pw_build_commit(build, &segment));
    FAILS(PW_INVALID_ARGUMENT, pw_build_commit(build, &segment));
    FAILS(PW_INVALID_ARGUMENT, pw_build_close(build));
    OK(pw_segment_close(segment));
}

static void reopen(pw_domain *domain) {
    pw_segment *segment = NULL;
    FAILS(PW_NOT_FOUND, pw_segment_open(domain, "absent", NULL, 0, &segment));
    FAILS(PW_TIMED_OUT, pw_segment_open(domain, "absent", NULL, 1000, &segment));
    OK(pw_segment_open(domain, "weights", NULL, PW_FOREVER, &segment));
    pw_segment_info about = PW_INIT(pw_segment_info);
    OK(pw_segment_info_get(segment, &about));
    CHECK(strcmp(about.kind, "host") == 0 && strcmp(about.device, "host") == 0 && about.version == 1);
    CHECK(about.tensors == 4 && about.metadata == 2 && about.is_kept && !about.is_writable && !about.is_mutable);

    const char *names[] = {"w", "b", "strided", "column"};
    pw_tensor_info tensor = PW_INIT(pw_tensor_info);
    for (size_t i = 0; i < SIZE(names); i++) {
        OK(pw_segment_tensor_at(segment, i, &tensor));
        CHECK(strcmp(tensor.name, names[i]) == 0);
    }
    FAILS(PW_INVALID_ARGUMENT, pw_segment_tensor_at(segment, SIZE(names), &tensor));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_tensor_at(segment, SIZE_MAX, &tensor));
    OK(pw_segment_tensor_get(segment, "w", &tensor));
    CHECK(tensor.rank == 2 && tensor.shape[0] == 2 && tensor.shape[1] == 3 && tensor.strides[0] == 3);
    CHECK(tensor.dtype == PW_DTYPE_F32 && tensor.bytes == 24);
    pw_tensor_info again = PW_INIT(pw_tensor_info);
    OK(pw_segment_tensor_get(segment, "w", &again));
    CHECK(again.shape == tensor.shape && again.name == tensor.name);
    FAILS(PW_NOT_FOUND, pw_segment_tensor_get(segment, "x", &tensor));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_tensor_get(segment, NULL, &tensor));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_tensor_get(segment, "\xff", &tensor));
    tensor.size = 2;
    FAILS(PW_INVALID_ARGUMENT, pw_segment_tensor_get(segment, "w", &tensor));
    tensor.size = offsetof(pw_tensor_info, rank);
    tensor.rank = 77;
    OK(pw_segment_tensor_get(segment, "b", &tensor));
    CHECK(tensor.rank == 77 && tensor.shape[0] == 2);

    void *data = NULL;
    size_t length = 0;
    OK(pw_segment_data(segment, "w", &data, &length));
    CHECK(length == 24 && ((float *)data)[5] == 5.0F);
    FAILS(PW_INVALID_ARGUMENT, pw_segment_data(segment, "w", NULL, &length));
    CHECK(pw_segment_device(segment, "w", &data, &length) == PW_MISMATCH);
    float last = 0;
    OK(pw_segment_read(segment, "w", 20, &last, sizeof last));
    CHECK(last == 5.0F);
    FAILS(PW_INVALID_ARGUMENT, pw_segment_read(segment, "w", 21, &last, sizeof last));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_read(segment, "w", UINT64_MAX, &last, sizeof last));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_read(segment, "w", 0, &last, SIZE_MAX));
    FAILS(PW_DENIED, pw_segment_write(segment, "w", 0, &last, sizeof last));
    const char *key = NULL;
    const char *value = NULL;
    OK(pw_segment_metadata_get(segment, "format", &value));
    CHECK(strcmp(value, "pt") == 0);
    OK(pw_segment_metadata_get(segment, "config", &value));
    CHECK(strlen(value) == 100000);
    OK(pw_segment_metadata_get(segment, "absent", &value));
    CHECK(value == NULL);
    for (size_t i = 0; i < 2; i++) {
        OK(pw_segment_metadata_at(segment, i, &key, &value));
        CHECK(strlen(value) == (strcmp(key, "format") == 0 ? 2 : 100000));
    }
    FAILS(PW_INVALID_ARGUMENT, pw_segment_metadata_at(segment, 2, &key, &value));
    OK(pw_segment_check(segment));

    /* Another version. */
    pw_segment *newer = (pw_segment *)&about;
    OK(pw_segment_newer(segment, 0, 0, &newer));
    CHECK(newer == NULL);
    build(domain);
    OK(pw_segment_newer(segment, 0, PW_FOREVER, &newer));
    OK(pw_segment_info_get(newer, &about));
    CHECK(about.version == 2);
    FAILS(PW_INVALID_ARGUMENT, pw_segment_advance(segment, segment));
    CHECK(pw_segment_advance(segment, newer) == PW_MISMATCH); /* host memory does not advance */
    OK(pw_segment_info_get(newer, &about));
    CHECK(about.version == 2 && strcmp(about.kind, "host") == 0); /* still the caller's */
    pw_ipc_handle ipc = PW_INIT(pw_ipc_handle);
    FAILS(PW_MISMATCH, pw_segment_ipc_handle(segment, "w", &ipc));
    OK(pw_segment_close(newer));
    pw_open_options first = PW_INIT(pw_open_options);
    first.version = 1;
    OK(pw_segment_open(domain, "weights", &first, 0, &newer));
    OK(pw_segment_info_get(newer, &about));
    CHECK(about.version == 1);
    OK(pw_segment_close(newer));
    first.version = 0;
    first.read_write = 1;
    FAILS(PW_DENIED, pw_segment_open(domain, "weights", &first, 0, &newer));
    first.device = "host";
    FAILS(PW_INVALID_ARGUMENT, pw_segment_open(domain, "weights", &first, 0, &newer));
    OK(pw_segment_close(segment));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_check(segment));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_close(segment));
    OK(pw_segment_close(NULL));

    pw_segment_options if_absent = PW_INIT(pw_segment_options);
    if_absent.if_absent = 1;
    pw_build *build = NULL;
    OK(pw_build_create(domain, "weights", &if_absent, &build));
    OK(pw_build_allocate(build));
    FAILS(PW_DENIED, pw_build_commit(build, &segment));
    OK(pw_domain_remove(domain, "weights"));
    OK(pw_build_commit(build, &segment));
    OK(pw_segment_close(segment));
    FAILS(PW_NOT_FOUND, pw_domain_remove(domain, "weights"));
}

static void grow(pw_domain *domain) {
    const uint64_t shape[] = {2, 4};
    pw_segment_options options = PW_INIT(pw_segment_options);
    options.is_mutable = 1;
    options.reserve = 1u << 20;
    pw_build *build = NULL;
    pw_segment *log = NULL;
    pw_segment *reader = NULL;
    OK(pw_build_create(domain, "log", &options, &build));
    OK(pw_build_tensor(build, "rows", PW_DTYPE_U32, shape, NULL, 2));
    OK(pw_build_allocate(build));
    OK(pw_build_commit(build, &log));
    pw_open_options writing = PW_INIT(pw_open_options);
    writing.read_write = 1;
    OK(pw_segment_open(domain, "log", &writing, 0, &reader));
    uint32_t grown = 99;
    OK(pw_segment_refresh(reader, 0, &grown));
    CHECK(grown == PW_UNCHANGED);
    FAILS(PW_TIMED_OUT, pw_segment_refresh(reader, 1000, &grown));
    pw_tensor_info before = PW_INIT(pw_tensor_info);
    OK(pw_segment_tensor_get(reader, "rows", &before));

    pw_growth *growth = NULL;
    OK(pw_growth_create(&growth));
    OK(pw_growth_extend(growth, "rows", 1000));
    OK(pw_growth_tensor(growth, "more", PW_DTYPE_U8, shape, 1));
    OK(pw_growth_spare(growth, 4096));
    FAILS(PW_DENIED, pw_growth_commit(growth, reader)); /* it has not committed the version */
    OK(pw_growth_commit(growth, log));
    FAILS(PW_INVALID_ARGUMENT, pw_growth_commit(growth, log));
    OK(pw_segment_refresh(reader, PW_FOREVER, &grown));
    CHECK(grown == PW_GROWN);
    pw_tensor_info after = PW_INIT(pw_tensor_info);
    OK(pw_segment_tensor_get(reader, "rows", &after));
    CHECK(after.shape[0] == 1000 && before.shape[0] == 2);
    OK(pw_segment_tensor_at(reader, 1, &after));
    CHECK(strcmp(after.name, "more") == 0);
    OK(pw_segment_write(reader, "rows", 15984, &(uint32_t){7}, 4));
    uint32_t seen = 0;
    OK(pw_segment_read(log, "rows", 15984, &seen, 4));
    CHECK(seen == 7);

    OK(pw_growth_create(&growth));
    OK(pw_growth_extend(growth, "rows", UINT64_MAX));
    CHECK(pw_growth_commit(growth, log) != PW_OK);
    FAILS(PW_INVALID_ARGUMENT, pw_growth_tensor(growth, "x", 0, shape, 1));
    FAILS(PW_INVALID_ARGUMENT, pw_growth_tensor(growth, "x", PW_DTYPE_U8, NULL, 1));
    FAILS(PW_INVALID_ARGUMENT, pw_growth_commit(growth, (pw_segment *)growth));
    OK(pw_growth_close(growth));
    OK(pw_segment_close(reader));
    OK(pw_segment_close(log));
}

static void mistakes(pw_domain *domain) {
    const uint64_t huge[] = {UINT64_MAX, UINT64_MAX};
    pw_build *build = NULL;
    pw_segment *segment = NULL;
    FAILS(PW_INVALID_ARGUMENT, pw_build_create(NULL, "x", NULL, &build));
    FAILS(PW_INVALID_ARGUMENT, pw_build_create(domain, NULL, NULL, &build));
    FAILS(PW_INVALID_ARGUMENT, pw_build_create(domain, "x", NULL, NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_build_create(domain, "\xff", NULL, &build));
    struct {
        pw_segment_options known;
        uint64_t later;
    } newer = {.known = {.size = sizeof newer}, .later = 1};
    FAILS(PW_INVALID_ARGUMENT, pw_build_create(domain, "x", &newer.known, &build));
    newer.known.size = 7;
    FAILS(PW_INVALID_ARGUMENT, pw_build_create(domain, "x", &newer.known, &build));
    newer.known.size = offsetof(pw_segment_options, reserve);
    newer.known.kept = 1; /* behind the end of the older struct: not read */
    newer.known.until_unused = 1;
    OK(pw_build_create(domain, "x", &newer.known, &build));
    FAILS(PW_INVALID_ARGUMENT, pw_build_tensor(build, "a", PW_DTYPE_U8, NULL, NULL, 1));
    FAILS(PW_INVALID_ARGUMENT, pw_build_tensor(build, "a", PW_DTYPE_U8, huge, NULL, SIZE_MAX));
    FAILS(PW_INVALID_ARGUMENT, pw_build_tensor(build, "a", 4711, huge, NULL, 2));
    FAILS(PW_INVALID_ARGUMENT, pw_build_tensor((pw_build *)domain, "a", PW_DTYPE_U8, huge, NULL, 2));
    OK(pw_build_tensor(build, "a", PW_DTYPE_U8, huge, NULL, 2));
    FAILS(PW_INVALID_ARGUMENT, pw_build_allocate(build));
    FAILS(PW_INVALID_ARGUMENT, pw_build_allocate(build));
    FAILS(PW_INVALID_ARGUMENT, pw_build_tensor(build, "a", PW_DTYPE_U8, huge, NULL, 0));
    OK(pw_build_close(build));
    newer.known.size = sizeof newer.known;
    OK(pw_build_create(domain, "x", &newer.known, &build));
    FAILS(PW_INVALID_ARGUMENT, pw_build_allocate(build)); /* a name has one end */
    OK(pw_build_close(build));
    OK(pw_build_close(NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_close((pw_segment *)domain));
    FAILS(PW_INVALID_ARGUMENT, pw_segment_put_file(domain, "x", "/dev/null", &(pw_segment_options){
        .size = sizeof(pw_segment_options), .chunk_bytes = 1}, &segment));
    CHECK(pw_segment_put_file(domain, "x", "/absent.safetensors", NULL, &segment) == PW_SYSTEM);
}

/* The same memory as file descriptors, and a file as a segment. */
static void others(pw_domain *domain) {
    char path[] = "/tmp/pw-c-XXXXXX.npy";
    int file = mkstemps(path, 4);
    CHECK(file >= 0);
    const char header[] = "\x93NUMPY\x01\x00\x76\x00{'descr': '<u4', 'fortran_order': False, 'shape': (2,)}";
    FILE *out = fdopen(file, "wb");
    CHECK(fwrite(header, 1, 10, out) == 10);
    CHECK(fprintf(out, "%-117s\n", header + 10) == 118);
    CHECK(fwrite((uint32_t[]){3, 4}, 4, 2, out) == 2 && fclose(out) == 0);
    pw_segment *segment = NULL;
    pw_segment_options options = PW_INIT(pw_segment_options);
    OK(pw_segment_put_file(domain, "file", path, &options, &segment));
    remove(path);
    pw_tensor_info tensor = PW_INIT(pw_tensor_info);
    OK(pw_segment_tensor_at(segment, 0, &tensor));
    uint32_t numbers[2] = {0};
    OK(pw_segment_read(segment, tensor.name, 0, numbers, sizeof numbers));
    CHECK(numbers[0] == 3 && numbers[1] == 4);

    pw_descriptors *descriptors = NULL;
    FAILS(PW_NOT_FOUND, pw_descriptors_open(domain, "absent", 0, &descriptors));
    OK(pw_descriptors_open(domain, "file", 0, &descriptors));
    pw_descriptors_info about = PW_INIT(pw_descriptors_info);
    OK(pw_descriptors_info_get(descriptors, &about));
    CHECK(strcmp(about.kind, "host") == 0 && about.chunks == 1 && !about.is_mutable && about.version == 1);
    int fd = -1;
    uint64_t bytes = 0;
    OK(pw_descriptors_chunk(descriptors, 0, &fd, &bytes));
    FAILS(PW_INVALID_ARGUMENT, pw_descriptors_chunk(descriptors, 1, &fd, &bytes));
    size_t chunk = 9;
    uint64_t offset = 9;
    uint64_t length = 0;
    OK(pw_descriptors_tensor(descriptors, tensor.name, &chunk, &offset, &length));
    CHECK(chunk == 0 && length == 8 && offset + length <= bytes);
    CHECK(pread(fd, numbers, 8, (off_t)offset) == 8 && numbers[1] == 4);
    FAILS(PW_INVALID_ARGUMENT, pw_descriptors_tensor(descriptors, "absent", &chunk, &offset, &length));
    OK(pw_descriptors_close(descriptors));
    FAILS(PW_INVALID_ARGUMENT, pw_descriptors_close(descriptors));
    FAILS(PW_INVALID_ARGUMENT, pw_descriptors_chunk((pw_descriptors *)segment, 0, &fd, &bytes));
    OK(pw_segment_close(segment));
}

int main(void) {
    pw_domain *domain = NULL;
    OK(pw_domain_connect(NULL, &domain));
    build(domain);
    reopen(domain);
    grow(domain);
    mistakes(domain);
    others(domain);
    OK(pw_domain_close(domain));
    return 0;
}
