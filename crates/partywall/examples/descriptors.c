/* Reads a tensor of a Partywall segment by file descriptors that a parent process passes on: descriptors.rs beside it.
 * Talks to no broker, and links nothing but the C library. GPU memory goes through the CUDA driver, host memory through mmap.
 *
 *     cc -o descriptors descriptors.c -ldl
 *     descriptors host|UUID CHUNK OFFSET BYTES FD:LENGTH...       prints the FNV-1a hash of the tensor's bytes
 *
 * UUID names the GPU that has the memory: GPU-… as nvidia-smi -L prints it. FD:LENGTH is a chunk of the segment. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static void *driver; /* libcuda */

static void fail(const char *what, int code) {
    fprintf(stderr, "descriptors: %s: error %d\n", what, code);
    exit(1);
}

/* Calls a function of the driver by its name. All of them return 0 if they succeed. */
#define CUDA(name, types, ...)                                        \
    do {                                                              \
        int (*call) types = (int (*) types)dlsym(driver, name);       \
        int code = call ? call(__VA_ARGS__) : -1;                     \
        if (code) fail(name, code);                                   \
    } while (0)

/* CUmemAccessDesc of cuda.h. */
struct access { int location_type, device, flags; };

static int gpu_of(const char *uuid) {
    const char *named = getenv("PARTYWALL_LIBCUDA"); /* as Partywall: the simulated driver, for tests */
    driver = dlopen(named ? named : "libcuda.so.1", RTLD_NOW);
    if (!driver) { fprintf(stderr, "descriptors: there is no CUDA driver: %s\n", dlerror()); exit(1); }
    int count = 0, device = 0;
    CUDA("cuInit", (unsigned), 0);
    CUDA("cuDeviceGetCount", (int *), &count);
    for (int i = 0; i < count; i++) {
        unsigned char id[16];
        char text[41] = "GPU-", *end = text + 4;
        CUDA("cuDeviceGet", (int *, int), &device, i);
        CUDA("cuDeviceGetUuid_v2", (unsigned char *, int), id, device);
        for (int j = 0; j < 16; j++) end += sprintf(end, j == 4 || j == 6 || j == 8 || j == 10 ? "-%02x" : "%02x", id[j]);
        if (!strcmp(text, uuid)) return device;
    }
    fprintf(stderr, "descriptors: none of the %d GPUs that this process sees is %s\n", count, uuid);
    exit(1);
}

/* Copies bytes out of a chunk on a GPU. The descriptor stays open: an import has a reference of its own. */
static void read_gpu(int device, int fd, uint64_t length, uint64_t offset, unsigned char *out, size_t bytes) {
    void *context = NULL;
    uint64_t memory = 0, address = 0;
    struct access access = {1 /* device */, device, 1 /* read only, as is right for a frozen version */};
    CUDA("cuDevicePrimaryCtxRetain", (void **, int), &context, device);
    CUDA("cuCtxSetCurrent", (void *), context);
    CUDA("cuMemImportFromShareableHandle", (uint64_t *, void *, int), &memory, (void *)(intptr_t)fd, 1 /* POSIX */);
    CUDA("cuMemAddressReserve", (uint64_t *, size_t, size_t, uint64_t, uint64_t), &address, length, 0, 0, 0);
    CUDA("cuMemMap", (uint64_t, size_t, size_t, uint64_t, uint64_t), address, length, 0, memory, 0);
    CUDA("cuMemSetAccess", (uint64_t, size_t, struct access *, size_t), address, length, &access, 1);
    CUDA("cuMemcpyDtoH_v2", (void *, uint64_t, size_t), out, address + offset, bytes);
    CUDA("cuMemUnmap", (uint64_t, size_t), address, length);
    CUDA("cuMemAddressFree", (uint64_t, size_t), address, length);
    CUDA("cuMemRelease", (uint64_t), memory);
    CUDA("cuDevicePrimaryCtxRelease_v2", (int), device);
}

static void read_host(int fd, uint64_t length, uint64_t offset, unsigned char *out, size_t bytes) {
    unsigned char *map = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) { perror("descriptors: mmap"); exit(1); }
    memcpy(out, map + offset, bytes);
    munmap(map, length);
}

int main(int argc, char **argv) {
    int chunk = argc > 2 ? atoi(argv[2]) : 0, fd = -1;
    uint64_t length = 0, hash = 0xcbf29ce484222325;
    if (argc < 6 || chunk < 0 || chunk > argc - 6 || sscanf(argv[5 + chunk], "%d:%lu", &fd, &length) != 2) {
        fprintf(stderr, "usage: descriptors host|UUID CHUNK OFFSET BYTES FD:LENGTH...\n");
        return 2;
    }
    uint64_t offset = strtoull(argv[3], NULL, 10), bytes = strtoull(argv[4], NULL, 10);
    unsigned char *copy = malloc(bytes + 1);
    if (!copy || offset > length || bytes > length - offset) {
        fprintf(stderr, "descriptors: %lu bytes at %lu are not within a chunk of %lu\n", bytes, offset, length);
        return 2;
    }
    if (strcmp(argv[1], "host")) read_gpu(gpu_of(argv[1]), fd, length, offset, copy, bytes);
    else read_host(fd, length, offset, copy, bytes);
    for (uint64_t i = 0; i < bytes; i++) hash = (hash ^ copy[i]) * 0x100000001b3;
    printf("%016lx\n", hash);
    free(copy);
    return 0;
}
