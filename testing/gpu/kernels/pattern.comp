#version 450
// Writes the test pattern of `partywall.cu`: 32-bit words that differ everywhere.
layout(local_size_x = 256) in;
layout(set = 0, binding = 0) buffer Words { uint words[]; };
layout(push_constant) uniform Range { uint count; };

void main() {
    for (uint i = gl_GlobalInvocationID.x; i < count; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
        words[i] = (i * 2u + 1337u) ^ 0xDEADBEEFu;
    }
}
