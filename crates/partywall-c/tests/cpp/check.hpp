/* What the test programs share. They are compiled with and without exceptions. */
#include <partywall/partywall.hpp>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                       \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

inline void check_error(const char *file, int line, pw_status wanted, const partywall::error &error) {
    if (error.status() != wanted || !*error.message() || !*error.advice() || !*error.anchor()) {
        std::fprintf(stderr, "%s:%d: failed in another way (%d): %s\n", file, line, int(error.status()), error.what());
        std::exit(1);
    }
}

#ifdef PARTYWALL_NO_EXCEPTIONS
/* The value of a call, which must not fail. */
#define OK(...) (__VA_ARGS__).value()
/* The call fails with this status; `type` is the class of the exception. */
#define FAILS(wanted, type, ...)                                                                                       \
    do {                                                                                                               \
        auto got = (__VA_ARGS__);                                                                                      \
        CHECK(!got && !got.has_value());                                                                               \
        check_error(__FILE__, __LINE__, wanted, got.error());                                                          \
    } while (0)
#else
#define OK(...) (__VA_ARGS__)
#define FAILS(wanted, type, ...)                                                                                       \
    do {                                                                                                               \
        bool threw = false;                                                                                            \
        try {                                                                                                          \
            static_cast<void>(__VA_ARGS__);                                                                            \
        } catch (const partywall::type &error) {                                                                       \
            threw = true;                                                                                              \
            check_error(__FILE__, __LINE__, wanted, error);                                                            \
        }                                                                                                              \
        CHECK(threw);                                                                                                  \
    } while (0)
#endif
