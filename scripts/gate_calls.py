"""Which calls of the CUDA driver come back while a stream waits for a word: the table of docs/gpu.md.

    python3 scripts/gate_calls.py        # needs one GPU and nothing but libcuda; half a minute

Each call is made while a stream waits (cuStreamWaitValue32), with work behind it. A timer writes the word after a second. A call is
"kept" if it came back only then. A second process lends the memory that is opened by IPC handles.
"""
import ctypes as c
import os
import threading
import time

MIB = 1 << 20
ptr, u64, size, ref = c.c_void_p, c.c_uint64, c.c_size_t, c.byref


class Location(c.Structure):
    _fields_ = [("type", c.c_int), ("id", c.c_int)]


class AllocationProp(c.Structure):
    _fields_ = [("type", c.c_int), ("handle_types", c.c_int), ("location", Location), ("win32", ptr), ("flags", c.c_ubyte * 8)]


class AccessDesc(c.Structure):
    _fields_ = [("location", Location), ("flags", c.c_int)]


class IpcHandle(c.Structure):
    _fields_ = [("bytes", c.c_ubyte * 64)]


class Cuda:
    def __init__(self):
        self.library = c.CDLL("libcuda.so.1")
        self.context = ptr()
        self.cuInit(0)
        self.cuDevicePrimaryCtxRetain(ref(self.context), 0)
        self.cuCtxSetCurrent(self.context)

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*arguments):
            result = function(*arguments)
            if result not in (0, 600):  # 600: not ready
                raise SystemExit(f"{name}: CUDA error {result}")

        return call

    def alloc(self, size_of=2 * MIB):
        out = u64()
        self.cuMemAlloc_v2(ref(out), size(size_of))
        return out

    def host(self, size_of):
        out = ptr()
        self.cuMemHostAlloc(ref(out), size(size_of), 3)
        return out

    def stream(self):
        out = ptr()
        self.cuStreamCreateWithPriority(ref(out), 1, 0)
        return out


def lend(write, wait):
    cuda = Cuda()
    for _ in range(2):
        handle = IpcHandle()
        cuda.cuIpcGetMemHandle(ref(handle), cuda.alloc(64 * MIB))
        os.write(write, bytes(handle))
    os.read(wait, 1)


def main():
    handles_in, handles_out = os.pipe()
    over_in, over_out = os.pipe()
    if os.fork() == 0:
        os.close(over_out)
        lend(handles_out, over_in)
        os._exit(0)
    handles = [IpcHandle.from_buffer_copy(os.read(handles_in, 64)) for _ in range(2)]
    cuda = Cuda()
    word = cuda.host(4)
    gate = c.cast(word, c.POINTER(c.c_uint32))
    engine, other = cuda.stream(), cuda.stream()
    a, b, behind, pinned = cuda.alloc(), cuda.alloc(), cuda.alloc(), cuda.host(2 * MIB)

    def try_call(name, call, beside=None):
        gate[0] = 0
        cuda.cuStreamWaitValue32_v2(engine, u64(word.value), 1, 0)
        cuda.cuMemsetD8Async(behind, 1, size(2 * MIB), engine)

        def write():
            gate[0] = 1

        timer = threading.Timer(1.0, write)
        timer.start()
        thread = None
        if beside:
            thread = threading.Thread(target=lambda: (cuda.cuCtxSetCurrent(cuda.context), beside()))
            thread.start()
            time.sleep(0.2)
        call()
        kept = gate[0] != 0
        timer.cancel()
        gate[0] = 1
        cuda.cuStreamSynchronize(engine)
        if thread:
            thread.join()
        print(f"{'kept  ' if kept else 'at once'} {name}", flush=True)

    def copy():
        cuda.cuMemcpyAsync(a, b, size(2 * MIB), other)
        cuda.cuStreamSynchronize(other)

    def upload():
        cuda.cuMemcpyHtoDAsync_v2(a, pinned, size(4096), other)
        cuda.cuStreamSynchronize(other)

    def write_word():
        cuda.cuStreamWriteValue32_v2(other, u64(pinned.value), 5, 0)

    image = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(){ret;}\0"
    module, kernel, event, extra = ptr(), ptr(), ptr(), ptr()
    reserved, created, imported, descriptor, opened, small, large = u64(), u64(), u64(), c.c_int(), u64(), u64(), u64()
    host_block = ptr()
    buffer = c.create_string_buffer(16 * MIB)
    page = (c.addressof(buffer) + 4095) & ~4095
    own = AllocationProp(1, 1, Location(1, 0), 0)
    part = size(2 * MIB)

    def load():
        cuda.cuModuleLoadData(ref(module), image)
        cuda.cuModuleGetFunction(ref(kernel), module, b"k")

    def launch():
        cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, other, None, None)

    def share():
        cuda.cuMemExportToShareableHandle(ref(descriptor), created, 1, u64(0))
        cuda.cuMemImportFromShareableHandle(ref(imported), ptr(descriptor.value), 1)

    def map_part():
        cuda.cuMemMap(reserved, part, size(0), imported, u64(0))
        cuda.cuMemSetAccess(reserved, part, ref(AccessDesc(Location(1, 0), 3)), size(1))

    copy(), upload()
    for name, call in [
        ("copy", copy),
        ("copy of pinned memory", upload),
        ("cuStreamWriteValue32", write_word),
        ("cuStreamQuery", lambda: cuda.cuStreamQuery(other)),
        ("cuEventCreate", lambda: cuda.cuEventCreate(ref(event), 2)),
        ("cuEventDestroy", lambda: cuda.cuEventDestroy_v2(event)),
        ("cuStreamCreate", lambda: cuda.cuStreamCreateWithPriority(ref(extra), 1, 0)),
        ("cuStreamDestroy", lambda: cuda.cuStreamDestroy_v2(extra)),
        ("cuMemAlloc, 4 KiB", lambda: cuda.cuMemAlloc_v2(ref(small), size(4096))),
        ("cuMemAlloc, 256 MiB", lambda: cuda.cuMemAlloc_v2(ref(large), size(256 * MIB))),
        ("cuMemHostAlloc", lambda: cuda.cuMemHostAlloc(ref(host_block), size(16 * MIB), 1)),
        ("cuMemHostRegister", lambda: cuda.cuMemHostRegister_v2(ptr(page), size(8 * MIB), 1)),
        ("cuIpcOpenMemHandle", lambda: cuda.cuIpcOpenMemHandle_v2(ref(opened), handles[0], 1)),
        ("cuMemGetAddressRange", lambda: cuda.cuMemGetAddressRange_v2(ref(u64()), ref(size()), opened)),
        ("cuMemAddressReserve", lambda: cuda.cuMemAddressReserve(ref(reserved), part, size(0), u64(0), u64(0))),
        ("cuMemCreate", lambda: cuda.cuMemCreate(ref(created), part, ref(own), u64(0))),
        ("export, import", share),
        ("cuMemMap, cuMemSetAccess", map_part),
        ("cuMemRelease", lambda: cuda.cuMemRelease(imported)),
        ("cuModuleLoadData, cuModuleGetFunction", load),
        ("launch", launch),
        ("cuModuleUnload", lambda: cuda.cuModuleUnload(module)),
        ("cuMemUnmap", lambda: cuda.cuMemUnmap(reserved, part)),
        ("cuIpcCloseMemHandle", lambda: cuda.cuIpcCloseMemHandle(opened)),
        ("cuMemHostUnregister", lambda: cuda.cuMemHostUnregister(ptr(page))),
        ("cuMemFreeHost", lambda: cuda.cuMemFreeHost(host_block)),
        ("cuMemFree, 4 KiB", lambda: cuda.cuMemFree_v2(small)),
        ("cuMemFree, 256 MiB", lambda: cuda.cuMemFree_v2(large)),
    ]:
        try_call(name, call)
    load(), launch()
    another = ptr()
    for name, call in [
        ("copy", copy),
        ("launch", launch),
        ("cuMemAlloc", cuda.alloc),
        ("cuMemHostAlloc", lambda: cuda.host(MIB)),
        ("cuStreamWriteValue32", write_word),
        ("cuStreamWaitValue32", lambda: cuda.cuStreamWaitValue32_v2(other, u64(word.value), 0, 0)),
        ("cuIpcOpenMemHandle", lambda: cuda.cuIpcOpenMemHandle_v2(ref(opened), handles[1], 1)),
    ]:
        block = cuda.alloc(MIB)
        try_call(f"beside a cuMemFree that is kept: {name}", call, lambda block=block: cuda.cuMemFree_v2(block))
    try_call("beside a cuModuleLoadData that is kept: copy", copy, lambda: cuda.cuModuleLoadData(ref(another), image))
    try_call("beside a cuCtxSynchronize: copy", copy, cuda.cuCtxSynchronize)
    os.write(over_out, b"x")


if __name__ == "__main__":
    main()
