"""keeper.py REPORT COMMAND...: runs a command and keeps all processes that come of it, so that none outlives it or the test.

A vLLM server is three processes or more, some in sessions of their own, and any of them can be killed by a test. The keeper is their
*subreaper* (Linux prctl(2), PR_SET_CHILD_SUBREAPER): whoever loses its parent becomes its child, so "all that came of it" is its
descendants, always. It ends when
  - its standard input closes, which the test's end does, however it ends: everything is killed at once;
  - the command has ended: what is left after GRACE seconds is killed, and named in the file REPORT, one process a line.
Signals that end a group of processes (timeout(1), Ctrl-C) don't end it: they end the test, and so its standard input, and then it has work to do.
Its own end takes the command with it (PR_SET_PDEATHSIG). The exit status is the command's, 137 where a signal killed it.
"""

import ctypes
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE = 15.0  # seconds
LOOK_EVERY = 0.05  # seconds


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(of: int) -> list[int]:
    """Ids of all living processes below `of`, parents first. Zombies, which only wait for being collected, don't count."""
    children: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it ended meanwhile
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, open_ = [], [of]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


def name_of(process: int) -> str:
    """Its command line, as far as it can be read."""
    try:
        words = pathlib.Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
        return words.decode(errors="replace").strip()[:200]
    except OSError:
        return "(ended)"


def shared_files(processes: list[int]) -> set[str]:
    """Files of shared memory that they have mapped: vLLM's queues between its processes."""
    found = set()
    for process in processes:
        try:
            maps = pathlib.Path(f"/proc/{process}/maps").read_text()
        except OSError:
            continue  # it ended meanwhile
        paths = {line[line.index("/") :] for line in maps.splitlines() if "/" in line}
        found |= {path for path in paths if path.startswith("/dev/shm/") and not path.endswith(" (deleted)")}
    return found


def remove(files: set[str]) -> None:
    """What nobody cleans up after a SIGKILL: vLLM's own cleaner is killed, too."""
    for file in files:
        pathlib.Path(file).unlink(missing_ok=True)


def collect() -> None:
    """Take note of children that have ended, so that no zombie is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def kill_all() -> None:
    """SIGKILL to all descendants, again until there are none: one may start another before it dies. Their shared memory goes with them."""
    files = shared_files(descendants(os.getpid()))
    while left := descendants(os.getpid()):
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(LOOK_EVERY)
        collect()
    remove(files)


def watch(command: subprocess.Popen) -> int | None:
    """Wait for the command's end or for standard input's. @post the command's status, or None when input ended first."""
    while command.poll() is None:
        if select.select([sys.stdin], [], [], LOOK_EVERY)[0] and not os.read(0, 64):
            return None
    return command.returncode


def main() -> int:
    report, arguments = pathlib.Path(sys.argv[1]), sys.argv[2:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit
    command = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    )
    status = watch(command)
    if status is not None:
        until = time.monotonic() + GRACE
        while (left := descendants(os.getpid())) and time.monotonic() < until:
            time.sleep(LOOK_EVERY)
            collect()
        report.write_text("".join(f"{process} {name_of(process)}\n" for process in left))
    kill_all()
    return status if status is not None and status >= 0 else 137


if __name__ == "__main__":
    sys.exit(main())
