"""What the type hints of kvloom mean: arrays and memory of any library, by protocol."""

from __future__ import annotations

import array
import mmap
from collections.abc import Sequence
from typing import Any, Protocol, Union

__all__ = ["Array", "Memory", "Pages", "SupportsDLPack"]


class SupportsDLPack(Protocol):
    """A tensor of any library: torch, NumPy, JAX, CuPy. Source: the DLPack protocol of the Python array API standard."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """A capsule with a DLManagedTensor."""
        ...

    def __dlpack_device__(self) -> Any:
        """(device type, device id); (1, 0) is host memory, (2, n) is GPU n."""
        ...


class Array(Protocol):
    """What kvloom gives out: `numpy.asarray`, `torch.from_dlpack` and (in host memory) `memoryview` take it, without a copy."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """A capsule with a DLManagedTensor."""
        ...

    def __dlpack_device__(self) -> Any:
        """(device type, device id); (1, 0) is host memory, (2, n) is GPU n."""
        ...

    def __buffer__(self, flags: int, /) -> memoryview:
        """The buffer protocol; in host memory only."""
        ...


Memory = Union[SupportsDLPack, bytearray, memoryview, mmap.mmap, "array.array[Any]"]
"""Writable memory: a tensor with DLPack, on the CPU or a GPU, or something with the buffer protocol."""

Pages = Union[Sequence[int], SupportsDLPack, memoryview, "array.array[int]"]
"""Page ids [columns]: a sequence of int, or one-dimensional int64 in host memory. -1 stands for no page."""
