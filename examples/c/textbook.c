/* The textbook's producer and consumer: one process fills 262,144 integers, another one checks the pattern in the same
   memory. In the textbook they hand each other a file descriptor through a socket; here the memory has a name.

       textbook [DEVICE]          both: host (the default), cuda:0, a GPU's UUID, auto
       textbook produce DEVICE    the producer alone
       textbook consume           the consumer alone, in any order

   The name appears when the data is complete. It is kept, so that the producer may end, or be killed, before the
   consumer has started. */
#include <partywall/partywall.h>
#include <stdio.h>
#include <stdlib.h>

#include "process.h"

enum { COUNT = 262144 };
static const char NAME[] = "examples/textbook";

#define OK(call)                                                                       \
    do {                                                                               \
        if ((call) != PW_OK) {                                                         \
            const pw_error *error = pw_last_error();                                   \
            fprintf(stderr, "%s; %s\n", pw_error_message(error), pw_error_advice(error)); \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

static int32_t pattern(int32_t index) { return index * 7 + 3; }

static int produce(pw_domain *domain, const char *device) {
    pw_segment_options options = PW_INIT(pw_segment_options);
    options.device = device;
    options.kept = 1;
    const uint64_t shape[] = {COUNT};
    pw_build *build = NULL;
    pw_segment *segment = NULL;
    int32_t *numbers = malloc(COUNT * sizeof *numbers);
    if (numbers == NULL) {
        return 1;
    }
    for (int32_t n = 0; n < COUNT; n++) {
        numbers[n] = pattern(n);
    }
    OK(pw_build_create(domain, NAME, &options, &build));
    OK(pw_build_tensor(build, "numbers", PW_DTYPE_I32, shape, NULL, 1));
    OK(pw_build_allocate(build));
    OK(pw_build_write(build, "numbers", numbers, COUNT * sizeof *numbers));
    OK(pw_build_commit(build, &segment));
    OK(pw_segment_close(segment));
    free(numbers);
    return 0;
}

static int consume(pw_domain *domain) {
    pw_segment *segment = NULL;
    pw_segment_info info = PW_INIT(pw_segment_info);
    int32_t *numbers = malloc(COUNT * sizeof *numbers);
    if (numbers == NULL) {
        return 1;
    }
    OK(pw_segment_open(domain, NAME, NULL, 60000000000, &segment));
    OK(pw_segment_info_get(segment, &info));
    OK(pw_segment_read(segment, "numbers", 0, numbers, COUNT * sizeof *numbers));
    int right = 0;
    for (int32_t n = 0; n < COUNT; n++) {
        right += numbers[n] == pattern(n);
    }
    printf("%d of %d integers are right, in %s memory\n", right, COUNT, info.kind);
    OK(pw_segment_close(segment));
    OK(pw_domain_remove(domain, NAME));
    free(numbers);
    return right == COUNT ? 0 : 1;
}

int main(int count, char **arguments) {
    const char *role = count > 1 ? arguments[1] : "host";
    int produces = strcmp(role, "produce") == 0;
    int consumes = strcmp(role, "consume") == 0;
    pid_t producer = produces || consumes ? 0 : start("produce", role);
    pw_domain *domain = NULL;
    OK(pw_domain_connect(NULL, &domain));
    int failed = produces ? produce(domain, count > 2 ? arguments[2] : "host") : consume(domain);
    OK(pw_domain_close(domain));
    return failed || (producer != 0 && !succeeded(producer));
}
