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

/* A name space of the dynamic linker, as of dlmopen: with a C library of its own. */
enum { SAME_SPACE, OWN_SPACE };

/* A plug-in with the library in it, under a name of its own. */
struct plug_in {
    void *handle;
    pw_status (*connect)(const pw_domain_options *, pw_domain **);
    pw_status (*ping)(const pw_domain *);
    pw_status (*close)(pw_domain *);
    pw_status (*open)(const pw_domain *, const char *, const pw_timeline_options *, pw_timeline **);
    pw_status (*wait)(const pw_timeline *, uint64_t, int64_t);
    pw_status (*close_timeline)(pw_timeline *);
    pw_domain *domain;
    pw_timeline *timeline;
};

static struct plug_in load(const char *own, int space) {
    char path[] = "/tmp/pw-c-XXXXXX";
    int out = mkstemp(path);
    FILE *in = fopen(own, "rb");
    CHECK(out >= 0 && in != NULL);
    static char buffer[1 << 16];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, in)) > 0;) {
        CHECK(write(out, buffer, n) == (ssize_t)n);
    }
    fclose(in);
    close(out);
    struct plug_in made;
    made.handle = space ? dlmopen(LM_ID_NEWLM, path, RTLD_NOW) : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    unlink(path);
    CHECK(made.handle != NULL);
    *(void **)&made.connect = dlsym(made.handle, "pw_domain_connect");
    *(void **)&made.ping = dlsym(made.handle, "pw_domain_ping");
    *(void **)&made.close = dlsym(made.handle, "pw_domain_close");
    *(void **)&made.open = dlsym(made.handle, "pw_timeline_open");
    *(void **)&made.wait = dlsym(made.handle, "pw_timeline_wait");
    *(void **)&made.close_timeline = dlsym(made.handle, "pw_timeline_close");
    CHECK(made.connect != pw_domain_connect);
    made.domain = NULL;
    made.timeline = NULL;
    CHECK(made.connect(NULL, &made.domain) == PW_OK && made.ping(made.domain) == PW_OK);
    CHECK(made.open(made.domain, "between-copies", NULL, &made.timeline) == PW_OK);
    return made;
}

static void *wait_in_a_copy(void *copy) {
    const struct plug_in *plug_in = copy;
    CHECK(plug_in->wait(plug_in->timeline, 1, PW_FOREVER) == PW_OK);
    return NULL;
}

/* Two plug-ins each bring the library, and are unloaded while a thread waits in them. */
static void copies(pw_domain *domain, int space) {
    Dl_info own;
    CHECK(dladdr((void *)(uintptr_t)pw_version, &own) != 0);
    struct plug_in plug_ins[2] = {load(own.dli_fname, space), load(own.dli_fname, space)};
    pthread_t waiting[2];
    pw_writer *writer = NULL;
    OK(pw_writer_open(domain, "between-copies", NULL, &writer));
    for (int i = 0; i < 2; i++) {
        struct plug_in *one = &plug_ins[i];
        struct plug_in *other = &plug_ins[1 - i];
        CHECK(pw_domain_ping(one->domain) == PW_INVALID_ARGUMENT);
        CHECK(other->ping(one->domain) == PW_INVALID_ARGUMENT && other->close(one->domain) == PW_INVALID_ARGUMENT);
        CHECK(one->ping(domain) == PW_INVALID_ARGUMENT && one->close(domain) == PW_INVALID_ARGUMENT);
        CHECK(pthread_create(&waiting[i], NULL, wait_in_a_copy, one) == 0);
    }
    for (int i = 0; i < 2; i++) {
        /* Its threads run on: the code stays mapped. */
        CHECK(dlclose(plug_ins[i].handle) == 0);
    }
    OK(pw_writer_signal(writer, 1));
    for (int i = 0; i < 2; i++) {
        struct plug_in *one = &plug_ins[i];
        CHECK(pthread_join(waiting[i], NULL) == 0);
        CHECK(one->close_timeline(one->timeline) == PW_OK);
        CHECK(one->ping(one->domain) == PW_OK && one->close(one->domain) == PW_OK);
    }
    OK(pw_writer_close(writer));
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
    copies(early, SAME_SPACE);
#ifndef __SANITIZE_ADDRESS__ /* the sanitizer cannot follow into another name space */
    copies(early, OWN_SPACE);
#endif
    forked(early);
    signals(early);
    threads(early);
    OK(pw_domain_close(early));
    return 0;
}
