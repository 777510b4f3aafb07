/* Processes and threads that end while they hold something: by _exit, by exec, by exit in a thread, by pthread_exit and
   by cancellation. What they held comes back, or goes on where it belongs to the process. */
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "check.h"

static pw_domain *domain;
static pw_semaphore *permits;

static void start(void) {
    OK(pw_domain_connect(NULL, &domain));
    OK(pw_semaphore_open(domain, "permits", 1, NULL, &permits));
}

static pid_t play(const char *role, int *out) {
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], STDOUT_FILENO);
        close(pipes[0]);
        close(pipes[1]);
        execl("/proc/self/exe", "ends", role, (char *)NULL);
        _exit(127);
    }
    close(pipes[1]);
    *out = pipes[0];
    return child;
}

/* Waits until the child says a byte. */
static void hear(int from) {
    char byte = 0;
    CHECK(read(from, &byte, 1) == 1);
}

static void hold(void) {
    pw_permit *permit = NULL;
    start();
    OK(pw_semaphore_acquire(permits, PW_FOREVER, &permit));
    CHECK(write(STDOUT_FILENO, "h", 1) == 1);
}

/* The roles of children. */
static int child(const char *role) {
    if (strcmp(role, "_exit") == 0) {
        hold();
        _exit(0);
    }
    if (strcmp(role, "exec") == 0) {
        hold();
        execl("/proc/self/exe", "ends", "other", (char *)NULL);
        _exit(127);
    }
    /* What another program than this one does. */
    CHECK(write(STDOUT_FILENO, "o", 1) == 1);
    for (;;) {
        pause();
    }
}

static void acquire_and_release(void) {
    pw_permit *permit = NULL;
    OK(pw_semaphore_acquire(permits, PW_FOREVER, &permit));
    OK(pw_permit_close(permit));
}

static void processes(void) {
    int out = -1;
    int status = 0;
    pid_t pid = play("_exit", &out);
    hear(out);
    acquire_and_release();
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(out);

    /* The process lives on as another program, and nothing proves that its work is over. */
    pid = play("exec", &out);
    hear(out);
    hear(out);
    pw_permit *permit = NULL;
    FAILS(PW_TIMED_OUT, pw_semaphore_acquire(permits, 20000000, &permit));
    CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid);
    acquire_and_release();
    close(out);
}

static pw_subscriber *subscriber;
static pw_sample *received;
static pw_permit *taken;
static pthread_barrier_t together;

static void *leave_a_permit(void *unused) {
    (void)unused;
    OK(pw_semaphore_acquire(permits, PW_FOREVER, &taken));
    pthread_exit(NULL);
}

static void *receive_for_ever(void *unused) {
    (void)unused;
    pthread_barrier_wait(&together);
    /* The wait is no cancellation point. */
    OK(pw_subscriber_recv(subscriber, PW_FOREVER, &received));
    pthread_testcancel();
    return NULL;
}

static void threads(void) {
    pthread_t thread;
    void *result = NULL;
    CHECK(pthread_create(&thread, NULL, leave_a_permit, NULL) == 0 && pthread_join(thread, NULL) == 0);
    pw_permit *permit = NULL;
    OK(pw_semaphore_try_acquire(permits, &permit));
    CHECK(permit == NULL); /* it belongs to the process */
    OK(pw_permit_close(taken));

    const uint64_t one[] = {1};
    pw_topic_options options = PW_INIT(pw_topic_options);
    options.max_bytes = 8;
    pw_topic *topic = NULL;
    pw_publisher *publisher = NULL;
    OK(pw_topic_create(domain, "samples", &options, &topic));
    OK(pw_publisher_open(topic, &publisher));
    OK(pw_subscriber_open(topic, NULL, &subscriber));
    CHECK(pthread_barrier_init(&together, NULL, 2) == 0);
    CHECK(pthread_create(&thread, NULL, receive_for_ever, NULL) == 0);
    pthread_barrier_wait(&together);
    CHECK(pthread_cancel(thread) == 0);
    OK(pw_publisher_send(publisher, PW_DTYPE_U8, one, 1, "x", 1, PW_FOREVER, NULL));
    CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    OK(pw_sample_check(received));
    OK(pw_sample_close(received));
    OK(pw_subscriber_close(subscriber));
    OK(pw_publisher_close(publisher));
    OK(pw_topic_close(topic));
}

static void at_exit(void) {
    /* As before: the error of a call is there. */
    FAILS(PW_INVALID_ARGUMENT, pw_domain_ping(NULL));
    OK(pw_domain_ping(domain));
    OK(pw_semaphore_close(permits));
    OK(pw_domain_close(domain));
}

int main(int count, char **arguments) {
    if (count > 1) {
        return child(arguments[1]);
    }
    start();
    CHECK(atexit(at_exit) == 0);
    processes();
    threads();
    return 0;
}
