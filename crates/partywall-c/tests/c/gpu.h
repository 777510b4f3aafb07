/* The calls of the CUDA driver that the tests make for themselves, without its header. */
#include <dlfcn.h>

static void *driver_call(const char *name) {
    static void *library;
    if (library == NULL) {
        library = dlopen(getenv("PARTYWALL_LIBCUDA"), RTLD_NOW);
        CHECK(library != NULL);
    }
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

#define CUDA(name, types, ...)                                          \
    do {                                                                \
        int (*function) types;                                          \
        *(void **)&function = driver_call(#name);                       \
        CHECK(function(__VA_ARGS__) == 0);                              \
    } while (0)

/* Makes the primary context of the first GPU current, as the run-time API does. */
static inline void use_gpu(void) {
    void *context = NULL;
    CUDA(cuInit, (unsigned), 0);
    CUDA(cuDevicePrimaryCtxRetain, (void **, int), &context, 0);
    CUDA(cuCtxSetCurrent, (void *), context);
}

static inline void *gpu_memory(size_t bytes) {
    uint64_t address = 0;
    CUDA(cuMemAlloc_v2, (uint64_t *, size_t), &address, bytes);
    return (void *)(uintptr_t)address;
}

static inline void *stream_create(void) {
    void *stream = NULL;
    CUDA(cuStreamCreate, (void **, unsigned), &stream, 1);
    return stream;
}

static inline void stream_wait(void *stream) {
    CUDA(cuStreamSynchronize, (void *), stream);
}

static inline void copy_in(void *device, const void *host, size_t bytes, void *stream) {
    CUDA(cuMemcpyHtoDAsync_v2, (uint64_t, const void *, size_t, void *), (uint64_t)(uintptr_t)device, host, bytes, stream);
}

static inline void copy_out(void *host, const void *device, size_t bytes, void *stream) {
    CUDA(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *), host, (uint64_t)(uintptr_t)device, bytes, stream);
}
