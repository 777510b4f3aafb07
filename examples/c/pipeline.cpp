/* Camera → detector → writer: three processes, two topics, no copy between them.

       pipeline                     all three, in host memory
       pipeline camera | detector | writer

   The detector finds the brightest pixel of each frame. Its result rests on the frame: had the camera died while the
   frame was being written, the result would fail its check, too. */
#include <partywall/partywall.hpp>

#include <algorithm>
#include <cstdio>
#include <string>

#include "process.h"

namespace pw = partywall;

static constexpr std::uint64_t HEIGHT = 120, WIDTH = 160, FRAMES = 100;

struct topics {
    pw::topic frames, spots;

    explicit topics(const pw::domain &domain)
        : frames(domain.topic("examples/pipeline/frames", pw::topic_options().tensor<std::uint8_t>({HEIGHT, WIDTH}))),
          spots(domain.topic("examples/pipeline/spots", pw::topic_options().tensor<std::uint32_t>({2}))) {}
};

static pw::subscriber until_idle(const pw::topic &topic) {
    pw::subscriber_options options;
    options.until_idle = 1;
    return topic.subscriber(options);
}

static void camera(const topics &topics) {
    pw::publisher publisher = topics.frames.publisher();
    publisher.wait_for_subscribers(1);
    for (std::uint64_t frame = 0; frame < FRAMES; frame++) {
        pw::loan loan = publisher.loan<std::uint8_t>({HEIGHT, WIDTH});
        auto pixels = loan.as<std::uint8_t>();
        std::fill(pixels.begin(), pixels.end(), std::uint8_t(10));
        pixels[frame * WIDTH + 2 * frame % WIDTH] = 255;
        loan.publish();
    }
}

static void detector(const topics &topics) {
    pw::publisher publisher = topics.spots.publisher();
    pw::subscriber frames = until_idle(topics.frames);
    publisher.wait_for_subscribers(1);
    for (pw::sample &frame : frames) {
        auto pixels = frame.as<std::uint8_t>();
        auto brightest = static_cast<std::uint32_t>(std::max_element(pixels.begin(), pixels.end()) - pixels.begin());
        pw::loan loan = publisher.loan<std::uint32_t>({2});
        loan.rests_on(frame);
        auto spot = loan.as<std::uint32_t>();
        spot[0] = brightest / WIDTH;
        spot[1] = brightest % WIDTH;
        loan.publish();
    }
}

static bool writer(const topics &topics) {
    std::uint64_t right = 0;
    std::uint64_t number = 0;
    for (pw::sample &sample : until_idle(topics.spots)) {
        auto spot = sample.as<std::uint32_t>();
        right += spot[0] == number && spot[1] == 2 * number % WIDTH;
        sample.check();
        number++;
    }
    std::printf("%d of %d spots are right\n", int(right), int(number));
    return right == FRAMES;
}

int main(int count, char **arguments) try {
    std::string role = count > 1 ? arguments[1] : "all";
    pid_t camera_process = role == "all" ? start("camera", nullptr) : 0;
    pid_t detector_process = role == "all" ? start("detector", nullptr) : 0;
    pw::domain domain = pw::domain::connect();
    topics topics(domain);
    if (role == "camera") {
        camera(topics);
    } else if (role == "detector") {
        detector(topics);
    } else if (!writer(topics)) {
        return 1;
    }
    return role == "all" && !(succeeded(camera_process) && succeeded(detector_process));
} catch (const pw::error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
