/* Objects of static and thread storage: made before main, destroyed after it, or with their thread. What a destructor
   cannot do fails as everywhere. */
#include "check.hpp"

#include <cstring>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

namespace pw = partywall;

/* Destroyed last: it sees that those below have let go. */
struct last_words {
    ~last_words() {
        if (!name) {
            return;
        }
        pw::domain domain = OK(pw::domain::connect());
        FAILS(PW_NOT_FOUND, not_found, domain.open_topic(name));
        FAILS(PW_INVALID_ARGUMENT, error, pw::domain().ping());
        std::puts("the last destructor has run");
        std::fflush(stdout);
    }
    const char *name = nullptr;
} last;

static pw::domain domain = OK(pw::domain::connect());
static pw::topic topic = OK(domain.topic("statics", pw::topic_options().tensor<int>({2})));
static pw::subscriber subscriber = OK(topic.subscriber());
static pw::publisher publisher = OK(topic.publisher());
static pw::loan loan;
static pw::sample sample;
static pw::semaphore semaphore = OK(domain.semaphore("permits", 1));

/* Its thread ends while it has objects, and the last of them is made by a destructor of the thread. */
struct made_at_the_end {
    ~made_at_the_end() {
        pw::permit permit = OK(semaphore.acquire());
        CHECK(!OK(semaphore.try_acquire()).has_value());
    }
};

static void in_threads() {
    for (int n = 0; n < 3; n++) {
        std::thread([] {
            thread_local made_at_the_end destroyed_last;
            static_cast<void>(&destroyed_last);
            thread_local pw::permit permit;
            permit = OK(semaphore.acquire());
            FAILS(PW_TIMED_OUT, timed_out, semaphore.acquire(std::chrono::milliseconds(1)));
        }).join();
        CHECK(OK(semaphore.info()).available == 1);
    }
}

/* `exit` by a thread, while another one waits. */
static int exit_elsewhere() {
    std::thread([] { static_cast<void>(OK(semaphore.acquire())); }).join();
    std::thread waiting([] {
        pw::domain own = OK(pw::domain::connect());
        pw::timeline never = OK(own.timeline("never"));
        static_cast<void>(never.wait(1));
    });
    std::thread([] { std::exit(0); }).join();
    return 1;
}

int main(int count, char **arguments) {
    if (count > 1 && std::strcmp(arguments[1], "exit") == 0) {
        return exit_elsewhere();
    }
    OK(publisher.send({2}, std::vector<int>{3, 4}));
    sample = OK(subscriber.recv());
    loan = OK(publisher.loan<int>({2}));
    in_threads();
    static pw::domain late = OK(pw::domain::connect());
    OK(late.ping());

    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "statics", "exit", static_cast<char *>(nullptr));
        _exit(127);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    last.name = "statics";
}
