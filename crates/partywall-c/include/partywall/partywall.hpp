/* Partywall for C++17 and later, over partywall.h, which says what each function does, whether it blocks and which
   threads may call it. docs/c.md is the guide.

   - Objects own their handles: they can be moved, not copied, and close what they own when they are destroyed.
   - A failed call throws `partywall::error` or a class that is derived from it. With PARTYWALL_NO_EXCEPTIONS, or if the
     compiler has exceptions switched off, each call returns a `partywall::result` in place of its value.
   - A stream is a `cudaStream_t`, a `CUstream` or a `void *`. No header of CUDA is needed.
   - A timeout is any `std::chrono` duration; `partywall::forever` never ends. */

#ifndef PARTYWALL_HPP
#define PARTYWALL_HPP

#if !defined(__cplusplus) || __cplusplus < 201703L
#error "partywall.hpp needs C++17: compile with -std=c++17 or later; programs in C include partywall.h"
#endif

#include <partywall/partywall.h>

#include <chrono>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#if __has_include(<version>)
#include <version>
#endif
#ifdef __cpp_lib_span
#include <span>
#endif

#if !defined(PARTYWALL_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define PARTYWALL_NO_EXCEPTIONS
#endif

/* Files of one program may be compiled with and without exceptions, and as C++17 and C++20: what differs has another
   name for the linker. */
#if defined(PARTYWALL_NO_EXCEPTIONS) && defined(__cpp_lib_span)
#define PARTYWALL_VARIANT results_std
#elif defined(PARTYWALL_NO_EXCEPTIONS)
#define PARTYWALL_VARIANT results
#elif defined(__cpp_lib_span)
#define PARTYWALL_VARIANT exceptions_std
#else
#define PARTYWALL_VARIANT exceptions
#endif

/* What `cudaStream_t` and `CUstream` point to. */
struct CUstream_st;

namespace partywall {
inline namespace PARTYWALL_VARIANT {

using status = pw_status;

/* A timeout, in any unit. */
using duration = std::chrono::nanoseconds;

/* A timeout that never ends. */
inline constexpr duration forever{PW_FOREVER};

/* A dimension of a topic's shape that may have any length. */
inline constexpr std::uint64_t any = PW_ANY;

/* A stream of CUDA; null is the legacy default stream. The address of a stream is refused. */
class stream_ref {
  public:
    stream_ref(std::nullptr_t) noexcept {}
    stream_ref(CUstream_st *stream) noexcept : raw_(stream) {}
    stream_ref(void *stream) noexcept : raw_(stream) {}
    template <typename Pointed> stream_ref(Pointed **) = delete;

    void *raw() const noexcept { return raw_; }

  private:
    void *raw_ = nullptr;
};

/* A range of elements: `std::span` from C++20 on. */
#ifdef __cpp_lib_span
template <typename Element> using span = std::span<Element>;
#else
template <typename Element> class span {
  public:
    using element_type = Element;
    using value_type = std::remove_cv_t<Element>;

    constexpr span() noexcept = default;
    constexpr span(Element *data, std::size_t size) noexcept : data_(data), size_(size) {}

    constexpr Element *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(Element); }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr Element *begin() const noexcept { return data_; }
    constexpr Element *end() const noexcept { return data_ + size_; }
    constexpr Element &front() const { return data_[0]; }
    constexpr Element &back() const { return data_[size_ - 1]; }
    constexpr Element &operator[](std::size_t index) const { return data_[index]; }

  private:
    Element *data_ = nullptr;
    std::size_t size_ = 0;
};
#endif

/* A name, which ends with a zero byte. */
class text {
  public:
    text(const char *text) noexcept : text_(text) {}
    /* A zero byte within would cut the text off. The library refuses the one that stands for it: it is not UTF-8. */
    text(const std::string &text) noexcept : text_(text.find('\0') == std::string::npos ? text.c_str() : "\xff") {}

    const char *c_str() const noexcept { return text_; }

  private:
    const char *text_;
};

/* The lengths of the dimensions of a tensor: `{480, 640, 3}`, or a container of them, which has to stay. */
class shape_ref {
  public:
    shape_ref(std::initializer_list<std::uint64_t> lengths) noexcept {
        /* They stay as long as the arguments of the call. */
        data_ = lengths.begin();
        rank_ = lengths.size();
    }
    shape_ref(const std::uint64_t *lengths, std::size_t rank) noexcept : data_(lengths), rank_(rank) {}
    template <typename Container,
              typename = std::enable_if_t<std::is_same_v<
                  std::decay_t<decltype(*std::data(std::declval<const Container &>()))>, std::uint64_t>>>
    shape_ref(const Container &lengths) noexcept : data_(std::data(lengths)), rank_(std::size(lengths)) {}

    const std::uint64_t *data() const noexcept { return data_; }
    std::size_t rank() const noexcept { return rank_; }

  private:
    const std::uint64_t *data_ = nullptr;
    std::size_t rank_ = 0;
};

/* The element type of a tensor for a type of C++. For a type of yours, such as `__half`:
   `template <> struct partywall::dtype_of<__half> { static constexpr std::uint32_t value = PW_DTYPE_F16; };` */
template <typename Element, typename = void> struct dtype_of;

template <> struct dtype_of<bool> { static constexpr std::uint32_t value = PW_DTYPE_BOOL; };
template <> struct dtype_of<std::byte> { static constexpr std::uint32_t value = PW_DTYPE_U8; };
template <> struct dtype_of<float> { static constexpr std::uint32_t value = PW_DTYPE_F32; };
template <> struct dtype_of<double> { static constexpr std::uint32_t value = PW_DTYPE_F64; };
template <> struct dtype_of<std::complex<float>> { static constexpr std::uint32_t value = PW_DTYPE_C64; };
template <> struct dtype_of<std::complex<double>> { static constexpr std::uint32_t value = PW_DTYPE_C128; };
template <typename Integer> struct dtype_of<Integer, std::enable_if_t<std::is_integral_v<Integer>>> {
    static_assert(sizeof(Integer) <= 8, "there is no element type for integers of this size");
    static constexpr std::uint32_t unsigned_value = sizeof(Integer) == 1   ? PW_DTYPE_U8
                                                    : sizeof(Integer) == 2 ? PW_DTYPE_U16
                                                    : sizeof(Integer) == 4 ? PW_DTYPE_U32
                                                                           : PW_DTYPE_U64;
    static constexpr std::uint32_t value = unsigned_value + (std::is_signed_v<Integer> ? 1 : 0);
};

/* Why a call has failed. */
class error : public std::exception {
  public:
    error(pw_status status, std::string message, std::string advice, std::string anchor, std::uint32_t pid = 0)
        : details_(std::make_shared<const details>(status, std::move(message), std::move(advice), std::move(anchor),
                                                   pid)) {}

    /* Returns what is known about the last call of this thread that failed. */
    static error last() {
        const pw_error *known = pw_last_error();
        return error(pw_error_status(known), pw_error_message(known), pw_error_advice(known), pw_error_anchor(known),
                     pw_error_pid(known));
    }

    /* Returns the class of the error, which says what a program can do about it. */
    pw_status status() const noexcept { return details_->status; }
    /* Returns what happened and why, in one sentence. */
    const char *message() const noexcept { return details_->message.c_str(); }
    /* Returns what to do about it. */
    const char *advice() const noexcept { return details_->advice.c_str(); }
    /* Returns the name of the entry of docs/troubleshooting.md about it. */
    const char *anchor() const noexcept { return details_->anchor.c_str(); }
    /* Returns the process that the error is about, such as the one that died; 0 if there is none. */
    std::uint32_t pid() const noexcept { return details_->pid; }
    /* Returns the message and the advice. */
    const char *what() const noexcept override { return details_->what.c_str(); }

  private:
    struct details {
        details(pw_status status, std::string message, std::string advice, std::string anchor, std::uint32_t pid)
            : status(status), pid(pid), message(std::move(message)), advice(std::move(advice)),
              anchor(std::move(anchor)), what(this->message + "; " + this->advice) {}

        pw_status status;
        std::uint32_t pid;
        std::string message, advice, anchor, what;
    };

    /* Exceptions are copied, which must not fail. */
    std::shared_ptr<const details> details_;
};

/* The errors that programs handle. Each other one is an `error`. */
class not_found : public error {
  public:
    explicit not_found(const error &from) noexcept : error(from) {}
};

class busy : public error {
  public:
    explicit busy(const error &from) noexcept : error(from) {}
};

class timed_out : public error {
  public:
    explicit timed_out(const error &from) noexcept : error(from) {}
};

class gone : public error {
  public:
    explicit gone(const error &from) noexcept : error(from) {}
};

class invalid_data : public error {
  public:
    explicit invalid_data(const error &from) noexcept : error(from) {}
};

class unreachable : public error {
  public:
    explicit unreachable(const error &from) noexcept : error(from) {}
};

#ifdef PARTYWALL_NO_EXCEPTIONS
/* The value of a call, or why it has failed. */
template <typename Value> class [[nodiscard]] result {
  public:
    using value_type = Value;

    result(Value value) : state_(std::in_place_index<0>, std::move(value)) {}
    result(partywall::error error) : state_(std::in_place_index<1>, std::move(error)) {}

    bool has_value() const noexcept { return state_.index() == 0; }
    explicit operator bool() const noexcept { return has_value(); }

    /* Returns the value. If there is none, the program ends with the error. */
    Value &value() & { return *checked(); }
    const Value &value() const & { return *const_cast<result *>(this)->checked(); }
    Value value() && { return std::move(*checked()); }
    Value &operator*() & { return *checked(); }
    Value operator*() && { return std::move(*checked()); }
    Value *operator->() { return checked(); }

    /* Returns the error. There is one unless `has_value()`. */
    const partywall::error &error() const { return *std::get_if<1>(&state_); }

  private:
    Value *checked() {
        if (Value *value = std::get_if<0>(&state_)) {
            return value;
        }
        std::fprintf(stderr, "%s\n", error().what());
        std::abort();
    }

    std::variant<Value, partywall::error> state_;
};

/* Whether a call has succeeded, or why it has failed. */
template <> class [[nodiscard]] result<void> {
  public:
    using value_type = void;

    result() noexcept = default;
    result(partywall::error error) : error_(std::move(error)) {}

    bool has_value() const noexcept { return !error_; }
    explicit operator bool() const noexcept { return has_value(); }

    /* If the call has failed, the program ends with the error. */
    void value() const {
        if (error_) {
            std::fprintf(stderr, "%s\n", error_->what());
            std::abort();
        }
    }

    /* Returns the error. There is one unless `has_value()`. */
    const partywall::error &error() const { return *error_; }

  private:
    std::optional<partywall::error> error_;
};

/* What a call returns whose value is a `Value`. */
template <typename Value> using returned = result<Value>;
#else
/* What a call returns whose value is a `Value`. */
template <typename Value> using returned = Value;
#endif

namespace detail {

#ifdef PARTYWALL_NO_EXCEPTIONS
template <typename Value> returned<Value> failed(error why) { return returned<Value>(std::move(why)); }
#else
template <typename Value> [[noreturn]] returned<Value> failed(const error &why) {
    switch (why.status()) {
    case PW_NOT_FOUND: throw not_found(why);
    case PW_BUSY: throw busy(why);
    case PW_TIMED_OUT: throw timed_out(why);
    case PW_GONE: throw gone(why);
    case PW_INVALID_DATA: throw invalid_data(why);
    case PW_UNREACHABLE: throw unreachable(why);
    default: throw why;
    }
}
#endif

/* Ends a call that has no value. */
inline returned<void> done(pw_status status) {
    if (status != PW_OK) {
        return failed<void>(error::last());
    }
    return returned<void>();
}

/* Ends a call that has the value that `make` returns. */
template <typename Value, typename Make> returned<Value> value(pw_status status, Make make) {
    if (status != PW_OK) {
        return failed<Value>(error::last());
    }
    return make();
}

/* Ends a call whose value is an object, by its handle. */
template <typename Object, typename Handle> returned<Object> object(pw_status status, Handle *const &handle) {
    return value<Object>(status, [&] { return Object(handle); });
}

/* Ends a call whose value is an object if there is one. */
template <typename Object, typename Handle>
returned<std::optional<Object>> maybe(pw_status status, Handle *const &handle) {
    return value<std::optional<Object>>(
        status, [&] { return handle ? std::optional<Object>(Object(handle)) : std::optional<Object>(); });
}

/* Ends a call about elements of another type than `Element`. */
template <typename Value, typename Element> returned<Value> mismatch(std::uint32_t has) {
    std::string is = pw_dtype_name(has);
    return failed<Value>(error(PW_MISMATCH,
                               "the elements are of type " + is + ", not " + pw_dtype_name(dtype_of<Element>::value),
                               "use it as " + is + ", or use its bytes", "wrong-dtype"));
}

/* Ends a call whose value is memory. `has` is the type of its elements; bytes may be those of any type. */
template <typename Element>
returned<span<Element>> elements(pw_status status, std::uint32_t has, void *const &data, const std::size_t &bytes) {
    using value_type = std::remove_cv_t<Element>;
    static_assert(std::is_trivially_copyable_v<value_type>, "elements are plain data");
    if (status == PW_OK && !std::is_same_v<value_type, std::byte> && has != dtype_of<value_type>::value) {
        return mismatch<span<Element>, value_type>(has);
    }
    if (status == PW_OK && reinterpret_cast<std::uintptr_t>(data) % alignof(value_type) != 0) {
        return failed<span<Element>>(error(PW_INVALID_ARGUMENT, "the elements are not aligned",
                                           "copy them out with read(), or change the range", "c-argument"));
    }
    return value<span<Element>>(
        status, [&] { return span<Element>(static_cast<Element *>(data), bytes / sizeof(Element)); });
}

/* Ends a call whose value is memory that has no element type. */
template <typename Element>
returned<span<Element>> memory(pw_status status, void *const &data, const std::size_t &bytes) {
    return elements<Element>(status, dtype_of<std::remove_cv_t<Element>>::value, data, bytes);
}

/* The sole owner of a handle. */
template <typename Handle, pw_status (*Close)(Handle *)> class owner {
  public:
    owner() noexcept = default;
    explicit owner(Handle *handle) noexcept : handle_(handle) {}
    owner(owner &&other) noexcept : handle_(other.release()) {}
    owner &operator=(owner &&other) noexcept {
        if (this != &other) {
            static_cast<void>(Close(std::exchange(handle_, other.release())));
        }
        return *this;
    }
    ~owner() {
        if (handle_) {
            static_cast<void>(Close(handle_));
        }
    }

    /* Returns the handle, which stays with its owner. */
    Handle *get() const noexcept { return handle_; }
    /* Returns the handle, which the caller closes from now on. */
    Handle *release() noexcept { return std::exchange(handle_, nullptr); }
    /* Whether there is a handle: it was not moved, released or closed. */
    explicit operator bool() const noexcept { return handle_ != nullptr; }

    /* Closes the handle now, and says whether that has failed, which the destructor does not. */
    returned<void> close() { return done(Close(release())); }

  protected:
    /* Ends a call that closes the handle if it succeeds. */
    returned<void> consumed(pw_status status) {
        if (status == PW_OK) {
            release();
        }
        return done(status);
    }

  private:
    Handle *handle_ = nullptr;
};

/* Iterates over what `source.next()` returns until that is empty. Without exceptions, an error is the last item. */
template <typename Source> class iterator {
  public:
    struct end {};
    using iterator_category = std::input_iterator_tag;
    using value_type = returned<typename Source::item>;
    using difference_type = std::ptrdiff_t;
    using pointer = value_type *;
    using reference = value_type &;

    explicit iterator(const Source &source) : source_(&source), item_(source.next()) {}

    reference operator*() { return *item_; }
    pointer operator->() { return &*item_; }
    iterator &operator++() {
        bool has_failed = false;
#ifdef PARTYWALL_NO_EXCEPTIONS
        has_failed = !item_->has_value();
#endif
        /* The item is closed before the next one is waited for. */
        item_.reset();
        if (!has_failed) {
            item_ = source_->next();
        }
        return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const iterator &at, end) noexcept { return !at.item_; }
    friend bool operator!=(const iterator &at, end) noexcept { return at.item_.has_value(); }

  private:
    const Source *source_;
    std::optional<value_type> item_;
};

/* Whether the last call has failed because of what the entry `anchor` of docs/troubleshooting.md is about. */
inline bool failed_as(const char *anchor) { return std::strcmp(pw_error_anchor(pw_last_error()), anchor) == 0; }

/* A container of plain elements that are next to each other. */
template <typename Container>
using element_of = std::remove_cv_t<std::remove_pointer_t<decltype(std::data(std::declval<const Container &>()))>>;

} // namespace detail

/* A struct of options of C, whose members are assigned: `options.depth = 8`. */
template <typename Struct> struct options : Struct {
    options() : Struct(pw_init<Struct>()) {}
};

using domain_options = options<pw_domain_options>;
using subscriber_options = options<pw_subscriber_options>;
using segment_options = options<pw_segment_options>;
using open_options = options<pw_open_options>;
using pool_options = options<pw_pool_options>;
using timeline_options = options<pw_timeline_options>;
using semaphore_options = options<pw_semaphore_options>;
using queue_options = options<pw_queue_options>;
using task_options = options<pw_task_options>;

/* How a topic is created: the members of `pw_topic_options`. */
struct topic_options : options<pw_topic_options> {
    /* Sets the type and shape of all samples. */
    template <typename Element> topic_options &tensor(shape_ref lengths) {
        dtype = dtype_of<Element>::value;
        lengths_.assign(lengths.data(), lengths.data() + lengths.rank());
        return *this;
    }

    /* Returns the options for a call. They are valid as long as this object. */
    pw_topic_options raw() const {
        pw_topic_options options = *this;
        if (!lengths_.empty()) {
            options.shape = lengths_.data();
            options.rank = static_cast<std::uint32_t>(lengths_.size());
        }
        return options;
    }

  private:
    std::vector<std::uint64_t> lengths_;
};

/* A sample that was received. Its block stays as it is until it is closed. */
class sample : public detail::owner<pw_sample, pw_sample_close> {
  public:
    using owner::owner;

    returned<pw_sample_info> info() const {
        pw_sample_info info = PW_INIT(pw_sample_info);
        return detail::value<pw_sample_info>(pw_sample_info_get(get(), &info), [&] { return info; });
    }

    returned<std::vector<std::uint64_t>> shape() const {
        pw_sample_info info = PW_INIT(pw_sample_info);
        return detail::value<std::vector<std::uint64_t>>(pw_sample_info_get(get(), &info), [&] {
            return std::vector<std::uint64_t>(info.shape, info.shape + info.rank);
        });
    }

    /* Returns the bytes of a sample in host or pinned memory. */
    returned<span<const std::byte>> bytes() const { return as<std::byte>(); }

    /* Returns the elements of a sample in host or pinned memory. */
    template <typename Element> returned<span<const Element>> as() const {
        const void *data = nullptr;
        std::size_t length = 0;
        std::uint32_t has = 0;
        pw_status status = dtype<Element>(has);
        status = status == PW_OK ? pw_sample_data(get(), &data, &length) : status;
        return detail::elements<const Element>(status, has, const_cast<void *>(data), length);
    }

    /* Returns the elements of a sample at their device address, for work that is enqueued on `stream` from now on. */
    template <typename Element = std::byte> returned<span<const Element>> device_on(stream_ref stream) const {
        const void *address = nullptr;
        std::size_t length = 0;
        std::uint32_t has = 0;
        pw_status status = dtype<Element>(has);
        status = status == PW_OK ? pw_sample_device_on(get(), stream.raw(), &address, &length) : status;
        return detail::elements<const Element>(status, has, const_cast<void *>(address), length);
    }

    /* Copies from `offset` bytes on to `bytes`, from any kind of memory. */
    returned<void> read(std::uint64_t offset, void *bytes, std::size_t length) const {
        return detail::done(pw_sample_read(get(), offset, bytes, length));
    }

    /* Returns a copy of all elements, from any kind of memory. */
    template <typename Element> returned<std::vector<Element>> to_vector() const {
        pw_sample_info info = PW_INIT(pw_sample_info);
        pw_status status = pw_sample_info_get(get(), &info);
        if (status == PW_OK && info.dtype != dtype_of<Element>::value) {
            return detail::mismatch<std::vector<Element>, Element>(info.dtype);
        }
        std::vector<Element> elements(static_cast<std::size_t>(info.bytes) / sizeof(Element));
        status = status == PW_OK ? pw_sample_read(get(), 0, elements.data(), info.bytes) : status;
        return detail::value<std::vector<Element>>(status, [&] { return std::move(elements); });
    }

    /* Returns a copy of the header. */
    returned<std::string> header() const {
        std::size_t length = 0;
        pw_status status = pw_sample_header(get(), nullptr, 0, &length);
        std::string header(length, '\0');
        status = status == PW_OK && length > 0 ? pw_sample_header(get(), header.data(), length, &length) : status;
        return detail::value<std::string>(status, [&] { return std::move(header); });
    }

    /* Waits until the publisher's stream has completed the sample. */
    returned<void> wait(duration timeout = forever) const {
        return detail::done(pw_sample_wait(get(), timeout.count()));
    }

    /* Fails if the sample is not valid. Call it once the work that has read it is done. */
    returned<void> check() const { return detail::done(pw_sample_check(get())); }

    /* Makes the sample a read-only tensor of DLPack, whose deleter closes it. */
    returned<DLManagedTensorVersioned *> to_dlpack(stream_ref stream = nullptr) {
        DLManagedTensorVersioned *managed = nullptr;
        pw_status status = pw_sample_to_dlpack(get(), stream.raw(), &managed);
        if (status == PW_OK) {
            release();
        }
        return detail::value<DLManagedTensorVersioned *>(status, [&] { return managed; });
    }

    /* Closes the sample once the work that is on `stream` now is done. */
    returned<void> close_on(stream_ref stream) { return consumed(pw_sample_close_on(get(), stream.raw())); }

  private:
    template <typename Element> pw_status dtype(std::uint32_t &has) const {
        if constexpr (!std::is_same_v<Element, std::byte>) {
            pw_sample_info info = PW_INIT(pw_sample_info);
            /* No more than needed: the rest costs a look at the clock. */
            info.size = offsetof(pw_sample_info, bytes);
            pw_status status = pw_sample_info_get(get(), &info);
            has = info.dtype;
            return status;
        }
        return PW_OK;
    }
};

/* A block that is being filled. */
class loan : public detail::owner<pw_loan, pw_loan_close> {
  public:
    loan() noexcept = default;
    loan(pw_loan *handle, std::uint32_t dtype) noexcept : owner(handle), dtype_(dtype) {}

    /* Returns the bytes of a loan in host or pinned memory, for writing by the CPU. */
    returned<span<std::byte>> bytes() { return as<std::byte>(); }

    /* Returns the elements of a loan in host or pinned memory, for writing by the CPU. */
    template <typename Element> returned<span<Element>> as() {
        void *data = nullptr;
        std::size_t length = 0;
        pw_status status = pw_loan_data(get(), &data, &length);
        return detail::elements<Element>(status, dtype_, data, length);
    }

    /* Returns the elements of a loan at their device address, for kernels and copies. */
    template <typename Element = std::byte> returned<span<Element>> device() {
        void *address = nullptr;
        std::size_t length = 0;
        pw_status status = pw_loan_device(get(), &address, &length);
        return detail::elements<Element>(status, dtype_, address, length);
    }

    /* Fills the loan with a copy of `length` bytes, in any kind of memory. */
    returned<void> write(const void *bytes, std::size_t length) {
        return detail::done(pw_loan_write(get(), bytes, length));
    }

    /* Fills the loan with a copy of elements. */
    template <typename Container, typename Element = detail::element_of<Container>>
    returned<void> write(const Container &elements) {
        static_assert(std::is_trivially_copyable_v<Element>, "elements are plain data");
        return write(std::data(elements), std::size(elements) * sizeof(Element));
    }

    /* Fills the loan with a copy of a tensor of DLPack, which stays the caller's; from a GPU on `stream`. */
    returned<void> copy_dlpack(const DLManagedTensorVersioned *managed, stream_ref stream = nullptr) {
        return detail::done(pw_loan_copy_dlpack(get(), managed, stream.raw()));
    }

    /* Sets the header of the sample. */
    returned<void> set_header(std::string_view header) {
        return detail::done(pw_loan_set_header(get(), header.data(), header.size()));
    }

    /* Notes that the sample is made from `input`: if that fails, this sample has failed, too. */
    returned<void> rests_on(const sample &input) { return detail::done(pw_loan_rests_on(get(), input.get())); }

    /* Publishes what the CPU has written, and closes the loan. Returns how many samples this publisher had published
       before. If that fails, the loan stays, and can be published again. */
    returned<std::uint64_t> publish(duration timeout = forever) {
        std::uint64_t sequence = 0;
        return published(pw_loan_publish(get(), timeout.count(), &sequence), sequence);
    }

    /* Publishes what work on a stream writes, which is already enqueued, and does not wait for that work. */
    returned<std::uint64_t> publish_on(stream_ref stream, duration timeout = forever) {
        std::uint64_t sequence = 0;
        return published(pw_loan_publish_on(get(), stream.raw(), timeout.count(), &sequence), sequence);
    }

  private:
    /* By reference, because compilers may evaluate it before the call that stores it. */
    returned<std::uint64_t> published(pw_status status, const std::uint64_t &sequence) {
        if (status == PW_OK) {
            release();
        }
        return detail::value<std::uint64_t>(status, [&] { return sequence; });
    }

    std::uint32_t dtype_ = 0;
};

/* A publisher of a topic. */
class publisher : public detail::owner<pw_publisher, pw_publisher_close> {
  public:
    using owner::owner;

    /* Borrows a block for a sample of this type and shape. */
    returned<partywall::loan> loan(std::uint32_t dtype, shape_ref shape, duration timeout = forever) const {
        pw_loan *made = nullptr;
        pw_status status = pw_publisher_loan(get(), dtype, shape.data(), shape.rank(), timeout.count(), &made);
        return detail::value<partywall::loan>(status, [&] { return partywall::loan(made, dtype); });
    }

    template <typename Element> returned<partywall::loan> loan(shape_ref shape, duration timeout = forever) const {
        return loan(dtype_of<Element>::value, shape, timeout);
    }

    /* Publishes a copy of `length` bytes, in any kind of memory. Returns how many samples this publisher had published
       before. */
    returned<std::uint64_t> send(std::uint32_t dtype, shape_ref shape, const void *bytes, std::size_t length,
                                 duration timeout = forever) const {
        std::uint64_t sequence = 0;
        pw_status status = pw_publisher_send(get(), dtype, shape.data(), shape.rank(), bytes, length, timeout.count(),
                                             &sequence);
        return detail::value<std::uint64_t>(status, [&] { return sequence; });
    }

    /* Publishes a copy of elements. */
    template <typename Container, typename Element = detail::element_of<Container>>
    returned<std::uint64_t> send(shape_ref shape, const Container &elements, duration timeout = forever) const {
        return send(dtype_of<Element>::value, shape, std::data(elements), std::size(elements) * sizeof(Element),
                    timeout);
    }

    /* Waits until the topic has at least `least` subscribers. */
    returned<void> wait_for_subscribers(std::uint32_t least, duration timeout = forever) const {
        return detail::done(pw_publisher_wait_for_subscribers(get(), least, timeout.count()));
    }

    /* Waits until the streams have completed all samples that were published on them. */
    returned<void> drain(duration timeout = forever) const {
        return detail::done(pw_publisher_drain(get(), timeout.count()));
    }

    /* Fails if the topic cannot be found by its name any more, or if this publisher cannot publish. */
    returned<void> check() const { return detail::done(pw_publisher_check(get())); }
};

/* A subscriber of a topic. `for (partywall::sample &sample : subscriber)` receives samples as they come, and ends once
   a subscriber with `until_idle` has received all. */
class subscriber : public detail::owner<pw_subscriber, pw_subscriber_close> {
  public:
    using owner::owner;
    using item = sample;
    using iterator = detail::iterator<subscriber>;

    /* Receives the next sample. */
    returned<sample> recv(duration timeout = forever) const {
        pw_sample *made = nullptr;
        return detail::object<sample>(pw_subscriber_recv(get(), timeout.count(), &made), made);
    }

    /* Receives a sample that is there already. */
    returned<std::optional<sample>> try_recv() const {
        pw_sample *made = nullptr;
        return detail::maybe<sample>(pw_subscriber_try_recv(get(), &made), made);
    }

    /* Returns a file descriptor that is readable while `try_recv` would return a sample or fail. */
    returned<int> fd() const {
        int fd = -1;
        return detail::value<int>(pw_subscriber_fd(get(), &fd), [&] { return fd; });
    }

    /* Receives the next sample; nothing if the topic is idle and the subscriber has asked to end then. */
    std::optional<returned<sample>> next() const {
        pw_sample *made = nullptr;
        pw_status status = pw_subscriber_recv(get(), PW_FOREVER, &made);
        if (status == PW_GONE && detail::failed_as("topic-idle")) {
            return std::nullopt;
        }
        return detail::object<sample>(status, made);
    }

    iterator begin() const { return iterator(*this); }
    iterator::end end() const noexcept { return {}; }
};

/* A topic: a stream of samples, each written once and read in place. */
class topic : public detail::owner<pw_topic, pw_topic_close> {
  public:
    using owner::owner;

    returned<partywall::publisher> publisher() const {
        pw_publisher *made = nullptr;
        return detail::object<partywall::publisher>(pw_publisher_open(get(), &made), made);
    }

    returned<partywall::subscriber> subscriber(const pw_subscriber_options &options = subscriber_options()) const {
        pw_subscriber *made = nullptr;
        return detail::object<partywall::subscriber>(pw_subscriber_open(get(), &options, &made), made);
    }

    returned<pw_topic_info> info() const {
        pw_topic_info info = PW_INIT(pw_topic_info);
        return detail::value<pw_topic_info>(pw_topic_info_get(get(), &info), [&] { return info; });
    }

    /* Fails if the topic cannot be found by its name any more. */
    returned<void> check() const { return detail::done(pw_topic_check(get())); }
};

/* A block of memory that this process holds, of a pool or a queue. */
class block : public detail::owner<pw_block, pw_block_close> {
  public:
    using owner::owner;

    returned<pw_block_info> info() const {
        pw_block_info info = PW_INIT(pw_block_info);
        return detail::value<pw_block_info>(pw_block_info_get(get(), &info), [&] { return info; });
    }

    /* Has all calls use the `length` bytes from `offset` on. */
    returned<void> set_range(std::uint64_t offset, std::uint64_t length) {
        return detail::done(pw_block_set_range(get(), offset, length));
    }

    /* Has the block be a tensor at the beginning of its range, as a task carries it. */
    template <typename Element> returned<void> set_tensor(shape_ref shape) {
        return detail::done(pw_block_set_tensor(get(), dtype_of<Element>::value, shape.data(), shape.rank()));
    }

    /* Returns the range of a block in host or pinned memory, for reading and writing by the CPU. */
    template <typename Element = std::byte> returned<span<Element>> as() {
        void *data = nullptr;
        std::size_t length = 0;
        return detail::memory<Element>(pw_block_data(get(), &data, &length), data, length);
    }

    /* Returns the range of a block at its device address, for kernels and copies. */
    template <typename Element = std::byte> returned<span<Element>> device() {
        void *address = nullptr;
        std::size_t length = 0;
        return detail::memory<Element>(pw_block_device(get(), &address, &length), address, length);
    }

    /* Copies elements to the beginning of the block, in any kind of memory. */
    template <typename Container, typename Element = detail::element_of<Container>>
    returned<void> write(const Container &elements) {
        static_assert(std::is_trivially_copyable_v<Element>, "elements are plain data");
        return detail::done(pw_block_write(get(), std::data(elements), std::size(elements) * sizeof(Element)));
    }

    /* Copies from `offset` bytes on to `bytes`, from any kind of memory. */
    returned<void> read(std::uint64_t offset, void *bytes, std::size_t length) const {
        return detail::done(pw_block_read(get(), offset, bytes, length));
    }

    returned<void> zero() { return detail::done(pw_block_zero(get())); }
    returned<void> zero_on(stream_ref stream) { return detail::done(pw_block_zero_on(get(), stream.raw())); }

    /* Offers the block to the process that passes the text to `pool::accept`. The block is this object's no more. */
    returned<std::string> offer() {
        char text[PW_BLOCK_TEXT];
        std::size_t length = 0;
        pw_status status = pw_block_offer(release(), text, sizeof text, &length);
        return detail::value<std::string>(status, [&] { return std::string(text); });
    }

    /* Makes the block a tensor of DLPack, of the type and shape that were set, whose deleter gives it back. */
    returned<DLManagedTensorVersioned *> to_dlpack() {
        DLManagedTensorVersioned *managed = nullptr;
        pw_status status = pw_block_to_dlpack(get(), &managed);
        if (status == PW_OK) {
            release();
        }
        return detail::value<DLManagedTensorVersioned *>(status, [&] { return managed; });
    }

    /* Gives the block back once the work that is on `stream` now is done. */
    returned<void> close_on(stream_ref stream) { return consumed(pw_block_close_on(get(), stream.raw())); }
};

/* A pool of equal blocks that any process takes, hands on and gives back. */
class pool : public detail::owner<pw_pool, pw_pool_close> {
  public:
    using owner::owner;

    returned<block> alloc(duration timeout = forever) const {
        pw_block *made = nullptr;
        return detail::object<block>(pw_pool_alloc(get(), timeout.count(), &made), made);
    }

    returned<std::optional<block>> try_alloc() const {
        pw_block *made = nullptr;
        return detail::maybe<block>(pw_pool_try_alloc(get(), &made), made);
    }

    /* Takes over a block by the text that `block::offer` returned. */
    returned<block> accept(text offered) const {
        pw_block *made = nullptr;
        return detail::object<block>(pw_pool_accept(get(), offered.c_str(), &made), made);
    }

    returned<pw_pool_info> info() const {
        pw_pool_info info = PW_INIT(pw_pool_info);
        return detail::value<pw_pool_info>(pw_pool_info_get(get(), &info), [&] { return info; });
    }

    /* Fails if the pool must not be used any more. */
    returned<void> check() const { return detail::done(pw_pool_check(get())); }
};

/* An open version of a name: its tensors, mapped into this process. */
class segment : public detail::owner<pw_segment, pw_segment_close> {
  public:
    using owner::owner;

    returned<pw_segment_info> info() const {
        pw_segment_info info = PW_INIT(pw_segment_info);
        return detail::value<pw_segment_info>(pw_segment_info_get(get(), &info), [&] { return info; });
    }

    returned<pw_tensor_info> tensor(text tensor) const {
        pw_tensor_info info = PW_INIT(pw_tensor_info);
        return detail::value<pw_tensor_info>(pw_segment_tensor_get(get(), tensor.c_str(), &info), [&] { return info; });
    }

    /* Returns what is known about the tensor that was added at this place, from 0. */
    returned<pw_tensor_info> tensor_at(std::size_t index) const {
        pw_tensor_info info = PW_INIT(pw_tensor_info);
        return detail::value<pw_tensor_info>(pw_segment_tensor_at(get(), index, &info), [&] { return info; });
    }

    /* Returns the elements of a tensor in host or pinned memory. */
    template <typename Element> returned<span<const Element>> as(text tensor) const {
        return memory<const Element>(tensor, pw_segment_data, false);
    }

    /* Returns the elements of a tensor in host or pinned memory, for writing. */
    template <typename Element> returned<span<Element>> as_mut(text tensor) const {
        return memory<Element>(tensor, pw_segment_data, true);
    }

    /* Returns the elements of a tensor at their device address. */
    template <typename Element> returned<span<const Element>> device(text tensor) const {
        return memory<const Element>(tensor, pw_segment_device, false);
    }

    /* Returns the elements of a tensor at their device address, for writing. */
    template <typename Element> returned<span<Element>> device_mut(text tensor) const {
        return memory<Element>(tensor, pw_segment_device, true);
    }

    /* Returns the driver's handle of a published tensor, for programs such as inference servers. They close it before
       the segment is closed. */
    returned<pw_ipc_handle> ipc_handle(text tensor) const {
        pw_ipc_handle handle = PW_INIT(pw_ipc_handle);
        return detail::value<pw_ipc_handle>(pw_segment_ipc_handle(get(), tensor.c_str(), &handle),
                                            [&] { return handle; });
    }

    /* Copies `length` bytes of a tensor, from `offset` on, from any kind of memory. */
    returned<void> read(text tensor, std::uint64_t offset, void *bytes, std::size_t length) const {
        return detail::done(pw_segment_read(get(), tensor.c_str(), offset, bytes, length));
    }

    /* Copies `length` bytes into a tensor, from `offset` on, in any kind of memory. */
    returned<void> write(text tensor, std::uint64_t offset, const void *bytes, std::size_t length) const {
        return detail::done(pw_segment_write(get(), tensor.c_str(), offset, bytes, length));
    }

    /* Returns the value of a key of the metadata, if there is one. */
    returned<std::optional<std::string>> metadata(text key) const {
        const char *found = nullptr;
        return detail::value<std::optional<std::string>>(
            pw_segment_metadata_get(get(), key.c_str(), &found),
            [&] { return found ? std::optional<std::string>(found) : std::nullopt; });
    }

    /* Returns a pair of the metadata, counted from 0. */
    returned<std::pair<std::string, std::string>> metadata_at(std::size_t index) const {
        const char *key = nullptr;
        const char *found = nullptr;
        return detail::value<std::pair<std::string, std::string>>(
            pw_segment_metadata_at(get(), index, &key, &found),
            [&] { return std::pair<std::string, std::string>(key, found); });
    }

    /* Returns a tensor in the form of DLPack, which keeps the memory until its deleter is called. */
    returned<DLManagedTensorVersioned *> to_dlpack(text tensor) const {
        DLManagedTensorVersioned *managed = nullptr;
        return detail::value<DLManagedTensorVersioned *>(pw_segment_to_dlpack(get(), tensor.c_str(), &managed),
                                                         [&] { return managed; });
    }

    /* Fails if the segment must not be used any more. */
    returned<void> check() const { return detail::done(pw_segment_check(get())); }

    /* Opens a version that this is not: the latest, or `version` unless that is 0. Nothing if there is none in time. */
    returned<std::optional<segment>> newer(std::uint64_t version = 0, duration timeout = duration::zero()) const {
        pw_segment *made = nullptr;
        return detail::maybe<segment>(pw_segment_newer(get(), version, timeout.count(), &made), made);
    }

    /* Makes a segment on a GPU the version that `next` is, at the addresses that it has. If that fails, `next` stays. */
    returned<void> advance(segment &next) { return next.consumed(pw_segment_advance(get(), next.get())); }

    /* Maps what was added to the version, and returns `PW_UNCHANGED`, `PW_GROWN` or `PW_DOES_NOT_FIT`. */
    returned<std::uint32_t> refresh(duration timeout = duration::zero()) const {
        std::uint32_t outcome = 0;
        return detail::value<std::uint32_t>(pw_segment_refresh(get(), timeout.count(), &outcome),
                                            [&] { return outcome; });
    }

  private:
    template <typename Element, typename Function>
    returned<span<Element>> memory(text tensor, Function function, bool writes) const {
        void *data = nullptr;
        std::size_t length = 0;
        pw_segment_info about = PW_INIT(pw_segment_info);
        pw_tensor_info info = PW_INIT(pw_tensor_info);
        pw_status status = pw_segment_info_get(get(), &about);
        if (status == PW_OK && writes && !about.is_writable) {
            return detail::failed<span<Element>>(error(PW_DENIED, "the segment is read-only",
                                                       "open a mutable version with read_write", "read-only"));
        }
        status = status == PW_OK ? pw_segment_tensor_get(get(), tensor.c_str(), &info) : status;
        status = status == PW_OK ? function(get(), tensor.c_str(), &data, &length) : status;
        return detail::elements<Element>(status, info.dtype, data, length);
    }
};

/* A version of a segment that no other process sees yet. */
class build : public detail::owner<pw_build, pw_build_close> {
  public:
    using owner::owner;

    /* Adds a tensor without gaps. */
    template <typename Element> returned<void> tensor(text tensor, shape_ref shape) {
        return this->tensor(tensor, dtype_of<Element>::value, shape);
    }

    /* Adds a tensor; strides are in elements, and null means without gaps. */
    returned<void> tensor(text tensor, std::uint32_t dtype, shape_ref shape, const std::uint64_t *strides = nullptr) {
        return detail::done(
            pw_build_tensor(get(), tensor.c_str(), dtype, shape.data(), strides, shape.rank()));
    }

    /* Adds a tensor that shows memory of the tensor `of`, from `offset` bytes on. */
    returned<void> view(text tensor, std::uint32_t dtype, shape_ref shape, const std::uint64_t *strides, text of,
                        std::uint64_t offset) {
        return detail::done(pw_build_view(get(), tensor.c_str(), dtype, shape.data(), strides, shape.rank(),
                                          of.c_str(), offset));
    }

    returned<void> metadata(text key, text value) {
        return detail::done(pw_build_metadata(get(), key.c_str(), value.c_str()));
    }

    /* Allocates the memory of all tensors. */
    returned<void> allocate() { return detail::done(pw_build_allocate(get())); }

    /* Fills a tensor with a copy of elements, in any kind of memory. */
    template <typename Container, typename Element = detail::element_of<Container>>
    returned<void> write(text tensor, const Container &elements) {
        static_assert(std::is_trivially_copyable_v<Element>, "elements are plain data");
        return detail::done(
            pw_build_write(get(), tensor.c_str(), std::data(elements), std::size(elements) * sizeof(Element)));
    }

    /* Returns a tensor in host or pinned memory, for writing by the CPU until the commit. Its type is not checked. */
    template <typename Element> returned<span<Element>> as(text tensor) {
        void *data = nullptr;
        std::size_t length = 0;
        return detail::memory<Element>(pw_build_data(get(), tensor.c_str(), &data, &length), data, length);
    }

    /* Returns a tensor at its device address, for kernels and copies that are enqueued before the commit. */
    template <typename Element> returned<span<Element>> device(text tensor) {
        void *address = nullptr;
        std::size_t length = 0;
        return detail::memory<Element>(pw_build_device(get(), tensor.c_str(), &address, &length), address, length);
    }

    /* Makes the build the next version of its name. If that fails, the build stays. */
    returned<segment> commit() {
        pw_segment *made = nullptr;
        pw_status status = pw_build_commit(get(), &made);
        if (status == PW_OK) {
            release();
        }
        return detail::object<segment>(status, made);
    }
};

/* Tensors in memory of a GPU that other code has allocated, to be published. */
class publication : public detail::owner<pw_publication, pw_publication_close> {
  public:
    using owner::owner;

    /* Adds a tensor that begins at `address`. `release` is called once, on any thread, when nobody uses the memory any
       more. */
    returned<void> tensor(text tensor, std::uint32_t dtype, shape_ref shape, void *address,
                          std::function<void()> release = {}, const std::uint64_t *strides = nullptr) {
        auto context = release ? std::make_unique<std::function<void()>>(std::move(release)) : nullptr;
        pw_status status = pw_publication_tensor(get(), tensor.c_str(), dtype, shape.data(), strides, shape.rank(),
                                                 address, context ? released : nullptr, context.get());
        if (status == PW_OK) {
            static_cast<void>(context.release());
        }
        return detail::done(status);
    }

    returned<void> metadata(text key, text value) {
        return detail::done(pw_publication_metadata(get(), key.c_str(), value.c_str()));
    }

    /* Adds a tensor of DLPack, which the publication owns if this succeeds. */
    returned<void> dlpack(text tensor, DLManagedTensorVersioned *managed) {
        return detail::done(pw_publication_dlpack(get(), tensor.c_str(), managed));
    }

    /* Publishes the memory itself. */
    returned<segment> commit() { return committed(pw_publication_commit); }
    /* Publishes a copy, which depends on nobody's memory. */
    returned<segment> commit_copy() { return committed(pw_publication_commit_copy); }

  private:
    template <typename Function> returned<segment> committed(Function function) {
        pw_segment *made = nullptr;
        pw_status status = function(get(), &made);
        if (status == PW_OK) {
            release();
        }
        return detail::object<segment>(status, made);
    }

    /* Nothing may be thrown through the library: then the program ends. */
    static void released(void *context) noexcept {
        std::unique_ptr<std::function<void()>> release(static_cast<std::function<void()> *>(context));
        (*release)();
    }
};

/* What a mutable segment is to get at its end. */
class growth : public detail::owner<pw_growth, pw_growth_close> {
  public:
    using owner::owner;

    static returned<growth> create() {
        pw_growth *made = nullptr;
        return detail::object<growth>(pw_growth_create(&made), made);
    }

    /* Gives the last tensor of the version, which must be `tensor`, a first axis of `length`. */
    returned<void> extend(text tensor, std::uint64_t length) {
        return detail::done(pw_growth_extend(get(), tensor.c_str(), length));
    }

    template <typename Element> returned<void> tensor(text tensor, shape_ref shape) {
        return detail::done(
            pw_growth_tensor(get(), tensor.c_str(), dtype_of<Element>::value, shape.data(), shape.rank()));
    }

    /* Leaves this many bytes free after the tensors. */
    returned<void> spare(std::uint64_t bytes) { return detail::done(pw_growth_spare(get(), bytes)); }

    /* Makes the version of `segment` longer. If that fails, the growth stays. */
    returned<void> commit(const segment &segment) { return consumed(pw_growth_commit(get(), segment.get())); }
};

/* The memory of a version as file descriptors. */
class descriptors : public detail::owner<pw_descriptors, pw_descriptors_close> {
  public:
    using owner::owner;

    struct chunk_info {
        int fd;
        std::uint64_t bytes;
    };

    struct tensor_place {
        std::size_t chunk;
        std::uint64_t offset;
        std::uint64_t bytes;
    };

    returned<pw_descriptors_info> info() const {
        pw_descriptors_info info = PW_INIT(pw_descriptors_info);
        return detail::value<pw_descriptors_info>(pw_descriptors_info_get(get(), &info), [&] { return info; });
    }

    /* Returns the descriptor of a chunk, which stays with this object, and its length as allocated. */
    returned<chunk_info> chunk(std::size_t index) const {
        chunk_info chunk = {-1, 0};
        return detail::value<chunk_info>(pw_descriptors_chunk(get(), index, &chunk.fd, &chunk.bytes),
                                         [&] { return chunk; });
    }

    /* Returns where a tensor is. */
    returned<tensor_place> tensor(text tensor) const {
        tensor_place place = {0, 0, 0};
        pw_status status =
            pw_descriptors_tensor(get(), tensor.c_str(), &place.chunk, &place.offset, &place.bytes);
        return detail::value<tensor_place>(status, [&] { return place; });
    }
};

/* A descriptor that becomes readable once a timeline has reached a value or ended. */
class timeline_event : public detail::owner<pw_timeline_event, pw_timeline_event_close> {
  public:
    timeline_event() noexcept = default;
    timeline_event(pw_timeline_event *handle, int fd) noexcept : owner(handle), fd_(fd) {}

    int fd() const noexcept { return fd_; }

  private:
    int fd_ = -1;
};

/* A timeline to wait for: a value that only grows. */
class timeline : public detail::owner<pw_timeline, pw_timeline_close> {
  public:
    using owner::owner;

    returned<pw_timeline_info> info() const {
        pw_timeline_info info = PW_INIT(pw_timeline_info);
        return detail::value<pw_timeline_info>(pw_timeline_info_get(get(), &info), [&] { return info; });
    }

    returned<void> wait(std::uint64_t value, duration timeout = forever) const {
        return detail::done(pw_timeline_wait(get(), value, timeout.count()));
    }

    /* Makes a stream wait, before work that is enqueued from now on. */
    returned<void> wait_on(stream_ref stream, std::uint64_t value) const {
        return detail::done(pw_timeline_wait_on(get(), stream.raw(), value));
    }

    /* Fails if a value that a stream waited for did not come, or rests on what has failed. */
    returned<void> check() const { return detail::done(pw_timeline_check(get())); }

    /* Ends the timeline, of whichever process. */
    returned<void> abandon() const { return detail::done(pw_timeline_abandon(get())); }

    returned<timeline_event> event(std::uint64_t value) const {
        pw_timeline_event *made = nullptr;
        int fd = -1;
        return detail::value<timeline_event>(pw_timeline_event_open(get(), value, &made, &fd),
                                             [&] { return timeline_event(made, fd); });
    }
};

/* The one writer of a timeline. */
class writer : public detail::owner<pw_writer, pw_writer_close> {
  public:
    using owner::owner;

    returned<void> signal(std::uint64_t value) const { return detail::done(pw_writer_signal(get(), value)); }

    /* Signals `value` once the work that is on `stream` now is done. */
    returned<void> signal_on(stream_ref stream, std::uint64_t value) const {
        return detail::done(pw_writer_signal_on(get(), stream.raw(), value));
    }

    /* Notes that values which are signalled from now on are made from those of `input`. */
    returned<void> rests_on(const timeline &input) const {
        return detail::done(pw_writer_rests_on(get(), input.get()));
    }
};

/* A permit that this process holds. It is free again if the process dies. */
class permit : public detail::owner<pw_permit, pw_permit_close> {
  public:
    using owner::owner;

    /* Gives the permit back once the work that is on `stream` now is done. */
    returned<void> close_on(stream_ref stream) { return consumed(pw_permit_close_on(get(), stream.raw())); }
};

/* A semaphore. */
class semaphore : public detail::owner<pw_semaphore, pw_semaphore_close> {
  public:
    using owner::owner;

    returned<permit> acquire(duration timeout = forever) const {
        pw_permit *made = nullptr;
        return detail::object<permit>(pw_semaphore_acquire(get(), timeout.count(), &made), made);
    }

    returned<std::optional<permit>> try_acquire() const {
        pw_permit *made = nullptr;
        return detail::maybe<permit>(pw_semaphore_try_acquire(get(), &made), made);
    }

    returned<pw_semaphore_info> info() const {
        pw_semaphore_info info = PW_INIT(pw_semaphore_info);
        return detail::value<pw_semaphore_info>(pw_semaphore_info_get(get(), &info), [&] { return info; });
    }
};

/* A task that this process has claimed. If the process dies, or the claim is destroyed, another worker gets the task. */
class claim : public detail::owner<pw_claim, pw_claim_close> {
  public:
    using owner::owner;

    returned<pw_claim_info> info() const {
        pw_claim_info info = PW_INIT(pw_claim_info);
        return detail::value<pw_claim_info>(pw_claim_info_get(get(), &info), [&] { return info; });
    }

    returned<std::string> kind() const {
        pw_claim_info info = PW_INIT(pw_claim_info);
        return detail::value<std::string>(pw_claim_info_get(get(), &info), [&] { return std::string(info.kind); });
    }

    /* Returns the arguments, which stay until the task is closed. */
    returned<span<const std::byte>> arguments() const {
        pw_claim_info info = PW_INIT(pw_claim_info);
        return detail::value<span<const std::byte>>(pw_claim_info_get(get(), &info), [&] {
            return span<const std::byte>(static_cast<const std::byte *>(info.arguments), info.arguments_length);
        });
    }

    returned<pw_input_info> input_info(std::size_t index) const {
        pw_input_info info = PW_INIT(pw_input_info);
        return detail::value<pw_input_info>(pw_claim_input_get(get(), index, &info), [&] { return info; });
    }

    /* Returns an input in host or pinned memory, counted from 0. Bytes may be those of any type. */
    template <typename Element = std::byte> returned<span<const Element>> input(std::size_t index) const {
        return input_memory<Element>(index, pw_claim_input_data);
    }

    /* Returns an input at its device address, for kernels and copies that only read it. */
    template <typename Element = std::byte> returned<span<const Element>> input_device(std::size_t index) const {
        return input_memory<Element>(index, pw_claim_input_device);
    }

    returned<void> input_read(std::size_t index, std::uint64_t offset, void *bytes, std::size_t length) const {
        return detail::done(pw_claim_input_read(get(), index, offset, bytes, length));
    }

    /* Waits until the submitter's stream has completed the inputs. */
    returned<void> wait_inputs(duration timeout = forever) const {
        return detail::done(pw_claim_wait_inputs(get(), timeout.count()));
    }

    returned<void> wait_inputs_on(stream_ref stream) const {
        return detail::done(pw_claim_wait_inputs_on(get(), stream.raw()));
    }

    /* Returns the output in host or pinned memory. */
    template <typename Element = std::byte> returned<span<Element>> output() {
        void *data = nullptr;
        std::size_t length = 0;
        return detail::memory<Element>(pw_claim_output_data(get(), &data, &length), data, length);
    }

    /* Returns the output at its device address. */
    template <typename Element = std::byte> returned<span<Element>> output_device() {
        void *address = nullptr;
        std::size_t length = 0;
        return detail::memory<Element>(pw_claim_output_device(get(), &address, &length), address, length);
    }

    /* Copies elements to the beginning of the output, in any kind of memory. */
    template <typename Container, typename Element = detail::element_of<Container>>
    returned<void> output_write(const Container &elements) {
        static_assert(std::is_trivially_copyable_v<Element>, "elements are plain data");
        return detail::done(
            pw_claim_output_write(get(), std::data(elements), std::size(elements) * sizeof(Element)));
    }

    /* Says which type and shape the result has, if it is less than the submitter asked for. */
    template <typename Element> returned<void> output_set_tensor(shape_ref shape) {
        return detail::done(
            pw_claim_output_set_tensor(get(), dtype_of<Element>::value, shape.data(), shape.rank()));
    }

    /* Moves the end of the claim, in a queue with a lease. */
    returned<void> extend(duration from_now) const {
        return detail::done(pw_claim_extend(get(), static_cast<std::uint64_t>(from_now.count())));
    }

    /* Completes the task: its output is the result. The claim ends, also if that fails. */
    returned<void> complete() { return detail::done(pw_claim_complete(release())); }

    /* Completes the task once the work that is on `stream` now is done. */
    returned<void> complete_on(stream_ref stream) { return consumed(pw_claim_complete_on(get(), stream.raw())); }

    /* Fails the attempt: another worker gets the task, unless it was the last attempt. */
    returned<void> fail(text reason) { return consumed(pw_claim_fail(get(), reason.c_str())); }

  private:
    template <typename Element, typename Function>
    returned<span<const Element>> input_memory(std::size_t index, Function function) const {
        const void *data = nullptr;
        std::size_t length = 0;
        pw_input_info info = PW_INIT(pw_input_info);
        pw_status status = pw_claim_input_get(get(), index, &info);
        status = status == PW_OK ? function(get(), index, &data, &length) : status;
        std::uint32_t has = info.dtype == PW_DTYPE_U8 ? dtype_of<Element>::value : info.dtype;
        return detail::elements<const Element>(status, has, const_cast<void *>(data), length);
    }
};

/* The result of a task. */
struct task_result {
    /* Nothing for a task without output. */
    std::optional<block> output;
    /* The number of the attempt that has completed it, from 1. */
    std::uint32_t attempt = 0;
};

/* A submitted task. */
class ticket : public detail::owner<pw_ticket, pw_ticket_close> {
  public:
    using owner::owner;

    /* Waits until the task is done, and takes its result. */
    returned<task_result> wait(duration timeout = forever) const {
        pw_block *output = nullptr;
        std::uint32_t attempt = 0;
        pw_status status = pw_ticket_wait(get(), timeout.count(), &output, &attempt);
        return detail::value<task_result>(status, [&] { return taken(output, attempt); });
    }

    /* Takes the result of a task that is done. */
    returned<std::optional<task_result>> try_take() const {
        pw_block *output = nullptr;
        std::uint32_t attempt = 0;
        pw_status status = pw_ticket_try_take(get(), &output, &attempt);
        return detail::value<std::optional<task_result>>(status, [&] {
            return attempt == 0 ? std::optional<task_result>() : std::optional<task_result>(taken(output, attempt));
        });
    }

    /* Returns the state of the task: a constant `PW_TASK_…`. */
    returned<std::uint32_t> status() const {
        std::uint32_t state = 0;
        return detail::value<std::uint32_t>(pw_ticket_status(get(), &state), [&] { return state; });
    }

    /* Cancels the task unless a worker has claimed it. */
    returned<void> cancel() const { return detail::done(pw_ticket_cancel(get())); }

  private:
    static task_result taken(pw_block *output, std::uint32_t attempt) {
        task_result result;
        result.attempt = attempt;
        if (output) {
            result.output.emplace(output);
        }
        return result;
    }
};

/* A task that was not submitted. */
class task : public detail::owner<pw_task, pw_task_close> {
  public:
    using owner::owner;

    static returned<task> create(text kind, const pw_task_options &options = task_options()) {
        pw_task *made = nullptr;
        return detail::object<task>(pw_task_create(kind.c_str(), &options, &made), made);
    }

    /* Adds an input block of the queue, which is the task's from then on. */
    returned<void> input(block &block) {
        pw_status status = pw_task_input(get(), block.get());
        if (status == PW_OK) {
            block.release();
        }
        return detail::done(status);
    }
};

/* The tasks of a queue as they come. */
class claims_range {
  public:
    using item = claim;
    using iterator = detail::iterator<claims_range>;

    claims_range(const pw_queue *queue, duration timeout) noexcept : queue_(queue), timeout_(timeout) {}

    iterator begin() const { return iterator(*this); }
    iterator::end end() const noexcept { return {}; }

    /* Claims the next task; nothing if none comes in time. */
    std::optional<returned<claim>> next() const {
        pw_claim *made = nullptr;
        pw_status status = pw_queue_claim(queue_, timeout_.count(), &made);
        if (status == PW_TIMED_OUT) {
            return std::nullopt;
        }
        return detail::object<claim>(status, made);
    }

  private:
    const pw_queue *queue_;
    duration timeout_;
};

/* A queue of tasks for worker processes; a killed worker loses none. */
class queue : public detail::owner<pw_queue, pw_queue_close> {
  public:
    using owner::owner;

    returned<partywall::claim> claim(duration timeout = forever) const {
        pw_claim *made = nullptr;
        return detail::object<partywall::claim>(pw_queue_claim(get(), timeout.count(), &made), made);
    }

    returned<std::optional<partywall::claim>> try_claim() const {
        pw_claim *made = nullptr;
        return detail::maybe<partywall::claim>(pw_queue_try_claim(get(), &made), made);
    }

    /* Claims tasks in a loop, `for (partywall::claim &claim : queue.claims())`, which ends if none comes in time. */
    claims_range claims(duration timeout = forever) const noexcept { return claims_range(get(), timeout); }

    /* Takes an input block. */
    returned<block> alloc_input(duration timeout = forever) const {
        pw_block *made = nullptr;
        return detail::object<block>(pw_queue_alloc_input(get(), timeout.count(), &made), made);
    }

    /* Submits a task whose inputs are complete. If that fails, the task stays. */
    returned<ticket> submit(task &task, duration timeout = forever) const {
        pw_ticket *made = nullptr;
        return submitted(pw_queue_submit(get(), task.get(), timeout.count(), &made), task, made);
    }

    /* Submits a task whose inputs are complete once the work that is on `stream` now is done. */
    returned<ticket> submit_on(task &task, stream_ref stream, duration timeout = forever) const {
        pw_ticket *made = nullptr;
        return submitted(pw_queue_submit_on(get(), task.get(), stream.raw(), timeout.count(), &made), task, made);
    }

    returned<pw_queue_info> info() const {
        pw_queue_info info = PW_INIT(pw_queue_info);
        return detail::value<pw_queue_info>(pw_queue_info_get(get(), &info), [&] { return info; });
    }

    /* Fails if the queue must not be used any more. */
    returned<void> check() const { return detail::done(pw_queue_check(get())); }

    /* Returns a file descriptor that becomes readable when tasks have ended. */
    returned<int> fd() const {
        int fd = -1;
        return detail::value<int>(pw_queue_fd(get(), &fd), [&] { return fd; });
    }

    /* Makes the descriptor unreadable until further tasks end. */
    returned<void> fd_clear() const { return detail::done(pw_queue_fd_clear(get())); }

  private:
    static returned<ticket> submitted(pw_status status, task &task, pw_ticket *const &made) {
        if (status == PW_OK) {
            task.release();
        }
        return detail::object<ticket>(status, made);
    }
};

/* A list as it was when it was opened. Texts of its items are valid until it is destroyed. */
template <typename Handle, typename Info, pw_status (*Get)(const Handle *, std::size_t, Info *),
          pw_status (*Close)(Handle *)>
class list : public detail::owner<Handle, Close> {
  public:
    list() noexcept = default;
    list(Handle *handle, std::size_t size) noexcept : detail::owner<Handle, Close>(handle), size_(size) {}

    std::size_t size() const noexcept { return size_; }

    /* Returns an item, counted from 0. */
    returned<Info> at(std::size_t index) const {
        Info info = PW_INIT(Info);
        return detail::value<Info>(Get(this->get(), index, &info), [&] { return info; });
    }

  private:
    std::size_t size_ = 0;
};

using names = list<pw_names, pw_name_info, pw_names_get, pw_names_close>;
using members = list<pw_members, pw_member_info, pw_members_get, pw_members_close>;
using findings = list<pw_findings, pw_finding_info, pw_findings_get, pw_findings_close>;

/* Tries what works on this machine, as `partywall doctor` does: `device` is "auto", "all", "cuda:0" or a UUID. */
inline returned<findings> doctor(text device = "auto", const pw_domain_options &options = domain_options()) {
    pw_findings *made = nullptr;
    std::size_t size = 0;
    return detail::value<findings>(pw_findings_open(&options, device.c_str(), &made, &size),
                                   [&] { return findings(made, size); });
}

/* The events of names that match a pattern. */
class watch : public detail::owner<pw_watch, pw_watch_close> {
  public:
    using owner::owner;

    /* Waits for the next event; nothing if none comes in time. Its texts are valid until the next call. */
    returned<std::optional<pw_event_info>> next(duration timeout = forever) {
        pw_event_info info = PW_INIT(pw_event_info);
        return detail::value<std::optional<pw_event_info>>(pw_watch_next(get(), timeout.count(), &info), [&] {
            return info.change ? std::optional<pw_event_info>(info) : std::optional<pw_event_info>();
        });
    }

    /* Returns the point behind the events so far, for `domain::watch`. */
    returned<std::pair<std::uint64_t, std::uint64_t>> point() const {
        std::pair<std::uint64_t, std::uint64_t> point;
        return detail::value<std::pair<std::uint64_t, std::uint64_t>>(
            pw_watch_point(get(), &point.first, &point.second), [&] { return point; });
    }
};

/* A connection to a broker. It stays until it and everything opened through it are closed. */
class domain : public detail::owner<pw_domain, pw_domain_close> {
  public:
    using owner::owner;

    /* Connects to the broker of a domain, and starts the broker if none runs. */
    static returned<domain> connect(const pw_domain_options &options = domain_options()) {
        pw_domain *made = nullptr;
        return detail::object<domain>(pw_domain_connect(&options, &made), made);
    }

    /* Asks the broker for an answer. */
    returned<void> ping() const { return detail::done(pw_domain_ping(get())); }

    returned<pw_domain_info> info() const {
        pw_domain_info info = PW_INIT(pw_domain_info);
        return detail::value<pw_domain_info>(pw_domain_info_get(get(), &info), [&] { return info; });
    }

    returned<partywall::names> names() const { return listed<partywall::names, pw_names>(pw_names_open); }
    returned<partywall::members> members() const { return listed<partywall::members, pw_members>(pw_members_open); }

    /* Watches names that match a pattern, from now on or behind a point that `watch::point` returned. */
    returned<partywall::watch> watch(text pattern, std::pair<std::uint64_t, std::uint64_t> behind = {0, 0}) const {
        pw_watch *made = nullptr;
        return detail::object<partywall::watch>(
            pw_watch_open(get(), pattern.c_str(), behind.first, behind.second, &made), made);
    }

    /* Evicts the member with this number, or, if it is 0, all members of the process `pid`. Returns how many. */
    returned<std::size_t> evict(std::uint64_t member, std::uint32_t pid, bool kill) const {
        std::size_t evicted = 0;
        return detail::value<std::size_t>(pw_domain_evict(get(), member, pid, kill, &evicted),
                                          [&] { return evicted; });
    }

    /* Removes a name. Processes that have it open keep it. */
    returned<void> remove(text name) const { return detail::done(pw_domain_remove(get(), name.c_str())); }

    returned<partywall::topic> create_topic(text name, const topic_options &options) const {
        return make<partywall::topic>(pw_topic_create, name, options.raw());
    }
    returned<partywall::topic> open_topic(text name, const topic_options &options = {}) const {
        return make<partywall::topic>(pw_topic_open, name, options.raw());
    }
    /* Opens a topic, or creates it if the name does not exist; so do the functions below that are named like it. */
    returned<partywall::topic> topic(text name, const topic_options &options) const {
        return make<partywall::topic>(pw_topic_open_or_create, name, options.raw());
    }

    returned<partywall::pool> create_pool(text name, const pw_pool_options &options) const {
        return make<partywall::pool>(pw_pool_create, name, options);
    }
    returned<partywall::pool> open_pool(text name, const pw_pool_options &options = pool_options()) const {
        return make<partywall::pool>(pw_pool_open, name, options);
    }
    returned<partywall::pool> pool(text name, const pw_pool_options &options) const {
        return make<partywall::pool>(pw_pool_open_or_create, name, options);
    }

    returned<partywall::queue> create_queue(text name, const pw_queue_options &options) const {
        return make<partywall::queue>(pw_queue_create, name, options);
    }
    returned<partywall::queue> open_queue(text name, const pw_queue_options &options = queue_options()) const {
        return make<partywall::queue>(pw_queue_open, name, options);
    }
    returned<partywall::queue> queue(text name, const pw_queue_options &options) const {
        return make<partywall::queue>(pw_queue_open_or_create, name, options);
    }

    /* Opens a timeline to wait for it, and creates it at 0 if it does not exist. */
    returned<partywall::timeline> timeline(text name, const pw_timeline_options &options = timeline_options()) const {
        return make<partywall::timeline>(pw_timeline_open, name, options);
    }
    /* Opens a timeline to signal it, from its present value on. */
    returned<partywall::writer> writer(text name, const pw_timeline_options &options = timeline_options()) const {
        return make<partywall::writer>(pw_writer_open, name, options);
    }

    returned<partywall::semaphore> semaphore(text name, std::uint32_t permits,
                                             const pw_semaphore_options &options = semaphore_options()) const {
        pw_semaphore *made = nullptr;
        return detail::object<partywall::semaphore>(
            pw_semaphore_open(get(), name.c_str(), permits, &options, &made), made);
    }

    /* Begins the next version of a name. */
    returned<partywall::build> build(text name, const pw_segment_options &options = segment_options()) const {
        return make<partywall::build>(pw_build_create, name, options);
    }
    /* Begins to publish memory under a name. */
    returned<partywall::publication> publication(text name,
                                                 const pw_segment_options &options = segment_options()) const {
        return make<partywall::publication>(pw_publication_create, name, options);
    }
    /* Puts a model file, a folder of shards or an index under a name. */
    returned<segment> put_file(text name, text path, const pw_segment_options &options = segment_options()) const {
        pw_segment *made = nullptr;
        return detail::object<segment>(pw_segment_put_file(get(), name.c_str(), path.c_str(), &options, &made), made);
    }
    /* Opens a version of a name, and waits up to `timeout` until it exists. */
    returned<segment> open(text name, duration timeout = duration::zero(),
                           const pw_open_options &options = open_options()) const {
        pw_segment *made = nullptr;
        return detail::object<segment>(pw_segment_open(get(), name.c_str(), &options, timeout.count(), &made), made);
    }
    /* Opens the memory of a version as file descriptors. */
    returned<partywall::descriptors> descriptors(text name, duration timeout = duration::zero()) const {
        pw_descriptors *made = nullptr;
        return detail::object<partywall::descriptors>(
            pw_descriptors_open(get(), name.c_str(), timeout.count(), &made), made);
    }

  private:
    template <typename List, typename Handle>
    returned<List> listed(pw_status (*open)(const pw_domain *, Handle **, std::size_t *)) const {
        Handle *made = nullptr;
        std::size_t size = 0;
        return detail::value<List>(open(get(), &made, &size), [&] { return List(made, size); });
    }

    template <typename Object, typename Function, typename Options>
    returned<Object> make(Function function, text name, const Options &options) const {
        std::remove_pointer_t<decltype(std::declval<Object>().get())> *made = nullptr;
        return detail::object<Object>(function(get(), name.c_str(), &options, &made), made);
    }
};

} // namespace PARTYWALL_VARIANT
} // namespace partywall

#endif /* PARTYWALL_HPP */
