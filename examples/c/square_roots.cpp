/* Tasks for workers, none lost: `square_roots master` in one terminal and `square_roots worker` in another, in any order;
   or the same roles of the examples in Rust and Python, which use the same queue. Without a role: both. */
#include <partywall/partywall.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "process.h"

namespace pw = partywall;
using namespace std::chrono_literals;

static constexpr auto TIMEOUT = 60s;
static constexpr int TASKS = 100;
static constexpr std::uint64_t BYTES = 1024 * sizeof(float);

static pw::queue open_queue(const pw::domain &domain) {
    pw::queue_options options;
    options.tasks = options.inputs = options.outputs = 64;
    options.input_bytes = options.output_bytes = BYTES;
    return domain.queue("examples/square_roots", options);
}

static pw::ticket submit(const pw::queue &queue, int number) {
    pw::block input = queue.alloc_input(TIMEOUT);
    auto numbers = input.as<float>();
    std::fill(numbers.begin(), numbers.end(), static_cast<float>(number * number));
    pw::task_options options;
    options.output_bytes = BYTES;
    pw::task task = pw::task::create("sqrt", options);
    task.input(input);
    return queue.submit(task, TIMEOUT);
}

static bool master(const pw::queue &queue) {
    int right = 0;
    /* No more at once than there are blocks. */
    for (int first = 0; first < TASKS; first += 32) {
        std::vector<pw::ticket> tickets;
        for (int number = first; number < std::min(first + 32, TASKS); number++) {
            tickets.push_back(submit(queue, number));
        }
        for (std::size_t n = 0; n < tickets.size(); n++) {
            pw::task_result result = tickets[n].wait(TIMEOUT);
            auto roots = result.output->as<float>();
            float wanted = static_cast<float>(first + int(n));
            right += std::all_of(roots.begin(), roots.end(), [&](float root) { return root == wanted; });
        }
    }
    pw::task last = pw::task::create("last");
    queue.submit(last, TIMEOUT).wait(TIMEOUT);
    std::printf("%d of %d results are right\n", right, TASKS);
    return right == TASKS;
}

static void worker(const pw::queue &queue) {
    for (pw::claim &task : queue.claims(TIMEOUT)) {
        if (task.kind() == "last") {
            return task.complete();
        }
        auto numbers = task.input<float>(0); /* in place: nothing is copied */
        auto roots = task.output<float>();
        std::transform(numbers.begin(), numbers.end(), roots.begin(), [](float number) { return std::sqrt(number); });
        task.complete();
    }
}

int main(int count, char **arguments) try {
    std::string role = count > 1 ? arguments[1] : "both";
    pid_t other = role == "both" ? start("worker", nullptr) : 0;
    pw::domain domain = pw::domain::connect();
    pw::queue queue = open_queue(domain);
    if (role == "worker") {
        worker(queue);
        return 0;
    }
    bool right = master(queue);
    return !(right && (other == 0 || succeeded(other)));
} catch (const pw::error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
