/* The calls of calls.rs in C++. */
#include <partywall/partywall.hpp>

#include <cstdio>
#include <cstdlib>

template <typename Call> static double each(int calls, Call call) {
    auto start = std::chrono::steady_clock::now();
    for (int n = 0; n < calls; n++) {
        call();
    }
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / calls;
}

int main(int count, char **arguments) {
    int calls = count > 1 ? std::atoi(arguments[1]) : 1000;
    const std::chrono::seconds timeout(10);
    partywall::domain domain = partywall::domain::connect();
    partywall::topic_options options;
    options.max_bytes = 64;
    partywall::topic topic = domain.topic("calls/cpp", options);
    partywall::publisher publisher = topic.publisher();
    partywall::subscriber subscriber = topic.subscriber();
    double sample = each(calls, [&] {
        partywall::loan loan = publisher.loan<std::uint8_t>({64}, timeout);
        *const_cast<volatile std::byte *>(loan.bytes().data()) = std::byte(1);
        loan.publish(timeout);
        partywall::sample sample = subscriber.recv(timeout);
        static_cast<void>(*const_cast<const volatile std::byte *>(sample.bytes().data()));
    });
    partywall::pool_options pool_options;
    pool_options.blocks = 4;
    pool_options.block_bytes = 64;
    partywall::pool pool = domain.pool("calls/cpp/pool", pool_options);
    double block = each(calls, [&] { pool.alloc(timeout); });
    std::printf("%f %f\n", sample, block);
}
