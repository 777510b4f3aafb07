/* The library in one process with others: before main, beside a copy of itself, after dlclose, in a forked child, under
   signals, in many threads. */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "check.h"

/* A static initialiser connects, as one of C++ may. */
static pw_domain *early;

__attribute__((constructor)) static void before_main(void) {
    OK(pw_domain_connect(NULL, &early));
}

/* Two plug-ins may each bring the library. */
static void copies(pw_domain *domain) {
    Dl_info own;
    CHECK(dladdr((void *)(uintptr_t)pw_version, &own) != 0);
    char path[] = "/tmp/pw-c-XXXXXX";
    int out = mkstemp(path);
    FILE *in = fopen(own.dli_fname, "rb");
    CHECK(out >= 0 && in != NULL);
    static char buffer[1 << 16];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, in)) > 0;) {
        CHECK(write(out, buffer, n) == (ssize_t)n);
    }
    fclose(in);
    close(out);
    void *copy = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    unlink(path);
    CHECK(copy != NULL);
    pw_status (*connect)(const pw_domain_options *, pw_domain **);
    pw_status (*ping)(const pw_domain *);
    pw_status (*close)(pw_domain *);
    *(void **)&connect = dlsym(copy, "pw_domain_connect");
    *(void **)&ping = dlsym(copy, "pw_domain_ping");
    *(void **)&close = dlsym(copy, "pw_domain_close");
    CHECK(connect != pw_domain_connect);
    pw_domain *other = NULL;
    CHECK(connect(NULL, &other) == PW_OK && ping(other) == PW_OK);
    FAILS(PW_INVALID_ARGUMENT, pw_domain_ping(other));
    CHECK(ping(domain) == PW_INVALID_ARGUMENT && close(domain) == PW_INVALID_ARGUMENT);
    /* Its threads run on: the code stays mapped. */
    CHECK(dlclose(copy) == 0);
    CHECK(ping(other) == PW_OK && close(other) == PW_OK);
    OK(pw_domain_ping(domain));
}

static void forked(pw_domain *domain) {
    pid_t child = fork();
    if (child == 0) {
        FAILS(PW_UNREACHABLE, pw_domain_ping(domain));
        OK(pw_domain_close(domain));
        pw_domain *own = NULL;
        OK(pw_domain_connect(NULL, &own));
        OK(pw_domain_ping(own));
        OK(pw_domain_close(own));
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(pw_domain_ping(domain));
}

static volatile sig_atomic_t alarms;

static void on_alarm(int number) {
    (void)number;
    alarms++;
}

/* Signals interrupt no wait. */
static void signals(pw_domain *domain) {
    struct sigaction action = {.sa_handler = on_alarm};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval often = {.it_interval = {.tv_usec = 2000}, .it_value = {.tv_usec = 2000}};
    pw_timeline *timeline = NULL;
    OK(pw_timeline_open(domain, "never", NULL, &timeline));
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    while (alarms < 20) {
        FAILS(PW_TIMED_OUT, pw_timeline_wait(timeline, 1, 20000000));
        OK(pw_domain_ping(domain));
    }
    CHECK(setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL) == 0);
    OK(pw_timeline_close(timeline));
}

static pw_timeline *contended;
static pthread_barrier_t together;

static void *close_it(void *closed) {
    pthread_barrier_wait(&together);
    *(pw_status *)closed = pw_timeline_close(contended);
    /* The error is this thread's own. */
    CHECK((pw_last_error() == NULL) == (*(pw_status *)closed == PW_OK));
    return NULL;
}

/* Of several threads that close a handle, one does. */
static void threads(pw_domain *domain) {
    enum { THREADS = 4 };
    for (int round = 0; round < 50; round++) {
        pthread_t running[THREADS];
        pw_status closed[THREADS];
        OK(pw_timeline_open(domain, "contended", NULL, &contended));
        CHECK(pthread_barrier_init(&together, NULL, THREADS) == 0);
        for (int i = 0; i < THREADS; i++) {
            CHECK(pthread_create(&running[i], NULL, close_it, &closed[i]) == 0);
        }
        int winners = 0;
        for (int i = 0; i < THREADS; i++) {
            CHECK(pthread_join(running[i], NULL) == 0);
            CHECK(closed[i] == PW_OK || closed[i] == PW_INVALID_ARGUMENT);
            winners += closed[i] == PW_OK;
        }
        CHECK(winners == 1);
        pthread_barrier_destroy(&together);
    }
}

int main(void) {
    OK(pw_domain_ping(early));
    copies(early);
    forked(early);
    signals(early);
    threads(early);
    OK(pw_domain_close(early));
    return 0;
}
