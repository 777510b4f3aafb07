// The kernels of `partywall lab render`: a rasteriser in integer arithmetic. Nothing else launches them.
//
// Compiled as partywall.cu is, and by its rules. They draw the same pixels as the host's version, which explains the
// arithmetic (examples/render/src/raster.rs). Sums that may overflow are made of unsigned numbers.

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

#define PW_WARP 0xffffffffu
// A triangle with more pixels in its rectangle is covered by a warp.
#define PW_LARGE 64

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

// Turns vectors of three words by a matrix of three rows, in 1/2^30.
extern "C" __global__ void pw_turn(const int* vectors, int* turned, uint64_t count, int64_t r0, int64_t r1, int64_t r2,
                                   int64_t r3, int64_t r4, int64_t r5, int64_t r6, int64_t r7, int64_t r8) {
    for (uint64_t i = PW_FIRST; i < count; i += PW_STRIDE) {
        int64_t x = vectors[3 * i], y = vectors[3 * i + 1], z = vectors[3 * i + 2];
        turned[3 * i] = (int)((r0 * x + r1 * y + r2 * z) >> 30);
        turned[3 * i + 1] = (int)((r3 * x + r4 * y + r5 * z) >> 30);
        turned[3 * i + 2] = (int)((r6 * x + r7 * y + r8 * z) >> 30);
    }
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

// A triangle with its corners in clockwise order, and the pixels of the tile that may lie within it.
struct pw_triangle {
    int x[3], y[3];
    int left, right, top, bottom;
    uint64_t number;
    pw_plane depth, light;
};

struct pw_tile {
    int x, y, width, height;
};

// Returns whether the triangle covers anything in the tile.
static __device__ bool pw_triangle_of(const pw_corner* corners, uint64_t count, const uint32_t* indices, uint64_t i,
                                      const pw_tile& tile, pw_triangle& triangle) {
    uint64_t i0 = indices[3 * i], i1 = indices[3 * i + 1], i2 = indices[3 * i + 2];
    if (i0 >= count || i1 >= count || i2 >= count) {
        return false;
    }
    pw_corner a = corners[i0], b = corners[i1], c = corners[i2];
    if (a.depth == 0 || b.depth == 0 || c.depth == 0) {
        return false;
    }
    triangle.left = max((min(min(a.x, b.x), c.x) + 127) >> 8, tile.x);
    triangle.right = min(((max(max(a.x, b.x), c.x) - 128) >> 8) + 1, tile.x + tile.width);
    triangle.top = max((min(min(a.y, b.y), c.y) + 127) >> 8, tile.y);
    triangle.bottom = min(((max(max(a.y, b.y), c.y) - 128) >> 8) + 1, tile.y + tile.height);
    if (triangle.left >= triangle.right || triangle.top >= triangle.bottom) {
        return false;
    }
    int64_t x1 = (int64_t)b.x - a.x, y1 = (int64_t)b.y - a.y, x2 = (int64_t)c.x - a.x, y2 = (int64_t)c.y - a.y;
    int64_t area = x1 * y2 - x2 * y1;
    if (area == 0) {
        return false;
    }
    if (area < 0) {
        pw_corner other = b;
        b = c;
        c = other;
        x1 = (int64_t)b.x - a.x, y1 = (int64_t)b.y - a.y, x2 = (int64_t)c.x - a.x, y2 = (int64_t)c.y - a.y;
        area = -area;
    }
    triangle.x[0] = a.x, triangle.x[1] = b.x, triangle.x[2] = c.x;
    triangle.y[0] = a.y, triangle.y[1] = b.y, triangle.y[2] = c.y;
    triangle.number = i;
    triangle.depth = pw_plane_of(a.depth, b.depth, c.depth, x1, y1, x2, y2, area);
    triangle.light = pw_plane_of(a.light, b.light, c.light, x1, y1, x2, y2, area);
    return true;
}

// Puts the fragments of a triangle into the tile: of every `step`th pixel of its rectangle, from the one at `first`.
static __device__ void pw_cover_pixels(const pw_triangle& triangle, uint64_t* fragments, const pw_tile& tile, int first,
                                       int step) {
    int width = triangle.right - triangle.left;
    int pixels = width * (triangle.bottom - triangle.top);
    for (int pixel = first; pixel < pixels; pixel += step) {
        int column = triangle.left + pixel % width, row = triangle.top + pixel / width;
        int64_t x = column * 256 + 128, y = row * 256 + 128;
        int64_t inside = 0;
#pragma unroll
        for (int edge = 0; edge < 3; edge++) {
            int next = (edge + 1) % 3;
            int64_t dx = (int64_t)triangle.x[next] - triangle.x[edge], dy = (int64_t)triangle.y[next] - triangle.y[edge];
            bool top_or_left = dy < 0 || (dy == 0 && dx > 0);
            inside |= dx * (y - triangle.y[edge]) - dy * (x - triangle.x[edge]) - (top_or_left ? 0 : 1);
        }
        if (inside >= 0) {
            int64_t right = x - triangle.x[0], down = y - triangle.y[0];
            uint64_t fragment = pw_plane_at(triangle.depth, right, down) << 32 | triangle.number << 8 |
                                pw_plane_at(triangle.light, right, down) >> 8;
            atomicMax(fragments + (uint64_t)(row - tile.y) * tile.width + (column - tile.x), fragment);
        }
    }
}

// Returns the triangle of another thread of the warp.
static __device__ pw_triangle pw_triangle_from(const pw_triangle& own, int lane) {
    union words {
        pw_triangle triangle;
        uint32_t word[sizeof(pw_triangle) / 4];
        __device__ words() {}
    } from, to;
    from.triangle = own;
#pragma unroll
    for (int word = 0; word < (int)(sizeof(pw_triangle) / 4); word++) {
        to.word[word] = __shfl_sync(PW_WARP, from.word[word], lane);
    }
    return to.triangle;
}

// Puts the fragments of triangles into a tile: the depth, the number and the level of each. A thread covers a small
// triangle, a warp a large one. A block has whole warps.
extern "C" __global__ void pw_cover(const pw_corner* corners, uint64_t count, const uint32_t* indices, uint64_t triangles,
                                    uint64_t* fragments, uint32_t tile_x, uint32_t tile_y, uint32_t width,
                                    uint32_t height) {
    pw_tile tile = {(int)tile_x, (int)tile_y, (int)width, (int)height};
    int lane = threadIdx.x % 32;
    for (uint64_t base = PW_FIRST - lane; base < triangles; base += PW_STRIDE) {
        pw_triangle triangle = {};
        bool covers = base + lane < triangles &&
                      pw_triangle_of(corners, count, indices, base + lane, tile, triangle);
        int pixels = (triangle.right - triangle.left) * (triangle.bottom - triangle.top);
        bool is_large = covers && pixels > PW_LARGE;
        if (covers && !is_large) {
            pw_cover_pixels(triangle, fragments, tile, 0, 1);
        }
        for (uint32_t large = __ballot_sync(PW_WARP, is_large); large != 0; large &= large - 1) {
            pw_cover_pixels(pw_triangle_from(triangle, __ffs(large) - 1), fragments, tile, lane, 32);
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

// Copies the pixels of a tile to its place in a picture of the given width.
extern "C" __global__ void pw_place(const uint32_t* pixels, uint32_t* picture, uint32_t picture_width, uint32_t tile_x,
                                    uint32_t tile_y, uint32_t width, uint32_t height) {
    uint64_t count = (uint64_t)width * height;
    for (uint64_t i = PW_FIRST; i < count; i += PW_STRIDE) {
        uint64_t row = tile_y + i / width, column = tile_x + i % width;
        picture[row * picture_width + column] = pixels[i];
    }
}

// Adds to result[0] the number of pixels whose fourth byte is not that of their tile, and to result[1] the sum of
// the picture. The picture is divided into rows of tiles; `tags` has the fourth bytes of up to 16 tiles.
extern "C" __global__ void pw_check(const uint32_t* picture, uint32_t width, uint32_t height, uint32_t columns,
                                    uint32_t rows, uint64_t tags_low, uint64_t tags_high, uint64_t* result) {
    uint64_t torn = 0, sum = 0, count = (uint64_t)width * height;
    for (uint64_t base = PW_FIRST; base < count; base += PW_STRIDE) {
        uint32_t x = (uint32_t)(base % width), y = (uint32_t)(base / width);
        // The first pixel of part n of a length is length * n / parts, rounded down.
        uint32_t column = ((x + 1) * columns - 1) / width, row = ((y + 1) * rows - 1) / height;
        uint32_t tile = row * columns + column;
        uint64_t tag = (tile < 8 ? tags_low : tags_high) >> (tile % 8 * 8) & 255;
        uint32_t pixel = picture[base];
        torn += (pixel >> 24) != tag;
        uint64_t mixed = (base << 24 | (pixel & 0x00ffffff)) * 0x9e3779b97f4a7c15ULL;
        mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93ULL;
        sum += mixed ^ mixed >> 29;
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        torn += __shfl_down_sync(PW_WARP, torn, lanes);
        sum += __shfl_down_sync(PW_WARP, sum, lanes);
    }
    if (threadIdx.x % 32 == 0) {
        if (torn != 0) {
            atomicAdd(result, torn);
        }
        atomicAdd(result + 1, sum);
    }
}
