/* The calls of calls.rs in C++, which that program loads. */
#include <partywall/partywall.hpp>

#include <cstdio>

namespace pw = partywall;

static const std::chrono::seconds TIMEOUT(10);

struct objects {
    pw::domain domain = pw::domain::connect();
    pw::topic topic = domain.topic("calls/cpp", topic_options());
    pw::publisher publisher = topic.publisher();
    pw::subscriber subscriber = topic.subscriber();
    pw::pool pool = domain.pool("calls/cpp/pool", pool_options());

    static pw::topic_options topic_options() {
        pw::topic_options options;
        options.max_bytes = 64;
        return options;
    }

    static pw::pool_options pool_options() {
        pw::pool_options options;
        options.blocks = 4;
        options.block_bytes = 64;
        return options;
    }
};

static objects *opened;

template <typename Call> static double each(int calls, Call call) {
    auto start = std::chrono::steady_clock::now();
    for (int n = 0; n < calls; n++) {
        call();
    }
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / calls;
}

template <typename Call> static int checked(Call call) try {
    call();
    return 0;
} catch (const pw::error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}

extern "C" int calls_open() {
    return checked([] { opened = new objects; });
}

extern "C" int calls_measure(int calls, double times[2]) {
    return checked([&] {
        times[0] = each(calls, [] {
            pw::loan loan = opened->publisher.loan<std::uint8_t>({64}, TIMEOUT);
            *const_cast<volatile std::byte *>(loan.bytes().data()) = std::byte(1);
            loan.publish(TIMEOUT);
            pw::sample sample = opened->subscriber.recv(TIMEOUT);
            static_cast<void>(*const_cast<const volatile std::byte *>(sample.bytes().data()));
        });
        times[1] = each(calls, [] { opened->pool.alloc(TIMEOUT); });
    });
}
