/* Recovery from a crash: a producer is killed while it writes a sample. The consumer goes on with the next producer, and
   no sample that it sees is half written.

       crash */
#include <partywall/partywall.hpp>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>

#include "process.h"

namespace pw = partywall;

static constexpr std::uint64_t NUMBERS = 4096;
static constexpr int SAMPLES = 20;

static pw::topic open_topic(const pw::domain &domain) {
    return domain.topic("examples/crash", pw::topic_options().tensor<std::uint64_t>({NUMBERS}));
}

static void produce(const pw::topic &topic, bool dies) {
    pw::publisher publisher = topic.publisher();
    publisher.wait_for_subscribers(1);
    for (int number = 0; number < SAMPLES; number++) {
        pw::loan loan = publisher.loan<std::uint64_t>({NUMBERS});
        auto numbers = loan.as<std::uint64_t>();
        std::fill(numbers.begin(), numbers.begin() + NUMBERS / 2, number);
        if (dies && number == SAMPLES / 2) {
            std::raise(SIGKILL); /* half of the sample is written */
        }
        std::fill(numbers.begin() + NUMBERS / 2, numbers.end(), number);
        loan.publish();
    }
}

/* Starts producers, the next one when the one before has ended. */
static void supervise() {
    for (const char *fate : {"dies", "lives"}) {
        std::printf("a producer %s\n", succeeded(start("produce", fate)) ? "has ended" : "was killed");
    }
}

/* Receives from whichever producer is there. */
static bool consume(const pw::topic &topic) {
    pw::subscriber subscriber = topic.subscriber();
    std::thread supervisor(supervise);
    int whole = 0;
    for (int received = 0; received < SAMPLES / 2 + SAMPLES; received++) {
        pw::sample sample = subscriber.recv();
        auto numbers = sample.as<std::uint64_t>();
        whole += std::all_of(numbers.begin(), numbers.end(), [&](std::uint64_t number) { return number == numbers[0]; });
    }
    supervisor.join();
    std::printf("%d samples are whole\n", whole);
    return whole == SAMPLES / 2 + SAMPLES;
}

int main(int count, char **arguments) try {
    pw::domain domain = pw::domain::connect();
    pw::topic topic = open_topic(domain);
    if (count > 2) {
        produce(topic, std::string(arguments[2]) == "dies");
        return 0;
    }
    return !consume(topic);
} catch (const pw::error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
