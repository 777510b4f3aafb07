/* Segments, pools, timelines, semaphores and queues in C++. */
#include "check.hpp"

#include <array>
#include <thread>

#include <poll.h>
#include <unistd.h>

namespace pw = partywall;
using namespace std::chrono_literals;

/* The beginning of the struct of dlpack.h 1.x. */
struct tensor_head {
    std::uint32_t version[2];
    void *context;
    void (*deleter)(tensor_head *);
};

static void delete_tensor(DLManagedTensorVersioned *tensor) {
    tensor_head *head = reinterpret_cast<tensor_head *>(tensor);
    head->deleter(head);
}

static void segments(const pw::domain &domain) {
    FAILS(PW_NOT_FOUND, not_found, domain.open("weights"));
    pw::segment_options options;
    options.is_mutable = 1;
    options.reserve = 1 << 20;
    pw::build build = OK(domain.build("weights", options));
    OK(build.tensor<std::int32_t>("ids", {4}));
    OK(build.view("end", PW_DTYPE_I32, {2}, nullptr, "ids", 8));
    OK(build.tensor<float>("rows", {2, 2}));
    OK(build.metadata("epoch", "7"));
    OK(build.allocate());
    OK(build.write("ids", std::vector<std::int32_t>{1, 2, 3, 4}));
    OK(build.as<float>("rows"))[3] = 8.0F;
    pw::segment ours = OK(build.commit());
    CHECK(!build);
    FAILS(PW_INVALID_ARGUMENT, error, build.commit());

    pw::segment theirs = OK(domain.open("weights", 1s));
    CHECK(OK(theirs.info()).tensors == 3 && OK(theirs.info()).version == 1);
    CHECK(OK(theirs.as<std::int32_t>("end"))[1] == 4 && OK(theirs.as<std::int32_t>("end")).size() == 2);
    CHECK(OK(theirs.as<std::int32_t>("ids"))[2] == 3 && OK(theirs.as<float>("rows"))[3] == 8.0F);
    FAILS(PW_MISMATCH, error, theirs.as<float>("ids"));
    FAILS(PW_DENIED, error, theirs.as_mut<float>("rows"));
    FAILS(PW_NOT_FOUND, not_found, theirs.as<float>("absent"));
    FAILS(PW_INVALID_ARGUMENT, error, theirs.as<float>(std::string("ids\0x", 5)));
    FAILS(PW_MISMATCH, error, theirs.device<std::byte>("ids"));
    CHECK(std::string(OK(theirs.tensor_at(2)).name) == "rows" && OK(theirs.tensor("rows")).rank == 2);
    CHECK(OK(theirs.metadata("epoch")) == "7" && !OK(theirs.metadata("absent")));
    CHECK(OK(theirs.metadata_at(0)).first == "epoch");
    std::int32_t second = 0;
    OK(theirs.read("ids", 4, &second, sizeof second));
    CHECK(second == 2);

    pw::open_options writable;
    writable.read_write = 1;
    pw::segment shared = OK(domain.open("weights", 0s, writable));
    OK(shared.as_mut<float>("rows"))[0] = 5.0F;
    OK(shared.write("ids", 0, &second, sizeof second));
    CHECK(OK(theirs.as<float>("rows"))[0] == 5.0F && OK(theirs.as<std::int32_t>("ids"))[0] == 2);

    pw::growth growth = OK(pw::growth::create());
    OK(growth.extend("rows", 3));
    OK(growth.spare(64));
    OK(growth.tensor<std::uint8_t>("flags", {10}));
    OK(growth.commit(ours));
    CHECK(OK(theirs.refresh()) == PW_GROWN && OK(theirs.as<float>("rows")).size() == 6);
    CHECK(!OK(theirs.newer()).has_value());
    OK(theirs.check());

    pw::descriptors descriptors = OK(domain.descriptors("weights"));
    CHECK(OK(descriptors.info()).chunks >= 1 && OK(descriptors.chunk(0)).fd >= 0);
    CHECK(OK(descriptors.tensor("rows")).bytes == 24);
    OK(domain.remove("weights"));
    FAILS(PW_NOT_FOUND, not_found, domain.open("weights"));

    FAILS(PW_INVALID_ARGUMENT, error, pw::publication().commit_copy());
    pw::publication publication = OK(domain.publication("memory"));
    OK(publication.metadata("a", "b"));
}

static void pools(const pw::domain &domain) {
    pw::pool_options options;
    options.block_bytes = 64;
    options.blocks = 2;
    pw::pool pool = OK(domain.pool("blocks", options));
    pw::block block = OK(pool.alloc());
    OK(block.zero());
    OK(block.write(std::array<float, 2>{1.0F, 2.0F}));
    CHECK(OK(block.as<float>())[1] == 2.0F && OK(block.as()).size() == 64);
    OK(block.set_range(4, 8));
    CHECK(OK(block.as<float>())[0] == 2.0F && OK(block.as<float>()).size() == 2);
    OK(block.set_range(1, 8));
    FAILS(PW_INVALID_ARGUMENT, error, block.as<float>());
    OK(block.set_range(4, 60));
    OK(block.set_tensor<float>({2}));
    CHECK(OK(block.info()).dtype == PW_DTYPE_F32 && OK(block.info()).rank == 1);
    std::optional<pw::block> other = OK(pool.try_alloc());
    CHECK(other.has_value() && !OK(pool.try_alloc()).has_value());
    FAILS(PW_TIMED_OUT, timed_out, pool.alloc(1ms));

    std::string offered = OK(block.offer());
    CHECK(!block);
    pw::block accepted = OK(pool.accept(offered));
    float first = 0;
    OK(accepted.read(0, &first, sizeof first));
    CHECK(first == 1.0F);
    FAILS(PW_GONE, gone, pool.accept(offered));
    other.reset();
    CHECK(OK(pool.info()).free == 1);
    OK(pool.check());
    CHECK(OK(OK(domain.open_pool("blocks")).info()).blocks == 2);
    FAILS(PW_DENIED, error, domain.create_pool("blocks", options));
}

/* The smallest safetensors file. */
static void files(const pw::domain &domain) {
    std::string header = R"({"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})";
    std::uint64_t length = header.size();
    std::string path = "/tmp/pw-cpp-" + std::to_string(getpid()) + ".safetensors";
    std::FILE *file = std::fopen(path.c_str(), "wb");
    CHECK(file != nullptr && std::fwrite(&length, sizeof length, 1, file) == 1);
    CHECK(std::fputs((header + "abc").c_str(), file) >= 0 && std::fclose(file) == 0);
    pw::segment segment = OK(domain.put_file("model", path));
    CHECK(std::remove(path.c_str()) == 0);
    CHECK(OK(segment.as<std::uint8_t>("x"))[2] == 'c');
    FAILS(PW_SYSTEM, error, domain.put_file("absent", path));
}

static void order(const pw::domain &domain) {
    pw::timeline timeline = OK(domain.timeline("steps"));
    pw::timeline_event event = OK(timeline.event(2));
    {
        pw::writer writer = OK(domain.writer("steps"));
        FAILS(PW_BUSY, busy, domain.writer("steps"));
        FAILS(PW_TIMED_OUT, timed_out, timeline.wait(1, 1ms));
        OK(writer.rests_on(OK(domain.timeline("earlier"))));
        OK(writer.signal(2));
        OK(timeline.wait(2));
        pollfd wanted = {event.fd(), POLLIN, 0};
        CHECK(poll(&wanted, 1, 10000) == 1);
    }
    FAILS(PW_GONE, gone, timeline.wait(3));
    CHECK(OK(timeline.info()).value == 2 && OK(timeline.info()).has_ended);
    OK(timeline.check());
    pw::timeline left = OK(domain.timeline("left"));
    OK(left.abandon());
    FAILS(PW_GONE, gone, left.wait(1));

    pw::semaphore semaphore = OK(domain.semaphore("slots", 1));
    pw::permit permit = OK(semaphore.acquire());
    CHECK(!OK(semaphore.try_acquire()).has_value());
    FAILS(PW_TIMED_OUT, timed_out, semaphore.acquire(1ms));
    OK(permit.close());
    CHECK(OK(semaphore.info()).available == 1);
}

static void queues(const pw::domain &domain) {
    pw::queue_options options;
    options.inputs = options.outputs = 4;
    options.input_bytes = options.output_bytes = 16;
    pw::queue queue = OK(domain.queue("tasks", options));
    std::thread worker([&queue] {
        for (auto &claimed : queue.claims(10s)) {
            pw::claim claim = OK(std::move(claimed));
            if (OK(claim.kind()) == "last") {
                OK(claim.complete());
                break;
            }
            if (OK(claim.info()).attempt == 1) {
                OK(claim.fail("the first attempt"));
                continue;
            }
            CHECK(OK(claim.arguments()).size() == 3 && OK(claim.input_info(0)).bytes == 16);
            OK(claim.wait_inputs());
            pw::span<const float> numbers = OK(claim.input<float>(0));
            float second = 0;
            OK(claim.input_read(0, 4, &second, sizeof second));
            CHECK(second == numbers[1]);
            OK(claim.output_write(std::array<float, 2>{1.0F, second}));
            OK(claim.output<float>())[1] = second * 2;
            OK(claim.output_set_tensor<float>({2}));
            OK(claim.complete());
        }
    });
    pw::task_options with_output;
    with_output.arguments = "abc";
    with_output.arguments_length = 3;
    with_output.output_bytes = 16;
    pw::task task = OK(pw::task::create("double", with_output));
    pw::block input = OK(queue.alloc_input());
    OK(input.as<float>())[1] = 21.0F;
    OK(task.input(input));
    CHECK(!input);
    pw::ticket ticket = OK(queue.submit(task));
    CHECK(!task);
    pw::task_result result = OK(ticket.wait());
    CHECK(result.attempt == 2 && OK(result.output->as<float>())[1] == 42.0F);
    CHECK(OK(result.output->as<float>())[0] == 1.0F && OK(result.output->info()).rank == 1);
    CHECK(OK(ticket.status()) == PW_TASK_GONE);
    FAILS(PW_GONE, gone, ticket.try_take());
    pw::task last = OK(pw::task::create("last"));
    pw::ticket end = OK(queue.submit(last));
    CHECK(!OK(end.wait()).output.has_value());
    worker.join();

    int claimed = 0;
    for (auto &claim : queue.claims(1ms)) {
        static_cast<void>(claim);
        claimed++;
    }
    CHECK(claimed == 0 && OK(queue.info()).pending == 0 && !OK(queue.try_claim()).has_value());
    OK(OK(domain.open_queue("tasks")).check());
    FAILS(PW_DENIED, error, domain.create_queue("tasks", options));
    pw::task never = OK(pw::task::create("never"));
    pw::ticket waiting = OK(queue.submit(never));
    CHECK(!OK(waiting.try_take()).has_value());
    OK(waiting.cancel());
    CHECK(OK(queue.fd()) >= 0);
    OK(queue.fd_clear());
    OK(queue.check());
}

static void names(const pw::domain &domain) {
    pw::watch watch = OK(domain.watch("seen*"));
    pw::topic topic = OK(domain.topic("seen", pw::topic_options().tensor<int>({2})));
    auto event = OK(watch.next(10s));
    CHECK(event.has_value() && std::string(event->name) == "seen");
    CHECK(OK(watch.point()).second > 0);
    pw::names names = OK(domain.names());
    bool found = false;
    for (std::size_t n = 0; n < names.size(); n++) {
        found = found || std::string(OK(names.at(n)).name) == "seen";
    }
    CHECK(found);
    FAILS(PW_INVALID_ARGUMENT, error, names.at(names.size()));
    pw::members members = OK(domain.members());
    CHECK(members.size() == 1 && OK(members.at(0)).member == OK(domain.info()).member);
    FAILS(PW_NOT_FOUND, not_found, domain.evict(4711, 0, false));

    pw::publisher publisher = OK(topic.publisher());
    pw::subscriber subscriber = OK(topic.subscriber());
    OK(publisher.send({2}, std::vector<int>{3, 4}));
    pw::sample sample = OK(subscriber.recv());
    DLManagedTensorVersioned *tensor = OK(sample.to_dlpack());
    CHECK(!sample);
    pw::loan loan = OK(publisher.loan<int>({2}));
    OK(loan.copy_dlpack(tensor));
    OK(loan.publish());
    CHECK(OK(OK(subscriber.recv()).as<int>())[1] == 4);
    delete_tensor(tensor);
}

int main() {
    pw::domain domain = OK(pw::domain::connect());
    names(domain);
    segments(domain);
    files(domain);
    pools(domain);
    order(domain);
    queues(domain);
}
