/* The textbook's ring buffer: a fast producer and a slow consumer, two processes, share four slots. The producer waits
   for the consumer; with `PW_LATEST` in place of `PW_BLOCK` the consumer would miss samples.

       ring            both
       ring produce    the producer alone */
#include <partywall/partywall.hpp>

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>

#include "process.h"

namespace pw = partywall;

static constexpr std::uint64_t NUMBERS = 1024, SAMPLES = 40;

static pw::topic ring(const pw::domain &domain) {
    pw::topic_options options;
    options.depth = 4;
    options.tensor<std::uint64_t>({NUMBERS});
    return domain.topic("examples/ring", options);
}

static void produce(const pw::topic &ring) {
    pw::publisher publisher = ring.publisher();
    publisher.wait_for_subscribers(1);
    for (std::uint64_t number = 0; number < SAMPLES; number++) {
        pw::loan loan = publisher.loan<std::uint64_t>({NUMBERS});
        auto slot = loan.as<std::uint64_t>();
        std::fill(slot.begin(), slot.end(), number);
        loan.publish();
    }
}

static bool consume(const pw::topic &ring) {
    pw::subscriber_options options;
    options.policy = PW_BLOCK;
    options.until_idle = 1;
    std::uint64_t received = 0, whole = 0, missed = 0;
    /* The loop ends when the producer has left, even if it was killed. */
    for (pw::sample &sample : ring.subscriber(options)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        auto slot = sample.as<std::uint64_t>(); /* is not overwritten as long as the sample exists */
        whole += std::all_of(slot.begin(), slot.end(), [&](std::uint64_t number) { return number == slot[0]; });
        missed += sample.info().missed;
        received++;
    }
    std::printf("%d samples received, %d of them whole, %d missed\n", int(received), int(whole), int(missed));
    return whole == SAMPLES;
}

int main(int count, char **arguments) try {
    bool produces = count > 1 && std::string(arguments[1]) == "produce";
    pid_t producer = produces ? 0 : start("produce", nullptr);
    pw::domain domain = pw::domain::connect();
    if (produces) {
        produce(ring(domain));
        return 0;
    }
    bool right = consume(ring(domain));
    return !(succeeded(producer) && right);
} catch (const pw::error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
