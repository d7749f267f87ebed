"""As much of torch as a connector on a CPU touches, where torch isn't installed: tensors as shape, strides and an address.

Memory is anonymous and comes when it is touched, so a pool of gigabytes costs nothing. No arithmetic.
"""

import ctypes
import math
import mmap
import types


class Dtype:
    def __init__(self, name: str, itemsize: int):
        self.name, self.itemsize = name, itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {name: Dtype(name, size) for name, size in (("float32", 4), ("bfloat16", 2), ("float16", 2), ("uint8", 1), ("int8", 1), ("int64", 8))}


class Device:
    def __init__(self, name="cpu"):
        self.type, _, index = str(name).partition(":")
        self.index = int(index) if index else None

    def __repr__(self) -> str:
        return self.type


class Storage:
    """Memory of zeros, or what `owner` lends at `address`."""

    def __init__(self, length: int, address: int = 0, owner=None):
        self._owner = owner if owner is not None else mmap.mmap(-1, max(length, 1))
        self._address = address or ctypes.addressof(ctypes.c_char.from_buffer(self._owner))
        self._length = length

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._length


class Tensor:
    """A view of a storage. `stride` and `offset` count elements."""

    device = Device()
    is_cuda = False

    def __init__(self, storage: Storage, shape, stride=None, dtype: Dtype = DTYPES["float32"], offset: int = 0):
        self._storage, self.shape, self.dtype, self._offset = storage, tuple(shape), dtype, offset
        self._stride = tuple(stride) if stride else tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        self.ndim = len(self.shape)

    def stride(self, axis: int | None = None):
        return self._stride if axis is None else self._stride[axis]

    def storage_offset(self) -> int:
        return self._offset

    def untyped_storage(self) -> Storage:
        return self._storage

    def data_ptr(self) -> int:
        return self._storage.data_ptr() + self._offset * self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)

    def dim(self) -> int:
        return self.ndim

    def view(self, *what) -> "Tensor":
        """A whole tensor's bytes as another type, or in another shape."""
        if isinstance(what[0], Dtype):
            length = self.numel() * self.dtype.itemsize // what[0].itemsize
            return Tensor(self._storage, (length,), None, what[0], self._offset * self.dtype.itemsize // what[0].itemsize)
        shape = what[0] if isinstance(what[0], (tuple, list)) else what
        return Tensor(self._storage, shape, None, self.dtype, self._offset)

    def as_strided(self, shape, stride, offset: int = 0) -> "Tensor":
        return Tensor(self._storage, shape, stride, self.dtype, offset)


class TorchFunctionMode:
    """Within it, `zeros` and `empty` ask it first."""

    active: list["TorchFunctionMode"] = []

    def __enter__(self):
        self.active.append(self)
        return self

    def __exit__(self, *_):
        self.active.remove(self)


def zeros(*size, dtype=None, device=None):
    if TorchFunctionMode.active:
        mode = TorchFunctionMode.active.pop()
        try:
            return mode.__torch_function__(zeros, (), size, {"dtype": dtype, "device": device})
        finally:
            TorchFunctionMode.active.append(mode)
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    dtype = dtype or DTYPES["float32"]
    return Tensor(Storage(math.prod(shape) * dtype.itemsize), shape, None, dtype)


def from_dlpack(array) -> Tensor:
    """Of numpy's array, or one that it can see, as it lies there."""
    import numpy

    array = numpy.asarray(array)
    stride = tuple(step // array.itemsize for step in array.strides)
    return Tensor(Storage(array.nbytes, array.ctypes.data, array), array.shape, stride, DTYPES[str(array.dtype)])


def module() -> dict[str, types.ModuleType]:
    """The modules by name."""
    torch, overrides, cuda = (types.ModuleType(name) for name in ("torch", "torch.overrides", "torch.cuda"))
    overrides.TorchFunctionMode = TorchFunctionMode
    cuda.is_available = lambda: False
    content = dict(Tensor=Tensor, device=Device, dtype=Dtype, zeros=zeros, empty=zeros, from_dlpack=from_dlpack, overrides=overrides, cuda=cuda)
    vars(torch).update(content, get_default_dtype=lambda: DTYPES["float32"], __path__=[], **DTYPES)
    return {"torch": torch, "torch.overrides": overrides, "torch.cuda": cuda}
