/* At most two of four processes are in a section at a time. One of them is killed inside: its permit comes back.

       semaphore */
#include <partywall/partywall.hpp>

#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "process.h"

namespace pw = partywall;

static void work(const pw::semaphore &semaphore, bool dies) {
    for (int round = 0; round < 20; round++) {
        pw::permit permit = semaphore.acquire(std::chrono::seconds(60));
        if (dies) {
            std::raise(SIGKILL);
        }
        usleep(1000); /* what only two may do at a time */
    } /* the permit goes back here */
}

int main(int count, char **arguments) try {
    std::string role = count > 1 ? arguments[1] : "all";
    std::vector<pid_t> workers;
    if (role == "all") {
        for (const char *fate : {"lives", "dies", "lives", "lives"}) {
            workers.push_back(start("work", fate));
        }
    }
    pw::domain domain = pw::domain::connect();
    pw::semaphore semaphore = domain.semaphore("examples/semaphore", 2);
    if (role == "work") {
        work(semaphore, std::string(arguments[2]) == "dies");
        return 0;
    }
    int ended = 0;
    for (pid_t worker : workers) {
        ended += succeeded(worker);
    }
    /* Both permits can be had, although a process has died with one. */
    pw::permit first = semaphore.acquire(std::chrono::seconds(60));
    pw::permit second = semaphore.acquire(std::chrono::seconds(60));
    std::printf("%d of 4 processes ended by themselves; both permits are free\n", ended);
    return ended != 3;
} catch (const pw::error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
