// The kernels that partywall-cuda embeds: a test pattern, its check, a change that a reader can see, and a read for
// timing.
//
// Compiled by NVRTC alone (no headers) into partywall.ptx by `cargo xtask ptx`; CI makes that file again and
// compares. Rules for what stands here:
//  - extern "C" names with the prefix pw_, because the loader finds them by name;
//  - grid-stride loops, so that any grid is correct and the launch code may choose it for speed alone;
//  - no __restrict__ on memory that another process may write: the compiler would read it through the non-coherent
//    path (ld.global.nc), which is wrong for memory that changes while the kernel runs;
//  - no spinning on memory: a kernel that waits for another process costs a whole time slice (DESIGN, section 2).

typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

// The first element of the calling thread, and the distance to its next one.
#define PW_FIRST (blockIdx.x * (uint64_t)blockDim.x + threadIdx.x)
#define PW_STRIDE (gridDim.x * (uint64_t)blockDim.x)

// What pw_fill writes at index i, in 32-bit wrapping arithmetic. The host has the same function
// (partywall_cuda::kernels::expected); neighbouring words differ, and so do words a power of two apart.
static __device__ uint32_t pw_expected(uint64_t i) {
    return ((uint32_t)i * 2u + 1337u) ^ 0xDEADBEEFu;
}

// Writes the test pattern to p[0..n].
extern "C" __global__ void pw_fill(uint32_t* p, uint64_t n) {
    for (uint64_t i = PW_FIRST; i < n; i += PW_STRIDE) {
        p[i] = pw_expected(i);
    }
}

// Lowers *first_bad to the smallest index whose word is not factor times the pattern (32-bit wrapping). The caller
// sets *first_bad to all ones before. One atomic a thread at most: each stops at its first bad word, and its own
// indices only grow.
extern "C" __global__ void pw_verify(const uint32_t* p, uint64_t n, uint32_t factor, unsigned long long* first_bad) {
    for (uint64_t i = PW_FIRST; i < n; i += PW_STRIDE) {
        if (p[i] != factor * pw_expected(i)) {
            atomicMin(first_bad, (unsigned long long)i);
            return;
        }
    }
}

// Doubles every word of p[0..n] (32-bit wrapping): the change that pw_verify sees as factor 2.
extern "C" __global__ void pw_double(uint32_t* p, uint64_t n) {
    for (uint64_t i = PW_FIRST; i < n; i += PW_STRIDE) {
        p[i] *= 2u;
    }
}

// Reads p[0..n] (16-byte words) and keeps nothing. The sum goes to *sink if it has one value in 2^32, so that the
// compiler cannot drop the loads; *sink is a scratch word that nobody reads.
extern "C" __global__ void pw_read(const uint4* p, uint64_t n, uint32_t* sink) {
    uint32_t sum = 0;
    for (uint64_t i = PW_FIRST; i < n; i += PW_STRIDE) {
        uint4 word = p[i];
        sum += word.x ^ word.y ^ word.z ^ word.w;
    }
    if (sum == 0x12345u) {
        *sink = sum;
    }
}
