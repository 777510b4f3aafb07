/* Memory of a GPU in C++: samples, blocks and tasks go with streams; a function releases what was published. */
#include "check.hpp"

#include <array>
#include <cstring>

#include <sys/wait.h>
#include <unistd.h>

#include "../c/gpu.h"

namespace pw = partywall;

/* The type that CUDA's run-time API and its driver have for it. */
static CUstream_st *new_stream() { return static_cast<CUstream_st *>(stream_create()); }

static const std::array<float, 4> VALUES = {1.0F, 2.0F, 3.0F, 4.0F};

static void samples(const pw::domain &domain) {
    pw::topic_options options;
    options.device = "cuda:0";
    options.tensor<float>({4});
    pw::topic topic = OK(domain.topic("stream", options));
    pw::publisher publisher = OK(topic.publisher());
    pw::subscriber subscriber = OK(topic.subscriber());
    CUstream_st *producer = new_stream();
    CUstream_st *consumer = new_stream();
    for (int n = 0; n < 3; n++) {
        pw::loan loan = OK(publisher.loan<float>({4}));
        FAILS(PW_MISMATCH, error, loan.as<float>());
        FAILS(PW_MISMATCH, error, loan.device<int>());
        copy_in(OK(loan.device<float>()).data(), VALUES.data(), sizeof VALUES, producer);
        CHECK(OK(loan.publish_on(producer)) == std::uint64_t(n));
        CHECK(!loan);
        pw::sample sample = OK(subscriber.recv());
        pw::span<const float> elements = OK(sample.device_on<float>(consumer));
        std::array<float, 4> seen{};
        copy_out(seen.data(), elements.data(), sizeof seen, consumer);
        OK(sample.close_on(consumer));
        CHECK(!sample);
        stream_wait(consumer);
        CHECK(elements.size() == 4 && seen == VALUES);
    }
    OK(publisher.drain());
    OK(publisher.send({4}, VALUES));
    CHECK(OK(OK(subscriber.recv()).to_vector<float>())[3] == 4.0F);
}

static void order(const pw::domain &domain) {
    CUstream_st *first = new_stream();
    void *second = stream_create(); /* any pointer is a stream */
    pw::pool_options options;
    options.device = "cuda:0";
    options.blocks = 1;
    options.block_bytes = 16;
    pw::pool pool = OK(domain.pool("blocks", options));
    pw::block block = OK(pool.alloc());
    OK(block.zero_on(first));
    pw::timeline timeline = OK(domain.timeline("order"));
    pw::writer writer = OK(domain.writer("order"));
    OK(timeline.wait_on(second, 1));
    OK(writer.signal_on(first, 1));
    std::array<float, 4> seen = VALUES;
    copy_out(seen.data(), OK(block.device<float>()).data(), sizeof seen, second);
    OK(block.close_on(second));
    stream_wait(second);
    CHECK((seen == std::array<float, 4>{}));
    OK(timeline.wait(1));
    OK(OK(pool.alloc()).close());
}

static void tasks(const pw::domain &domain) {
    pw::queue_options options;
    options.device = "cuda:0";
    options.inputs = options.outputs = 2;
    options.input_bytes = options.output_bytes = 16;
    pw::queue queue = OK(domain.queue("tasks", options));
    CUstream_st *submitter = new_stream();
    CUstream_st *worker = new_stream();
    pw::block input = OK(queue.alloc_input());
    copy_in(OK(input.device()).data(), VALUES.data(), sizeof VALUES, submitter);
    pw::task_options with_output;
    with_output.output_bytes = 16;
    pw::task task = OK(pw::task::create("copy", with_output));
    OK(task.input(input));
    pw::ticket ticket = OK(queue.submit_on(task, submitter));
    pw::claim claim = OK(queue.claim());
    OK(claim.wait_inputs_on(worker));
    std::array<float, 4> between{};
    copy_out(between.data(), OK(claim.input_device(0)).data(), sizeof between, worker);
    stream_wait(worker);
    copy_in(OK(claim.output_device()).data(), between.data(), sizeof between, worker);
    OK(claim.complete_on(worker));
    CHECK(!claim);
    pw::task_result result = OK(ticket.wait());
    std::array<float, 4> seen{};
    OK(result.output->read(0, seen.data(), sizeof seen));
    CHECK(seen == VALUES);
}

static pw::segment weights(const pw::domain &domain, float first, bool is_mutable) {
    pw::segment_options options;
    options.device = "cuda:0";
    options.is_mutable = is_mutable;
    pw::build build = OK(domain.build(is_mutable ? "mutable" : "frozen", options));
    OK(build.tensor<float>("w", {4}));
    OK(build.allocate());
    OK(build.write("w", std::array<float, 4>{first, 2.0F, 3.0F, 4.0F}));
    return OK(build.commit());
}

static void versions(const pw::domain &domain) {
    pw::segment old = weights(domain, 1.0F, false);
    const float *at = OK(old.device<float>("w")).data();
    FAILS(PW_DENIED, error, old.device_mut<float>("w"));
    pw::segment next = weights(domain, 5.0F, true);
    FAILS(PW_MISMATCH, error, old.advance(next));
    OK(next.close());
    next = weights(domain, 5.0F, false);
    OK(old.advance(next));
    CHECK(!next);
    FAILS(PW_MISMATCH, error, old.ipc_handle("w"));
    float first = 0;
    OK(old.read("w", 0, &first, sizeof first));
    CHECK(first == 5.0F && OK(old.device<float>("w")).data() == at);

    pw::segment ours = weights(domain, 1.0F, true);
    CUstream_st *stream = new_stream();
    copy_in(OK(ours.device_mut<float>("w")).data(), &first, sizeof first, stream);
    stream_wait(stream);
    first = 0;
    OK(ours.read("w", 0, &first, sizeof first));
    CHECK(first == 5.0F);
}

static void publications(const pw::domain &domain) {
    int released = 0;
    void *memory = gpu_memory(4096);
    pw::publication publication = OK(domain.publication("existing"));
    FAILS(PW_INVALID_ARGUMENT, error, publication.tensor("x", 0, {4}, memory, [&] { released++; }));
    FAILS(PW_INVALID_ARGUMENT, error, publication.tensor("x", PW_DTYPE_F32, {4}, nullptr, [&] { released++; }));
    CHECK(released == 0);
    OK(publication.tensor("x", PW_DTYPE_F32, {4}, memory, [&] { released++; }));
    pw::segment segment = OK(publication.commit());
    CHECK(!publication && released == 0);
    CHECK(OK(segment.device<float>("x")).data() == memory);
    OK(segment.close());
    CHECK(released == 1);
    publication = OK(domain.publication("dropped"));
    OK(publication.tensor("x", PW_DTYPE_F32, {4}, memory, [&] { released++; }));
    publication = pw::publication();
    CHECK(released == 2);
}

#ifndef PARTYWALL_NO_EXCEPTIONS
/* What a function of the program throws ends the program, as anywhere where nothing may be thrown. */
static int throwing() {
    std::set_terminate([] { _exit(42); });
    use_gpu();
    pw::domain domain = pw::domain::connect();
    pw::publication publication = domain.publication("thrown");
    publication.tensor("x", PW_DTYPE_F32, {4}, gpu_memory(4096), [] { throw 1; });
    publication.commit().close();
    return 1;
}

static void throws() {
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "gpu", "throws", static_cast<char *>(nullptr));
        _exit(127);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 42);
}
#endif

int main(int count, char **) {
#ifndef PARTYWALL_NO_EXCEPTIONS
    if (count > 1) {
        return throwing();
    }
    throws();
#endif
    CHECK(count == 1);
    use_gpu();
    pw::domain domain = OK(pw::domain::connect());
    samples(domain);
    order(domain);
    tasks(domain);
    versions(domain);
    publications(domain);
}
