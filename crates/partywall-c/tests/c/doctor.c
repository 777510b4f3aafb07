/* The findings of the doctor. */
#include "check.h"

int main(void) {
    pw_findings *findings = NULL;
    size_t count = 0;
    FAILS(PW_INVALID_ARGUMENT, pw_findings_open(NULL, "host", &findings, &count));
    FAILS(PW_INVALID_ARGUMENT, pw_findings_open(NULL, "\xff", &findings, &count));
    FAILS(PW_INVALID_ARGUMENT, pw_findings_open(NULL, NULL, &findings, NULL));
    OK(pw_findings_open(NULL, NULL, &findings, &count));
    CHECK(count > 10);
    pw_finding_info finding = PW_INIT(pw_finding_info);
    for (size_t i = 0; i < count; i++) {
        OK(pw_findings_get(findings, i, &finding));
        CHECK(*finding.title != 0 && *finding.outcome != 0);
        if (strcmp(finding.title, "host memory") == 0) {
            CHECK(strcmp(finding.outcome, "ok") == 0);
        }
    }
    FAILS(PW_INVALID_ARGUMENT, pw_findings_get(findings, count, &finding));
    OK(pw_findings_close(findings));
    FAILS(PW_INVALID_ARGUMENT, pw_findings_close(findings));
    return 0;
}
