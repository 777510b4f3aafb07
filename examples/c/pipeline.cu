/* Camera → detector → writer on a GPU: kernels draw the frames and find their brightest pixels. No host waits for a
   kernel, and no pixel leaves the GPU.

       pipeline_gpu [FRAMES]               all three processes
       pipeline_gpu camera | detector | writer FRAMES */
#include <partywall/partywall.hpp>

#include <chrono>
#include <cstdio>
#include <string>

#include "process.h"

namespace pw = partywall;

static constexpr unsigned HEIGHT = 1080, WIDTH = 1920, PIXELS = HEIGHT * WIDTH, THREADS = 256;
static constexpr unsigned BLOCKS = (PIXELS + THREADS - 1) / THREADS;

static __host__ __device__ unsigned spot_of(unsigned frame) { return frame * 7919u % PIXELS; }

static __global__ void draw(std::uint8_t *pixels, unsigned frame) {
    unsigned at = blockIdx.x * THREADS + threadIdx.x;
    if (at < PIXELS) {
        pixels[at] = at == spot_of(frame) ? 255 : 10;
    }
}

static __global__ void detect(const std::uint8_t *pixels, std::uint32_t *spot) {
    unsigned at = blockIdx.x * THREADS + threadIdx.x;
    if (at < PIXELS && pixels[at] == 255) {
        *spot = at;
    }
}

static bool ok(cudaError_t result) {
    if (result != cudaSuccess) {
        std::fprintf(stderr, "%s\n", cudaGetErrorString(result));
    }
    return result == cudaSuccess;
}

struct topics {
    pw::topic frames, spots;

    explicit topics(const pw::domain &domain)
        : frames(domain.topic("examples/gpu/frames", on_gpu(pw::topic_options().tensor<std::uint8_t>({HEIGHT, WIDTH})))),
          spots(domain.topic("examples/gpu/spots", on_gpu(pw::topic_options().tensor<std::uint32_t>({1})))) {}

    static pw::topic_options on_gpu(pw::topic_options options) {
        options.device = "cuda:0";
        options.depth = 8;
        return options;
    }
};

static pw::subscriber until_idle(const pw::topic &topic) {
    pw::subscriber_options options;
    options.until_idle = 1;
    return topic.subscriber(options);
}

static void camera(const topics &topics, cudaStream_t stream, unsigned frames) {
    pw::publisher publisher = topics.frames.publisher();
    publisher.wait_for_subscribers(1);
    for (unsigned frame = 0; frame < frames; frame++) {
        pw::loan loan = publisher.loan<std::uint8_t>({HEIGHT, WIDTH});
        draw<<<BLOCKS, THREADS, 0, stream>>>(loan.device<std::uint8_t>().data(), frame);
        loan.publish_on(stream);
    }
    publisher.drain();
}

static void detector(const topics &topics, cudaStream_t stream) {
    pw::publisher publisher = topics.spots.publisher();
    pw::subscriber frames = until_idle(topics.frames);
    publisher.wait_for_subscribers(1);
    for (pw::sample &frame : frames) {
        pw::loan loan = publisher.loan<std::uint32_t>({1});
        loan.rests_on(frame);
        auto pixels = frame.device_on<std::uint8_t>(stream);
        detect<<<BLOCKS, THREADS, 0, stream>>>(pixels.data(), loan.device<std::uint32_t>().data());
        loan.publish_on(stream);
        frame.close_on(stream);
    }
    publisher.drain();
}

static bool writer(const topics &topics, unsigned frames) {
    unsigned right = 0, number = 0;
    pw::subscriber spots = until_idle(topics.spots);
    auto start = std::chrono::steady_clock::now();
    for (pw::sample &sample : spots) {
        sample.wait();
        std::uint32_t spot = 0;
        sample.read(0, &spot, sizeof spot);
        sample.check();
        right += spot == spot_of(number);
        number++;
    }
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%u of %u spots are right, %.0f frames a second\n", right, number, number / took.count());
    return right == frames;
}

int main(int count, char **arguments) try {
    std::string role = count > 2 ? arguments[1] : "all";
    const char *number = count > 1 ? arguments[count - 1] : "1000";
    unsigned frames = static_cast<unsigned>(std::stoul(number));
    pid_t camera_process = role == "all" ? start("camera", number) : 0;
    pid_t detector_process = role == "all" ? start("detector", number) : 0;

    cudaStream_t stream;
    cudaFuncAttributes attributes;
    /* Kernels are loaded before a stream waits for another process: loading one waits for the streams. */
    if (!ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) || !ok(cudaFuncGetAttributes(&attributes, draw)) ||
        !ok(cudaFuncGetAttributes(&attributes, detect))) {
        return 1;
    }
    pw::domain domain = pw::domain::connect();
    topics topics(domain);
    if (role == "camera") {
        camera(topics, stream, frames);
    } else if (role == "detector") {
        detector(topics, stream);
    } else if (!writer(topics, frames)) {
        return 1;
    }
    return role == "all" && !(succeeded(camera_process) && succeeded(detector_process));
} catch (const pw::error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
