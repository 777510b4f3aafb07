// The kernels of `partywall lab pipeline`: an image made smaller, and blurred. Nothing else launches them.
//
// Compiled as partywall.cu is, and by its rules. A pixel is a word of four channels of 8 bits. All is integer
// arithmetic, so that the host's version of the same (crates/partywall-cli) gives the same bytes.

typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

#define PW_FIRST (blockIdx.x * (uint64_t)blockDim.x + threadIdx.x)
#define PW_STRIDE (gridDim.x * (uint64_t)blockDim.x)

// The mean of the pixels of columns x0..x1 and rows y0..y1 of an image, each channel rounded to the nearest.
static __device__ uint32_t pw_mean(const uint32_t* image, uint32_t width, uint32_t x0, uint32_t x1, uint32_t y0,
                                   uint32_t y1) {
    uint64_t sums[4] = {0, 0, 0, 0};
    for (uint32_t y = y0; y < y1; y++) {
        for (uint32_t x = x0; x < x1; x++) {
            uint32_t pixel = image[(uint64_t)y * width + x];
#pragma unroll
            for (int channel = 0; channel < 4; channel++) {
                sums[channel] += (pixel >> (8 * channel)) & 255u;
            }
        }
    }
    uint64_t count = (uint64_t)(x1 - x0) * (y1 - y0);
    uint32_t mean = 0;
#pragma unroll
    for (int channel = 0; channel < 4; channel++) {
        mean |= (uint32_t)((sums[channel] + count / 2) / count) << (8 * channel);
    }
    return mean;
}

// The first pixel of `from` that pixel `i` of `to` covers.
static __device__ uint32_t pw_covered(uint32_t i, uint32_t from, uint32_t to) {
    return (uint32_t)((uint64_t)i * from / to);
}

// Makes an image of another size: each pixel is the mean of those that it covers, of one at least.
extern "C" __global__ void pw_resize(const uint32_t* from, uint32_t from_width, uint32_t from_height, uint32_t* to,
                                     uint32_t to_width, uint32_t to_height) {
    uint64_t n = (uint64_t)to_width * to_height;
    for (uint64_t i = PW_FIRST; i < n; i += PW_STRIDE) {
        uint32_t x = (uint32_t)(i % to_width), y = (uint32_t)(i / to_width);
        uint32_t x0 = pw_covered(x, from_width, to_width), y0 = pw_covered(y, from_height, to_height);
        uint32_t x1 = max(pw_covered(x + 1, from_width, to_width), x0 + 1);
        uint32_t y1 = max(pw_covered(y + 1, from_height, to_height), y0 + 1);
        to[i] = pw_mean(from, from_width, x0, x1, y0, y1);
    }
}

// Blurs an image: each pixel is the mean of the square around it that reaches `radius` pixels far, as much of it as
// lies in the image. `to` is other memory than `from`.
extern "C" __global__ void pw_blur(const uint32_t* from, uint32_t* to, uint32_t width, uint32_t height,
                                   uint32_t radius) {
    uint64_t n = (uint64_t)width * height;
    for (uint64_t i = PW_FIRST; i < n; i += PW_STRIDE) {
        uint32_t x = (uint32_t)(i % width), y = (uint32_t)(i / width);
        uint32_t x0 = x > radius ? x - radius : 0, y0 = y > radius ? y - radius : 0;
        uint32_t x1 = min(width - x, radius + 1) + x, y1 = min(height - y, radius + 1) + y;
        to[i] = pw_mean(from, width, x0, x1, y0, y1);
    }
}
