#version 450
// The rasteriser of `partywall lab render` in Vulkan. It draws the same pixels as the host's version, which explains the
// arithmetic (examples/render/src/raster.rs), and as the kernels (render.cu).
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#extension GL_EXT_shader_atomic_int64 : require

// 0 projects vertices, 1 covers pixels with triangles, 2 shades pixels.
layout(constant_id = 0) const uint STEP = 0u;
layout(local_size_x = 64) in;

struct Corner {
    int x, y;
    uint depth;
    int light;
};

layout(set = 0, binding = 0) readonly buffer Vertices { int vertices[]; };
layout(set = 0, binding = 1) readonly buffer Indices { uint indices[]; };
layout(set = 0, binding = 2) readonly buffer Colours { uint colours[]; };
layout(set = 0, binding = 3) buffer Corners { Corner corners[]; };
// For each pixel of the tile its nearest fragment: depth, triangle, level; 0 where there is none.
layout(set = 0, binding = 4) buffer Fragments { uint64_t fragments[]; };
layout(set = 0, binding = 5) writeonly buffer Pixels { uint pixels[]; };
layout(push_constant) uniform Drawing {
    int camera[12];
    uint width, height;
    int tile_x, tile_y, tile_width, tile_height;
    uint vertex_count, triangle_count;
    uint tinted, tint, tag;
};

const int64_t NEAR = 1l << 15;
const int64_t FAR = 1l << 22;
const int64_t FOCAL = 384l;
const int64_t GUARD = 1l << 21;
const int64_t DEPTH = 1l << 39;
const int FRACTION = 14;
const int64_t UNIT = 1l << 14;
const int64_t AMBIENT = 2l << 8;
const int64_t BRIGHTEST = (32l << 8) - 1l;
const uint BACKGROUND = 0x00221812u;
// A triangle with more pixels in its rectangle is covered by a workgroup.
const int LARGE = 64;

uint stride() {
    return gl_NumWorkGroups.x * gl_WorkGroupSize.x;
}

int64_t row(uint first, uint vertex) {
    int64_t sum = 0l;
    for (uint i = 0u; i < 3u; i++) {
        sum += int64_t(camera[first + i]) * int64_t(vertices[6u * vertex + i]);
    }
    return (sum >> 16) + int64_t(camera[first + 3u]);
}

void project() {
    for (uint i = gl_GlobalInvocationID.x; i < vertex_count; i += stride()) {
        int64_t right = row(0u, i), up = row(4u, i), away = row(8u, i);
        Corner corner = Corner(0, 0, 0u, 0);
        if (away >= NEAR && away <= FAR && abs(right) <= FAR && abs(up) <= FAR) {
            int64_t focal = int64_t(height) * FOCAL;
            int64_t x = int64_t(width) * 128l + right * focal / away;
            int64_t y = int64_t(height) * 128l - up * focal / away;
            if (abs(x) <= GUARD && abs(y) <= GUARD) {
                int64_t cosine = (int64_t(vertices[6u * i + 3u]) * 6144l + int64_t(vertices[6u * i + 4u]) * 9216l -
                                  int64_t(vertices[6u * i + 5u]) * 11878l) >> 14;
                cosine = clamp(cosine, 0l, UNIT);
                corner.x = int(x);
                corner.y = int(y);
                corner.depth = uint(DEPTH / away);
                corner.light = int(AMBIENT + ((cosine * (BRIGHTEST - AMBIENT)) >> 14));
            }
        }
        corners[i] = corner;
    }
}

// A quantity that changes linearly over a triangle.
struct Plane {
    int64_t first, right, down, least, most;
};

Plane plane_of(int64_t a, int64_t b, int64_t c, i64vec2 second, i64vec2 third, int64_t area) {
    Plane plane;
    plane.first = a << FRACTION;
    plane.right = (((b - a) * third.y - (c - a) * second.y) << FRACTION) / area;
    plane.down = (((c - a) * second.x - (b - a) * third.x) << FRACTION) / area;
    plane.least = min(min(a, b), c);
    plane.most = max(max(a, b), c);
    return plane;
}

uint64_t plane_at(Plane plane, int64_t right, int64_t down) {
    int64_t value = (plane.first + plane.right * right + plane.down * down) >> FRACTION;
    return uint64_t(clamp(value, plane.least, plane.most));
}

// A triangle with its corners in clockwise order, and the pixels of the tile that may lie within it.
struct Triangle {
    ivec2 corners[3];
    ivec2 first, end;
    uint number;
    Plane depth, light;
};

// Returns whether the triangle covers anything in the tile.
bool triangle_of(uint number, out Triangle triangle) {
    uint i0 = indices[3u * number], i1 = indices[3u * number + 1u], i2 = indices[3u * number + 2u];
    if (i0 >= vertex_count || i1 >= vertex_count || i2 >= vertex_count) {
        return false;
    }
    Corner a = corners[i0], b = corners[i1], c = corners[i2];
    if (a.depth == 0u || b.depth == 0u || c.depth == 0u) {
        return false;
    }
    ivec2 least = ivec2(min(min(a.x, b.x), c.x), min(min(a.y, b.y), c.y));
    ivec2 most = ivec2(max(max(a.x, b.x), c.x), max(max(a.y, b.y), c.y));
    ivec2 tile = ivec2(tile_x, tile_y);
    triangle.first = max((least + 127) >> 8, tile);
    triangle.end = min(((most - 128) >> 8) + 1, tile + ivec2(tile_width, tile_height));
    if (triangle.first.x >= triangle.end.x || triangle.first.y >= triangle.end.y) {
        return false;
    }
    i64vec2 second = i64vec2(b.x, b.y) - i64vec2(a.x, a.y), third = i64vec2(c.x, c.y) - i64vec2(a.x, a.y);
    int64_t area = second.x * third.y - second.y * third.x;
    if (area == 0l) {
        return false;
    }
    if (area < 0l) {
        Corner other = b;
        b = c;
        c = other;
        i64vec2 side = second;
        second = third;
        third = side;
        area = -area;
    }
    triangle.corners[0] = ivec2(a.x, a.y);
    triangle.corners[1] = ivec2(b.x, b.y);
    triangle.corners[2] = ivec2(c.x, c.y);
    triangle.number = number;
    triangle.depth = plane_of(int64_t(a.depth), int64_t(b.depth), int64_t(c.depth), second, third, area);
    triangle.light = plane_of(int64_t(a.light), int64_t(b.light), int64_t(c.light), second, third, area);
    return true;
}

int pixels_of(Triangle triangle) {
    return (triangle.end.x - triangle.first.x) * (triangle.end.y - triangle.first.y);
}

// Puts the fragments of a triangle into the tile: of every `by`th pixel of its rectangle, from the one at `from`.
void cover_pixels(Triangle triangle, int from, int by) {
    int across = triangle.end.x - triangle.first.x;
    int count = pixels_of(triangle);
    for (int pixel = from; pixel < count; pixel += by) {
        int column = triangle.first.x + pixel % across, line = triangle.first.y + pixel / across;
        int64_t x = int64_t(column) * 256l + 128l, y = int64_t(line) * 256l + 128l;
        int64_t inside = 0l;
        for (int edge = 0; edge < 3; edge++) {
            i64vec2 start = i64vec2(triangle.corners[edge]);
            i64vec2 d = i64vec2(triangle.corners[(edge + 1) % 3]) - start;
            bool top_or_left = d.y < 0l || (d.y == 0l && d.x > 0l);
            inside |= d.x * (y - start.y) - d.y * (x - start.x) - (top_or_left ? 0l : 1l);
        }
        if (inside >= 0l) {
            int64_t right = x - int64_t(triangle.corners[0].x), down = y - int64_t(triangle.corners[0].y);
            uint64_t fragment = plane_at(triangle.depth, right, down) << 32 | uint64_t(triangle.number) << 8 |
                                plane_at(triangle.light, right, down) >> 8;
            atomicMax(fragments[uint(line - tile_y) * uint(tile_width) + uint(column - tile_x)], fragment);
        }
    }
}

shared uint large_count;
shared uint large[64];

void cover() {
    // The same number of rounds for each invocation of a workgroup: they wait for each other.
    for (uint base = gl_WorkGroupID.x * gl_WorkGroupSize.x; base < triangle_count; base += stride()) {
        if (gl_LocalInvocationIndex == 0u) {
            large_count = 0u;
        }
        barrier();
        uint number = base + gl_LocalInvocationIndex;
        Triangle triangle;
        if (number < triangle_count && triangle_of(number, triangle)) {
            if (pixels_of(triangle) > LARGE) {
                large[atomicAdd(large_count, 1u)] = number;
            } else {
                cover_pixels(triangle, 0, 1);
            }
        }
        barrier();
        for (uint i = 0u; i < large_count; i++) {
            if (triangle_of(large[i], triangle)) {
                cover_pixels(triangle, int(gl_LocalInvocationIndex), int(gl_WorkGroupSize.x));
            }
        }
        barrier();
    }
}

void shade() {
    uint count = uint(tile_width) * uint(tile_height);
    for (uint i = gl_GlobalInvocationID.x; i < count; i += stride()) {
        uint64_t fragment = fragments[i];
        uint pixel = BACKGROUND;
        if (fragment != 0ul) {
            uint triangle = uint(fragment >> 8) & 0xffffffu;
            uint colour = BACKGROUND;
            if (tinted != 0u) {
                colour = tint;
            } else if (triangle < triangle_count) {
                colour = colours[triangle];
            }
            uint level = 3u * (uint(fragment) & 255u) + 34u;
            pixel = 0u;
            for (uint shift = 0u; shift < 24u; shift += 8u) {
                pixel |= ((((colour >> shift) & 255u) * level) >> 7) << shift;
            }
        }
        pixels[i] = (pixel & 0x00ffffffu) | tag << 24;
    }
}

void main() {
    if (STEP == 0u) {
        project();
    } else if (STEP == 1u) {
        cover();
    } else {
        shade();
    }
}
