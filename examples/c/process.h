/* Starts this program again in another role, and waits for it. */
#ifndef PROCESS_H
#define PROCESS_H

#include <stddef.h>
#include <sys/wait.h>
#include <unistd.h>

static inline pid_t start(const char *role, const char *argument) {
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "example", role, argument, (char *)NULL);
        _exit(127);
    }
    return child;
}

/* Returns whether the process has ended by itself and without a complaint. */
static inline int succeeded(pid_t child) {
    int status = 0;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

#endif
