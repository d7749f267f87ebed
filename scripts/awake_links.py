"""What it costs a GPU's computation that its links are awake: beside a load, a plain peer copy of a few bytes every few milliseconds.

    python3 scripts/awake_links.py SECONDS [BYTES [MILLISECONDS]] &       # from GPU 0 to GPU 1; needs nothing but libcuda
    build/kvloom run ... --stream --transport cuda --load gemm            # what `alone` takes now

NVLink draws power while anything crosses it, and a GPU at the limit of its power then lowers its clock: so the first byte of any transfer,
by whatever software, slows the computation, and the bytes after it hardly do (docs/measurements/2026-11-30-two-gpus.md).
"""
import ctypes as c
import sys
import time

u64, ptr, size = c.c_uint64, c.c_void_p, c.c_size_t


class Cuda:
    def __init__(self):
        self.library = c.CDLL("libcuda.so.1")

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*arguments):
            if result := function(*arguments):
                raise SystemExit(f"{name}: CUDA error {result}")

        return call


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else sys.exit(__doc__)
    bytes_ = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    pause = float(sys.argv[3]) / 1000 if len(sys.argv) > 3 else 0.005
    cuda = Cuda()
    cuda.cuInit(0)
    contexts, memory = [], []
    for gpu in (0, 1):
        context, address = ptr(), u64()
        cuda.cuDevicePrimaryCtxRetain(c.byref(context), gpu)
        cuda.cuCtxSetCurrent(context)
        cuda.cuMemAlloc_v2(c.byref(address), size(bytes_))
        contexts.append(context)
        memory.append(address)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cuda.cuMemcpyPeer(memory[1], contexts[1], memory[0], contexts[0], size(bytes_))
        time.sleep(pause)


if __name__ == "__main__":
    main()
