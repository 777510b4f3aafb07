/* Samples go through a topic; objects own what they are made from; each failure has its class. */
#include "check.hpp"

#include <array>
#include <thread>
#include <type_traits>

#include <poll.h>

namespace pw = partywall;
using namespace std::chrono_literals;

static_assert(!std::is_copy_constructible_v<pw::sample> && std::is_nothrow_move_constructible_v<pw::sample>);
static_assert(!std::is_constructible_v<pw::stream_ref, CUstream_st **>, "the address of a stream is a mistake");
static_assert(std::is_constructible_v<pw::stream_ref, CUstream_st *>);
static_assert(pw::dtype_of<long>::value == PW_DTYPE_I64 && pw::dtype_of<long long>::value == PW_DTYPE_I64);
static_assert(pw::dtype_of<unsigned char>::value == PW_DTYPE_U8 && pw::dtype_of<std::int16_t>::value == PW_DTYPE_I16);

struct half {
    std::uint16_t bits;
};
template <> struct partywall::dtype_of<half> { static constexpr std::uint32_t value = PW_DTYPE_F16; };

static void samples(const pw::domain &domain) {
    pw::topic topic = OK(domain.create_topic("numbers", pw::topic_options().tensor<float>({2, 3})));
    pw::publisher publisher = OK(topic.publisher());
    pw::subscriber subscriber = OK(topic.subscriber());
    CHECK(OK(topic.info()).max_bytes == 24 && OK(topic.info()).subscribers == 1);
    CHECK(!OK(subscriber.try_recv()).has_value());
    FAILS(PW_TIMED_OUT, timed_out, subscriber.recv(1ms));

    pw::loan loan = OK(publisher.loan<float>({2, 3}));
    float next = 0;
    for (float &element : OK(loan.as<float>())) {
        element = next++;
    }
    FAILS(PW_MISMATCH, error, loan.as<int>());
    CHECK(OK(loan.bytes()).size() == 24);
    OK(loan.set_header("header"));
    CHECK(OK(loan.publish()) == 0);
    CHECK(!loan);
    FAILS(PW_INVALID_ARGUMENT, error, loan.publish());

    pollfd wanted = {OK(subscriber.fd()), POLLIN, 0};
    CHECK(poll(&wanted, 1, 10000) == 1);
    pw::sample sample = OK(subscriber.recv());
    pw::span<const float> elements = OK(sample.as<float>());
    CHECK(elements.size() == 6 && elements[5] == 5.0F && OK(sample.bytes()).size() == 24);
    CHECK(OK(sample.to_vector<float>()).back() == 5.0F);
    FAILS(PW_MISMATCH, error, sample.as<std::uint32_t>());
    FAILS(PW_MISMATCH, error, sample.to_vector<double>());
    CHECK((OK(sample.shape()) == std::vector<std::uint64_t>{2, 3}));
    CHECK(OK(sample.header()) == "header");
    CHECK(OK(sample.info()).sequence == 0);
    OK(sample.wait(0s));
    OK(sample.check());

    pw::sample moved = std::move(sample);
    CHECK(moved && !sample.get());
    FAILS(PW_INVALID_ARGUMENT, error, sample.check());
    OK(moved.close());
    OK(moved.close());

    OK(publisher.send({2, 3}, std::array<float, 6>{}, 1s));
    OK(publisher.send({2, 3}, std::vector<float>(6, 7.0F)));
    CHECK(OK(OK(publisher.loan<float>({2, 3})).publish()) == 3);
    moved = OK(subscriber.recv());
    moved = OK(subscriber.recv());
    CHECK(OK(moved.as<float>())[3] == 7.0F);
    FAILS(PW_MISMATCH, error, publisher.send({3}, std::vector<half>(3)));
    FAILS(PW_INVALID_ARGUMENT, error, publisher.send({2, 3}, std::vector<float>(5)));
}

static void iteration(const pw::domain &domain) {
    pw::topic_options options;
    options.max_bytes = 64;
    options.tensor<int>({pw::any});
    pw::topic topic = OK(domain.topic("stream", options));
    pw::publisher publisher = OK(topic.publisher());
    pw::subscriber_options until_idle;
    until_idle.until_idle = 1;
    pw::subscriber subscriber = OK(topic.subscriber(until_idle));
    std::thread writer([publisher = std::move(publisher)] {
        for (int n = 0; n < 100; n++) {
            OK(publisher.send({1}, std::vector<int>{n}));
        }
    });
    int received = 0;
    for (auto &sample : subscriber) {
        CHECK(OK(OK(std::move(sample)).as<int>())[0] == received);
        received++;
    }
    CHECK(received == 100);
    FAILS(PW_GONE, gone, subscriber.recv());
    writer.join();

    pw::subscriber closed;
    int failures = 0;
#ifdef PARTYWALL_NO_EXCEPTIONS
    for (auto &sample : closed) {
        check_error(__FILE__, __LINE__, PW_INVALID_ARGUMENT, sample.error());
        failures++;
    }
#else
    FAILS(PW_INVALID_ARGUMENT, error, closed.begin());
    failures++;
#endif
    CHECK(failures == 1);
}

static void failures(const pw::domain &domain) {
    FAILS(PW_NOT_FOUND, not_found, domain.open_topic("absent"));
    FAILS(PW_INVALID_ARGUMENT, error, domain.open_topic(std::string("a\0b", 3)));
    FAILS(PW_INVALID_ARGUMENT, error, domain.open_topic(std::string(9999, 'n')));
    FAILS(PW_INVALID_ARGUMENT, error, pw::domain().ping());
    pw::domain_options options;
    options.socket = "/nonexistent/socket";
    options.no_start = 1;
    FAILS(PW_UNREACHABLE, unreachable, pw::domain::connect(options));

    /* An error outlives the call that has failed, and the next one. */
    pw::error kept = pw::error::last();
    FAILS(PW_NOT_FOUND, not_found, domain.open_topic("absent"));
    CHECK(kept.status() == PW_UNREACHABLE && std::string(kept.what()).find(kept.advice()) != std::string::npos);
}

int main() {
    pw::domain domain = OK(pw::domain::connect());
    OK(domain.ping());
    samples(domain);
    iteration(domain);
    failures(domain);
    /* What was opened through a connection keeps it. */
    pw::topic topic = OK(domain.topic("last", pw::topic_options().tensor<int>({2})));
    domain = pw::domain();
    OK(topic.check());
}
