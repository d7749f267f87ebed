"""Exceptions: one family, mapped from the library's errors in one place (`make`).

Each has a `code` (what kind of failure), a `scope` (what has to be rebuilt: nothing, the transfer, the connection to a peer, the process) and a
`message` (one sentence with the offending values, and what to do where that can be known). Where Python has a class for the same idea, ours
derives from it too, so that `except ValueError` or `except TimeoutError` do what they say.
"""

from __future__ import annotations

from kvloom._kvloom import Code, Scope

__all__ = [
    "Cancelled",
    "DeadlineExceeded",
    "Error",
    "Exhausted",
    "InvalidArgument",
    "IoError",
    "OutOfRange",
    "Overflow",
    "ParseError",
    "Unavailable",
    "Unsupported",
    "make",
]


class Error(Exception):
    """Whatever kvloom refuses or fails at. Catch a subclass by its code, or this and look at `code` and `scope`."""

    code: Code = Code.invalid_argument
    """What kind of failure it is; each subclass has its own."""
    scope: Scope
    """What has to be rebuilt."""
    message: str
    """The sentence. For a parse error of sharding words: two more lines, the words and the mark under the wrong one."""

    def __init__(self, message: str, code: Code | None = None, scope: Scope = Scope.operation) -> None:
        Exception.__init__(self, message)
        self.message = message
        if code is not None:
            self.code = code
        self.scope = scope

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, {self.code}, {self.scope})"

    def __reduce__(self) -> tuple[type[Error], tuple[str, Code, Scope]]:
        return type(self), (self.message, self.code, self.scope)


class InvalidArgument(Error, ValueError):
    """A value that can never be right (`Code.invalid_argument`)."""

    code = Code.invalid_argument


class ParseError(Error, ValueError):
    """Text or bytes that do not follow their grammar (`Code.parse`)."""

    code = Code.parse


class Unsupported(Error):
    """Well formed, but this cannot be done (`Code.unsupported`); the message says why and what can."""

    code = Code.unsupported


class OutOfRange(Error, IndexError):
    """An index or length outside of what it indexes (`Code.out_of_range`)."""

    code = Code.out_of_range


class Overflow(Error, OverflowError):
    """A product or sum that does not fit 64 bits (`Code.overflow`)."""

    code = Code.overflow


class Exhausted(Error):
    """No more memory, descriptors or capacity (`Code.exhausted`)."""

    code = Code.exhausted


class Unavailable(Error):
    """The peer or resource is gone (`Code.unavailable`)."""

    code = Code.unavailable


class DeadlineExceeded(Error, TimeoutError):
    """Not done within the time given (`Code.deadline`)."""

    code = Code.deadline


class Cancelled(Error):
    """Ended by the caller (`Code.cancelled`)."""

    code = Code.cancelled


class IoError(Error, OSError):
    """The operating system or the GPU's driver refused (`Code.io`)."""

    code = Code.io


_CLASSES: dict[Code, type[Error]] = {
    of.code: of
    for of in (
        InvalidArgument,
        ParseError,
        Unsupported,
        OutOfRange,
        Overflow,
        Exhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        IoError,
    )
}


def make(message: str, code: Code, scope: Scope) -> Error:
    """The exception for an error of the library; the extension calls it, nobody else has to."""
    return _CLASSES[code](message, code, scope)
