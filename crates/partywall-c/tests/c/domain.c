/* What is known about a domain: names, members, events, the broker; each mistake of a caller is found out. */
#include "check.h"

static pw_pool *pool(pw_domain *domain, const char *name) {
    pw_pool_options options = PW_INIT(pw_pool_options);
    options.blocks = 1;
    options.block_bytes = 64;
    options.kept = 1;
    pw_pool *pool = NULL;
    OK(pw_pool_create(domain, name, &options, &pool));
    return pool;
}

static void names(pw_domain *domain) {
    pw_names *names = NULL;
    size_t count = 9;
    OK(pw_names_open(domain, &names, &count));
    CHECK(count == 0);
    OK(pw_names_close(names));
    pw_pool *frames = pool(domain, "frames");
    OK(pw_names_open(domain, &names, &count));
    CHECK(count == 1);
    pw_name_info about = PW_INIT(pw_name_info);
    OK(pw_names_get(names, 0, &about));
    CHECK(strcmp(about.name, "frames") == 0 && strcmp(about.object, "pool") == 0 && strcmp(about.kind, "host") == 0);
    CHECK(strcmp(about.device, "host") == 0 && about.version == 1 && about.bytes >= 64 && about.is_kept);
    CHECK(about.committer == (uint32_t)getpid());
    FAILS(PW_INVALID_ARGUMENT, pw_names_get(names, 1, &about));
    FAILS(PW_INVALID_ARGUMENT, pw_names_get(names, SIZE_MAX, &about));
    FAILS(PW_INVALID_ARGUMENT, pw_names_get((pw_names *)frames, 0, &about));
    FAILS(PW_INVALID_ARGUMENT, pw_names_get(names, 0, NULL));
    about.size = 5000;
    FAILS(PW_INVALID_ARGUMENT, pw_names_get(names, 0, &about));
    OK(pw_names_close(names));
    FAILS(PW_INVALID_ARGUMENT, pw_names_close(names));
    FAILS(PW_INVALID_ARGUMENT, pw_names_open(domain, &names, NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_names_open(NULL, &names, &count));
    OK(pw_pool_close(frames));
}

static void events(pw_domain *domain) {
    pw_watch *watch = NULL;
    FAILS(PW_INVALID_ARGUMENT, pw_watch_open(domain, "\xff", 0, 0, &watch));
    FAILS(PW_INVALID_ARGUMENT, pw_watch_open(domain, NULL, 0, 0, &watch));
    OK(pw_watch_open(domain, "watched/*", 0, 0, &watch));
    pw_event_info event = PW_INIT(pw_event_info);
    OK(pw_watch_next(watch, 1000, &event));
    CHECK(event.change == NULL);
    uint64_t instance = 0;
    uint64_t sequence = 0;
    OK(pw_watch_point(watch, &instance, &sequence));
    CHECK(instance != 0);
    OK(pw_pool_close(pool(domain, "watched/1")));
    FAILS(PW_INVALID_ARGUMENT, pw_watch_next(watch, PW_FOREVER, NULL));
    event.size = 1;
    FAILS(PW_INVALID_ARGUMENT, pw_watch_next(watch, PW_FOREVER, &event)); /* loses no event */
    event.size = sizeof event;
    OK(pw_watch_next(watch, PW_FOREVER, &event));
    CHECK(strcmp(event.name, "watched/1") == 0 && strcmp(event.object, "pool") == 0 && event.at_ms > 0);
    OK(pw_watch_close(watch));
    FAILS(PW_INVALID_ARGUMENT, pw_watch_next(watch, 0, &event));
    /* Again, from the point before. */
    OK(pw_watch_open(domain, "watched/*", instance, sequence, &watch));
    OK(pw_watch_next(watch, PW_FOREVER, &event));
    CHECK(strcmp(event.change, "committed") == 0 || strcmp(event.change, "created") == 0);
    CHECK(strcmp(event.name, "watched/1") == 0 && event.pid == (uint32_t)getpid());
    OK(pw_watch_close(watch));
    /* The broker does not know such a point. */
    OK(pw_watch_open(domain, "*", 1, 1, &watch));
    OK(pw_watch_next(watch, PW_FOREVER, &event));
    CHECK(strcmp(event.change, "missed") == 0 && *event.name == 0);
    OK(pw_watch_close(watch));
}

static void members(pw_domain *domain) {
    pw_domain *other = NULL;
    OK(pw_domain_connect(NULL, &other));
    pw_domain_info broker = PW_INIT(pw_domain_info);
    OK(pw_domain_info_get(domain, &broker));
    CHECK(broker.members == 1 && broker.broker_pid != 0 && broker.names == 2);
    uint64_t own = broker.member;
    OK(pw_domain_info_get(other, &broker));
    uint64_t others = broker.member;
    CHECK(own != others);
    pw_members *members = NULL;
    size_t count = 0;
    OK(pw_members_open(domain, &members, &count));
    CHECK(count == 2);
    pw_member_info about = PW_INIT(pw_member_info);
    for (size_t i = 0; i < count; i++) {
        OK(pw_members_get(members, i, &about));
        CHECK(about.pid == (uint32_t)getpid() && strcmp(about.state, "alive") == 0 && *about.command != 0);
        CHECK(about.member == own || about.member == others);
    }
    FAILS(PW_INVALID_ARGUMENT, pw_members_get(members, count, &about));
    OK(pw_members_close(members));
    FAILS(PW_INVALID_ARGUMENT, pw_members_close(members));

    FAILS(PW_INVALID_ARGUMENT, pw_domain_evict(domain, 0, 0, 0, NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_domain_evict(domain, others, 1, 0, NULL));
    FAILS(PW_INVALID_ARGUMENT, pw_domain_evict(domain, own, 0, 0, NULL));
    FAILS(PW_NOT_FOUND, pw_domain_evict(domain, 4711, 0, 0, NULL));
    OK(pw_domain_evict(domain, others, 0, 0, &count));
    CHECK(count == 1);
    CHECK(pw_domain_ping(other) != PW_OK);
    OK(pw_domain_close(other));
}

int main(void) {
    CHECK(strcmp(pw_version(), "0.1.0") >= 0);
    pw_domain *domain = NULL;
    OK(pw_domain_connect(NULL, &domain));
    names(domain);
    events(domain);
    members(domain);
    OK(pw_domain_close(domain));
    return 0;
}
