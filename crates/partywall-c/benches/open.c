/* The program of `calls.rs` that opens a name, in C. */
#include <partywall/partywall.h>
#include <stdio.h>

#define OK(call)                                                              \
    if ((call) != PW_OK) {                                                    \
        fprintf(stderr, "%s: %s\n", #call, pw_error_message(pw_last_error())); \
        return 1;                                                             \
    }

int main(void) {
    pw_domain *domain;
    pw_segment *segment;
    void *data;
    OK(pw_domain_connect(NULL, &domain));
    OK(pw_segment_open(domain, "calls/segment", NULL, 10000000000, &segment));
    OK(pw_segment_data(segment, "x", &data, NULL));
    return ((char *)data)[0] != 0;
}
