"""Memory goes in by DLPack, the buffer protocol or its address, without a copy; and comes out the same way."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import threading
import weakref

import numpy as np
import pytest
from conftest import cache_bytes, make_prefill, shape, tensors_of

import kvloom


@pytest.fixture
def transport():
    return kvloom.shm_transport("*")


def test_allocated_memory_is_an_array(transport):
    region = transport.allocate(4096)
    view = np.asarray(region.array())
    assert (view.dtype, view.shape, view.any(), len(region)) == (np.uint8, (4096,), False, 4096)
    assert view.ctypes.data == region.base and region.allocated
    view[7] = 9
    assert np.from_dlpack(region)[7] == 9 and memoryview(region.array())[7] == 9
    assert region.__dlpack_device__() == (1, 0)


def test_an_array_keeps_its_region(transport):
    view = np.asarray(transport.allocate(1 << 20).array())
    del transport
    gc.collect()
    view[:] = 3
    assert int(view.sum()) == 3 << 20


@pytest.mark.parametrize(
    "memory",
    [np.zeros((4, 8), np.float16), bytearray(100), memoryview(bytearray(12)), array.array("q", [1, 2]), mmap.mmap(-1, 4096)],
    ids=["numpy", "bytearray", "memoryview", "array", "mmap"],
)
def test_buffers_are_lent_as_they_are(transport, memory):
    region = transport.register_memory(memory)
    assert region.length == memoryview(memory).nbytes and not region.allocated


def test_a_view_reaches_from_its_first_byte_to_its_last(transport):
    whole = np.zeros((4, 6, 8), np.uint16)
    region = transport.register_memory(whole[1:3, ::2, 3:5])
    first = whole[1, 0, 3:].ctypes.data
    assert (region.base, region.base + region.length) == (first, whole[2, 4, 4:].ctypes.data + 2)
    backwards = transport.register_memory(whole[::-1])
    assert (backwards.base, backwards.length) == (whole.ctypes.data, whole.nbytes)


def test_lent_memory_is_kept_and_let_go_of(transport):
    class Owned(np.ndarray):
        pass

    memory = np.zeros(64, np.uint8).view(Owned)
    seen = weakref.ref(memory)
    region = transport.register_memory(memory)
    del memory
    gc.collect()
    assert seen() is not None
    del region
    gc.collect()
    assert seen() is None


def test_a_lent_bytearray_can_not_move(transport):
    memory = bytearray(64)
    region = transport.register_memory(memory)
    with pytest.raises(BufferError):
        memory.extend(b"x")
    del region
    memory.extend(b"x")


def test_an_address_is_lent(transport):
    memory = ctypes.create_string_buffer(256)
    region = transport.register_pointer(ctypes.addressof(memory), 256, owner=memory)
    assert (region.base, region.length) == (ctypes.addressof(memory), 256)
    np.asarray(region.array())[5] = 7
    assert memory.raw[5] == 7


@pytest.mark.parametrize("memory", [np.zeros(0, np.uint8), bytearray()])
def test_no_memory_is_refused(transport, memory):
    with pytest.raises(kvloom.InvalidArgument, match="1 or more"):
        transport.register_memory(memory)


def test_memory_that_can_not_be_written_is_refused(transport):
    constant = np.zeros(8, np.uint8)
    constant.setflags(write=False)
    for memory in (b"constant", memoryview(b"constant"), constant):
        with pytest.raises(TypeError):
            transport.register_memory(memory)


class _Elsewhere:
    """Host memory that says to be a device's."""

    def __init__(self, device_type: int) -> None:
        self._memory, self._type = np.zeros(8, np.float32), device_type

    def __dlpack__(self, **_: object) -> object:
        capsule = self._memory.__dlpack__()
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(pointer_of(capsule, b"dltensor") + 8).value = self._type  # DLTensor.device.device_type
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._type, 0


@pytest.mark.parametrize(("device_type", "words"), [(2, "cuda_transport"), (13, "cuda_transport"), (8, "type 8"), (10, "type 10")])
def test_memory_of_a_device_that_the_transport_does_not_reach_is_refused(transport, device_type, words):
    with pytest.raises(kvloom.InvalidArgument, match=words):
        transport.register_memory(_Elsewhere(device_type))


def test_an_owner_that_holds_its_region_is_let_go_of(transport):
    class Owner:
        memory = None
        region = None

    owner = Owner()
    owner.memory = np.zeros(64, np.uint8)
    owner.region = transport.register_pointer(owner.memory.ctypes.data, 64, owner)
    seen = weakref.ref(owner)
    del owner
    gc.collect()
    assert seen() is None


def test_torch_tensors_are_lent(transport):
    torch = pytest.importorskip("torch") if _has_torch() else None
    if torch is None:  # the same protocol, by NumPy's capsule
        tensor = _OnlyDlpack(np.zeros((2, 16), np.float32))
        assert transport.register_memory(tensor).length == 128
        return
    tensor = torch.zeros(2, 16, dtype=torch.bfloat16)
    region = transport.register_memory(tensor)
    assert (region.base, region.length) == (tensor.data_ptr(), 64)
    torch.from_dlpack(transport.allocate(64)).fill_(1)


def _has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None


class _OnlyDlpack:
    def __init__(self, memory):
        self._memory = memory

    def __dlpack__(self, **words):
        return self._memory.__dlpack__(**words)

    def __dlpack_device__(self):
        return self._memory.__dlpack_device__()


def test_memory_comes_and_goes_while_a_session_runs_from_any_thread():
    rank = make_prefill(kvloom.Side(shape(), "tp=1"))
    seen: list[int] = []

    def use() -> None:
        for _ in range(50):
            region = rank.transport.allocate(4096)
            np.asarray(region.array())[:] = 1
            seen.append(region.length)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rank.session.close()
    assert len(seen) == 200 and rank.transport.allocate(1).length == 1


def test_a_session_keeps_the_memory_of_its_caches_until_it_is_closed():
    side = kvloom.Side(shape(), "tp=1")
    transport = kvloom.shm_transport("*")
    memory = np.zeros(cache_bytes(side, 0), np.uint8).view(type("Owned", (np.ndarray,), {}))
    seen = weakref.ref(memory)
    session = kvloom.TargetSession(transport)
    session.describe(kvloom.LocalCache(side, 0, tensors_of(side, 0, transport.register_memory(memory))[0]))
    del memory
    gc.collect()
    assert seen() is not None
    session.close()
    gc.collect()
    assert seen() is None


def test_a_cache_is_checked():
    side = kvloom.Side(shape(), "tp=1")
    transport, other = kvloom.shm_transport(), kvloom.shm_transport()
    region = transport.allocate(4096)
    part = kvloom.TensorPart(region, 1024)
    assert (part.length, part.region.base) == (3072, region.base)
    with pytest.raises(kvloom.OutOfRange):
        kvloom.LocalCache(side, 0, [kvloom.PlacedTensor("kv", 0, [kvloom.TensorPart(region, 4000, 200)])])
    with pytest.raises(kvloom.InvalidArgument, match="layer 9"):
        kvloom.LocalCache(side, 0, [kvloom.PlacedTensor("kv", 9, [part])])
    mixed = [kvloom.PlacedTensor("kv", 0, [part]), kvloom.PlacedTensor("kv", 1, [kvloom.TensorPart(other.allocate(16))])]
    with pytest.raises(kvloom.InvalidArgument, match="another transport"):
        kvloom.LocalCache(side, 0, mixed)
    lent = transport.register_memory(np.zeros(cache_bytes(side, 0), np.uint8))
    with pytest.raises(kvloom.InvalidArgument, match="allocate"):
        kvloom.SourceSession(transport, kvloom.LocalCache(side, 0, tensors_of(side, 0, lent)[0]))
    with pytest.raises(kvloom.InvalidArgument, match="another transport"):
        kvloom.SourceSession(other, kvloom.LocalCache(side, 0, [kvloom.PlacedTensor("kv", 0, [part])]))


def test_one_session_a_transport():
    rank = make_prefill(kvloom.Side(shape(), "tp=1"))
    with pytest.raises(kvloom.InvalidArgument, match="session already"):
        kvloom.SourceSession(rank.transport, kvloom.LocalCache(rank.side, 0, []))
    rank.session.close()
    kvloom.SourceSession(rank.transport, kvloom.LocalCache(rank.side, 0, [])).close()
