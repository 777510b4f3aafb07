/* What the test programs share: a failed call ends the program with its error. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <partywall/partywall.h>

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (!(condition)) {                                                   \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);   \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

#define OK(call)                                                              \
    do {                                                                      \
        if ((call) != PW_OK) {                                                \
            const pw_error *error = pw_last_error();                          \
            fprintf(stderr, "%s:%d: %s: %s; %s\n", __FILE__, __LINE__, #call, \
                    pw_error_message(error), pw_error_advice(error));         \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

/* The call fails with this status, and the error has a sentence and advice. */
#define FAILS(status, call)                                                   \
    do {                                                                      \
        pw_status got = (call);                                               \
        if (got != (status)) {                                                \
            fprintf(stderr, "%s:%d: %s returned %" PRId32 " in place of %s\n", __FILE__, __LINE__, #call, \
                    (int32_t)got, #status);                                   \
            exit(1);                                                          \
        }                                                                     \
        CHECK(pw_error_status(pw_last_error()) == (status));                  \
        CHECK(*pw_error_message(pw_last_error()) != 0);                       \
        CHECK(*pw_error_advice(pw_last_error()) != 0);                        \
        CHECK(*pw_error_anchor(pw_last_error()) != 0);                        \
    } while (0)
