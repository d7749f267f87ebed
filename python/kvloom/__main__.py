"""`python -m kvloom`: the command line, the same as the executable `kvloom`."""

from __future__ import annotations

import signal
import sys

from kvloom._kvloom import main as run_command_line

__all__ = ["main"]


def main() -> int:
    """Runs the command line with the words of sys.argv and gives its exit code."""
    # As in a process that is not Python's: Ctrl-C ends it, and a closed pipe too.
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    return run_command_line(["kvloom", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
