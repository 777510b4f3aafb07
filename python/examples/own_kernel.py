"""A reader's own kernel on shared memory: cupy compiles CUDA C++ and runs it on an array of another process.

    python own_kernel.py

Needs a GPU and cupy. The array is frozen once it is committed, and the GPU enforces that: with `--break` the kernel
writes to the array, and the reader loses its CUDA context. The other process is not affected.
"""

import subprocess
import sys

import cupy

import partywall as pw

NAME = "examples/own_kernel"
COUNT = 1 << 24

SOURCE = """
extern "C" __global__ void squares(const float* in, float* out, long long count) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) out[i] = in[i] * in[i];
}
"""


def read(domain: pw.Domain, write_to_it: bool) -> None:
    kernel = cupy.RawKernel(SOURCE, "squares")
    with domain.open(NAME, timeout=60) as segment:
        shared = cupy.from_dlpack(segment)
        out = shared if write_to_it else cupy.empty_like(shared)
        kernel(((COUNT + 255) // 256,), (256,), (shared, out, cupy.int64(COUNT)))
        try:
            cupy.cuda.get_current_stream().synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            # From now on, every CUDA call of this process fails.
            print(f"the GPU refused the write: {error}")
        else:
            print(f"the sum of the squares of {COUNT} elements is {float(out.sum(dtype='float64')):.0f}")


def main() -> None:
    with pw.connect() as domain:
        if sys.argv[1:2] == ["read"]:
            read(domain, "--break" in sys.argv)
            return
        with domain.put(NAME, cupy.full(COUNT, 2, "float32")) as segment:
            subprocess.run([sys.executable, __file__, "read", *sys.argv[1:]], check=True)
            print(f"the owner still has {segment!r}, {float(cupy.from_dlpack(segment)[0]):.0f} everywhere")


if __name__ == "__main__":
    main()
