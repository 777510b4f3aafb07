// The kernels of `partywall lab render`: a rasteriser in integer arithmetic. Nothing else launches them.
//
// Compiled as partywall.cu is, and by its rules. They draw the same pixels as the host's version, which explains the
// arithmetic (crates/partywall-labs/src/render/raster.rs). Sums that may overflow are made of unsigned numbers.

typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

#define PW_FIRST (blockIdx.x * (uint64_t)blockDim.x + threadIdx.x)
#define PW_STRIDE (gridDim.x * (uint64_t)blockDim.x)

#define PW_NEAR (1LL << 15)
#define PW_FAR (1LL << 22)
#define PW_FOCAL 384LL
#define PW_GUARD (1LL << 21)
#define PW_DEPTH (1LL << 39)
#define PW_FRACTION 14
#define PW_UNIT (1LL << 14)
#define PW_AMBIENT (2LL << 8)
#define PW_BRIGHTEST ((32LL << 8) - 1)
#define PW_BACKGROUND 0x00221812u

struct pw_corner {
    int x, y;
    uint32_t depth;
    int light;
};

static __device__ int64_t pw_abs(int64_t value) { return value < 0 ? -value : value; }

static __device__ int64_t pw_row(int a, int b, int c, int d, const int* at) {
    uint64_t sum = (uint64_t)((int64_t)a * at[0]) + (uint64_t)((int64_t)b * at[1]) + (uint64_t)((int64_t)c * at[2]);
    return ((int64_t)sum >> 16) + d;
}

// The vertex stage: six words of each vertex become a corner. The camera has three rows of four columns.
extern "C" __global__ void pw_project(const int* vertices, pw_corner* corners, uint64_t count, uint32_t width,
                                      uint32_t height, int c0, int c1, int c2, int c3, int c4, int c5, int c6, int c7,
                                      int c8, int c9, int c10, int c11) {
    for (uint64_t i = PW_FIRST; i < count; i += PW_STRIDE) {
        const int* at = vertices + 6 * i;
        int64_t right = pw_row(c0, c1, c2, c3, at), up = pw_row(c4, c5, c6, c7, at), away = pw_row(c8, c9, c10, c11, at);
        pw_corner corner = {0, 0, 0, 0};
        if (away >= PW_NEAR && away <= PW_FAR && pw_abs(right) <= PW_FAR && pw_abs(up) <= PW_FAR) {
            int64_t focal = (int64_t)height * PW_FOCAL;
            int64_t x = (int64_t)width * 128 + right * focal / away, y = (int64_t)height * 128 - up * focal / away;
            if (pw_abs(x) <= PW_GUARD && pw_abs(y) <= PW_GUARD) {
                int64_t cosine = ((int64_t)at[3] * 6144 + (int64_t)at[4] * 9216 - (int64_t)at[5] * 11878) >> 14;
                cosine = min(max(cosine, 0LL), PW_UNIT);
                corner.x = (int)x;
                corner.y = (int)y;
                corner.depth = (uint32_t)(PW_DEPTH / away);
                corner.light = (int)(PW_AMBIENT + ((cosine * (PW_BRIGHTEST - PW_AMBIENT)) >> 14));
            }
        }
        corners[i] = corner;
    }
}

// A quantity that changes linearly over a triangle.
struct pw_plane {
    int64_t first, right, down, least, most;
};

static __device__ pw_plane pw_plane_of(int64_t a, int64_t b, int64_t c, int64_t x1, int64_t y1, int64_t x2, int64_t y2,
                                       int64_t area) {
    pw_plane plane;
    plane.first = a << PW_FRACTION;
    plane.right = (((b - a) * y2 - (c - a) * y1) << PW_FRACTION) / area;
    plane.down = (((c - a) * x1 - (b - a) * x2) << PW_FRACTION) / area;
    plane.least = min(min(a, b), c);
    plane.most = max(max(a, b), c);
    return plane;
}

static __device__ uint64_t pw_plane_at(const pw_plane& plane, int64_t right, int64_t down) {
    uint64_t sum = (uint64_t)plane.first + (uint64_t)plane.right * (uint64_t)right + (uint64_t)plane.down * (uint64_t)down;
    int64_t value = (int64_t)sum >> PW_FRACTION;
    return (uint64_t)min(max(value, plane.least), plane.most);
}

// The edge function of the edge from a to b, at a place.
static __device__ int64_t pw_edge(const pw_corner& a, const pw_corner& b, int64_t x, int64_t y) {
    int64_t dx = (int64_t)b.x - a.x, dy = (int64_t)b.y - a.y;
    bool top_or_left = dy < 0 || (dy == 0 && dx > 0);
    return dx * (y - a.y) - dy * (x - a.x) - (top_or_left ? 0 : 1);
}

// Puts the fragments of triangles into a tile, a triangle a thread: the depth, the number and the level of each.
extern "C" __global__ void pw_cover(const pw_corner* corners, uint64_t count, const uint32_t* indices, uint64_t triangles,
                                    uint64_t* fragments, uint32_t tile_x, uint32_t tile_y, uint32_t width,
                                    uint32_t height) {
    for (uint64_t i = PW_FIRST; i < triangles; i += PW_STRIDE) {
        uint64_t i0 = indices[3 * i], i1 = indices[3 * i + 1], i2 = indices[3 * i + 2];
        if (i0 >= count || i1 >= count || i2 >= count) {
            continue;
        }
        pw_corner a = corners[i0], b = corners[i1], c = corners[i2];
        if (a.depth == 0 || b.depth == 0 || c.depth == 0) {
            continue;
        }
        int64_t x1 = (int64_t)b.x - a.x, y1 = (int64_t)b.y - a.y, x2 = (int64_t)c.x - a.x, y2 = (int64_t)c.y - a.y;
        int64_t area = x1 * y2 - x2 * y1;
        if (area == 0) {
            continue;
        }
        if (area < 0) {
            pw_corner other = b;
            b = c;
            c = other;
            x1 = (int64_t)b.x - a.x, y1 = (int64_t)b.y - a.y, x2 = (int64_t)c.x - a.x, y2 = (int64_t)c.y - a.y;
            area = -area;
        }
        int64_t left = max((int64_t)(min(min(a.x, b.x), c.x) - 128 + 255) >> 8, (int64_t)tile_x);
        int64_t right = min(((int64_t)(max(max(a.x, b.x), c.x) - 128) >> 8) + 1, (int64_t)tile_x + width);
        int64_t top = max((int64_t)(min(min(a.y, b.y), c.y) - 128 + 255) >> 8, (int64_t)tile_y);
        int64_t bottom = min(((int64_t)(max(max(a.y, b.y), c.y) - 128) >> 8) + 1, (int64_t)tile_y + height);
        if (left >= right || top >= bottom) {
            continue;
        }
        pw_plane depth = pw_plane_of(a.depth, b.depth, c.depth, x1, y1, x2, y2, area);
        pw_plane light = pw_plane_of(a.light, b.light, c.light, x1, y1, x2, y2, area);
        for (int64_t row = top; row < bottom; row++) {
            for (int64_t column = left; column < right; column++) {
                int64_t x = column * 256 + 128, y = row * 256 + 128;
                if ((pw_edge(a, b, x, y) | pw_edge(b, c, x, y) | pw_edge(c, a, x, y)) < 0) {
                    continue;
                }
                uint64_t fragment = pw_plane_at(depth, x - a.x, y - a.y) << 32 | i << 8 |
                                    pw_plane_at(light, x - a.x, y - a.y) >> 8;
                atomicMax(fragments + (row - tile_y) * width + (column - tile_x), fragment);
            }
        }
    }
}

// Turns fragments into pixels. With `tinted` all triangles have the colour `tint`.
extern "C" __global__ void pw_shade(const uint64_t* fragments, const uint32_t* colours, uint64_t triangles,
                                    uint32_t* pixels, uint64_t count, uint32_t tinted, uint32_t tint, uint32_t tag) {
    for (uint64_t i = PW_FIRST; i < count; i += PW_STRIDE) {
        uint64_t fragment = fragments[i];
        uint32_t pixel = PW_BACKGROUND;
        if (fragment != 0) {
            uint64_t triangle = (fragment >> 8) & 0xffffff;
            uint32_t colour = tinted ? tint : triangle < triangles ? colours[triangle] : PW_BACKGROUND;
            uint32_t level = 3 * (uint32_t)(fragment & 255) + 34;
            pixel = 0;
#pragma unroll
            for (int shift = 0; shift < 24; shift += 8) {
                pixel |= ((((colour >> shift) & 255) * level) >> 7) << shift;
            }
        }
        pixels[i] = (pixel & 0x00ffffff) | tag << 24;
    }
}
