// The kernels of the example `pipeline_gpu`, which are those of examples/c/pipeline.cu with the number of pixels as a
// parameter: one thread a pixel.

// Draws a frame: 10 everywhere, and 255 at `spot`.
extern "C" __global__ void pw_draw(unsigned char* pixels, unsigned int n, unsigned int spot) {
    unsigned int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) {
        pixels[at] = at == spot ? 255 : 10;
    }
}

// Finds the pixel that is 255.
extern "C" __global__ void pw_detect(const unsigned char* pixels, unsigned int n, unsigned int* spot) {
    unsigned int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n && pixels[at] == 255) {
        *spot = at;
    }
}
