/* A topic from C++ to C++, Rust, Python or a shell, and back:

       frames publish COUNT [DEVICE]     in one terminal
       frames subscribe [DEVICE]         in another one, or `partywall topic echo examples/frames`; any order

   Number `n` of the frames is filled with `n`. Frames are copied, so that they may be on any DEVICE: host (the
   default), cuda:0, a GPU's UUID, auto. */
#include <partywall/partywall.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static void publish(partywall::topic &topic, int count) {
    partywall::publisher publisher = topic.publisher();
    publisher.wait_for_subscribers(1, std::chrono::seconds(60));
    for (int number = 0; number < count; number++) {
        publisher.send({48, 64}, std::vector<std::uint8_t>(48 * 64, static_cast<std::uint8_t>(number)));
    }
}

static void subscribe(partywall::topic &topic) {
    partywall::subscriber_options until_idle;
    until_idle.until_idle = 1;
    int received = 0;
    int right = 0;
    for (partywall::sample &sample : topic.subscriber(until_idle)) {
        std::vector<std::uint8_t> pixels = sample.to_vector<std::uint8_t>();
        right += std::all_of(pixels.begin(), pixels.end(), [&](int pixel) { return pixel == received % 256; });
        received++;
    }
    std::printf("%d frames, %d of them right\n", received, right);
}

int main(int count, char **arguments) try {
    bool publishes = count > 2 && std::strcmp(arguments[1], "publish") == 0;
    const char *device = count > 2 + publishes ? arguments[2 + publishes] : "host";
    partywall::domain domain = partywall::domain::connect();
    auto options = partywall::topic_options().tensor<std::uint8_t>({48, 64});
    options.device = device;
    partywall::topic topic = domain.topic("examples/frames", options);
    if (publishes) {
        publish(topic, std::atoi(arguments[2]));
    } else {
        subscribe(topic);
    }
} catch (const partywall::error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
