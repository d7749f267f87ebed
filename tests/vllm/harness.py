"""Real vLLM servers for tests: started, asked, looked into, stopped, killed.  All on 127.0.0.1; nothing outlives the test.

    with Server(Settings(model("llama"))) as server:
        answer = server.complete("A loom weaves", max_tokens=16)      # Completion: token ids, text, times
        server.pool()                                                 # Pool: blocks, free; of the engine itself, at any moment
        server.kill(); server.start(); server.wait()                  # as after a crash, on the same port

Owner: each Server and Proxy owns its processes and its folder (log, eye); `close` leaves neither. Threads: one Server may be asked by many.
Every wait has a deadline; what runs into one says so with the end of the server's log.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from keeper import descendants, name_of, remove, shared_files
from settings import HERE, Settings

START_DEADLINE = 300.0  # seconds: a first start imports torch with cold caches, two of them on 2 cores
STOP_DEADLINE = 60.0
ANSWER_DEADLINE = 300.0
LOOK_EVERY = 0.1
HOST = "127.0.0.1"
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # no proxy of the environment between two local processes


class ServerError(RuntimeError):
    """A server did not do what it should; the message has the end of its log."""


@dataclasses.dataclass(frozen=True)
class Pool:
    """An engine's pool of KV blocks and its requests. `free` counts blocks that are cached and used by nobody, too."""

    blocks: int
    free: int
    cached: int  # hashes that a prefix can be found by
    requests: dict[str, int]  # vLLM's RequestStatus -> how many; finished ones stand here while a connector keeps their blocks

    @property
    def held(self) -> int:
        """Blocks that somebody holds."""
        return self.blocks - self.free

    @property
    def quiet(self) -> bool:
        """Nothing is held and nobody is known."""
        return self.free == self.blocks and not self.requests


def free_ports(count: int = 1) -> int:
    """The first of `count` ports in a row that are free, and that the kernel gives to nobody who doesn't ask for them: they are bound seconds later."""
    first_given = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.randrange(first_given - 10_000, first_given - count)
        with contextlib.ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind((HOST, port))
                return first
            except OSError:
                continue


def until(ready, deadline: float, what: str):
    """Call `ready` until it gives something true, and return that. @error not within `deadline` seconds: TimeoutError saying `what`."""
    end = time.monotonic() + deadline
    while True:
        if found := ready():
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"after {deadline:g} s still not: {what}")
        time.sleep(LOOK_EVERY)


class Kept:
    """A command whose processes are kept together (keeper.py), with its log, on a port of its own."""

    def __init__(self, what: str, port: int | None = None, folder: pathlib.Path | None = None):
        self.what = what
        self.port = port or free_ports()
        self.url = f"http://{HOST}:{self.port}"
        self._keep_folder = folder is not None
        self.folder = folder or pathlib.Path(tempfile.mkdtemp(prefix="kvloom-vllm-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / f"{what}.log"
        self._report = self.folder / f"{what}.left"
        self._keeper: subprocess.Popen | None = None

    def command(self) -> tuple[list[str], dict[str, str]]:
        """The words to run and the variables they run with."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the command; doesn't wait for it. @pre it isn't running."""
        if self.running:
            raise ServerError(f"{self.what} runs already")
        words, environment = self.command()
        self._report.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            keeper = [sys.executable, str(HERE / "keeper.py"), str(self._report), *words]
            self._keeper = subprocess.Popen(keeper, stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ | environment)

    @property
    def running(self) -> bool:
        return self._keeper is not None and self._keeper.poll() is None

    def processes(self) -> dict[int, str]:
        """All that lives of it: process id -> command line."""
        return {process: name_of(process) for process in descendants(self._keeper.pid)} if self.running else {}

    def wait(self, deadline: float = START_DEADLINE) -> None:
        """Until it is healthy. @error it ends before, or not in time: ServerError."""

        def healthy() -> bool:
            if not self.running:
                raise ServerError(f"{self.what} ended while it started; its log ends with\n{self.last_words()}")
            with contextlib.suppress(OSError):
                return _open(f"{self.url}/health", timeout=5).status == 200
            return False

        try:
            until(healthy, deadline, f"{self.what} is healthy")
        except TimeoutError as error:
            raise ServerError(f"{error}; its log ends with\n{self.last_words()}") from None

    def stop(self, deadline: float = STOP_DEADLINE) -> list[str]:
        """SIGTERM to the command, as an operator would. @return processes that it left behind; they are killed. @error not in time: ServerError."""
        if not self.running:
            return []
        first = descendants(self._keeper.pid)[0]
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGTERM)
        try:
            self._keeper.wait(deadline)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"{self.what} did not end within {deadline:g} s of SIGTERM; its log ends with\n{self.last_words()}") from None
        self._keeper.stdin.close()
        return self._report.read_text().splitlines() if self._report.exists() else []

    def kill(self) -> None:
        """SIGKILL to all its processes at once, as a crash of the machine would. @post none of them lives. @error one does: ServerError."""
        if self._keeper is None:
            return
        all_of_it = descendants(self._keeper.pid)
        files = shared_files(all_of_it)
        for process in all_of_it:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._keeper.stdin.close()
        try:
            self._keeper.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            raise ServerError(f"{self.what} still lives {STOP_DEADLINE:g} s after SIGKILL: {self.processes()}") from None
        remove(files)

    def freeze(self) -> None:
        """SIGSTOP to all its processes: connections stay open and nobody answers."""
        for process in descendants(self._keeper.pid):
            os.kill(process, signal.SIGSTOP)

    def thaw(self) -> None:
        for process in descendants(self._keeper.pid):
            os.kill(process, signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """Processor time that its living processes have used."""
        ticks = 0
        for process in descendants(self._keeper.pid):
            with contextlib.suppress(OSError):
                fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def metrics(self, deadline: float = ANSWER_DEADLINE) -> dict[str, float]:
        """Its Prometheus metrics, summed over labels: name -> value."""
        found: dict[str, float] = {}
        for line in _open(f"{self.url}/metrics", timeout=deadline).read().decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def last_words(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else "(no log)"

    def close(self) -> None:
        """Kill what runs, and remove the folder unless the caller named it."""
        self.kill()
        if not self._keep_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        self.start()
        try:
            self.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Server(Kept):
    """One vLLM server. `kill`, then `start` and `wait`, is a crash and a restart on the same port."""

    def __init__(self, settings: Settings, what: str = "server", port: int | None = None, folder: pathlib.Path | None = None):
        super().__init__(what, port, folder)
        self.settings = settings
        self.sockets = pathlib.Path(tempfile.mkdtemp(prefix="kvloom-eye-"))  # short: a socket's path has at most 107 bytes

    def command(self) -> tuple[list[str], dict[str, str]]:
        own = {"KVLOOM_TEST_EYE": str(self.sockets), "VLLM_RPC_BASE_PATH": str(self.sockets)}  # vLLM removes no socket of its processes
        environment = self.settings.environment_of() | own
        return [sys.executable, "-m", *self.settings.command(self.port)], environment

    def start(self) -> None:
        for socket_left in self.sockets.glob("*.sock"):
            socket_left.unlink()
        super().start()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def pool(self) -> Pool:
        """The engine's counts at this moment. @error no engine answers within 10 s: ServerError."""
        try:
            seen = until(self._look, 10.0, f"{self.what}'s engine says what its pool is")
        except TimeoutError as error:
            raise ServerError(f"{error}; its log ends with\n{self.last_words()}") from None
        return Pool(**seen["pool"], requests=seen["requests"])

    def _look(self) -> dict | None:
        for path in self.sockets.glob("*.sock"):
            with socket.socket(socket.AF_UNIX) as asked, contextlib.suppress(OSError, ValueError):
                asked.settimeout(10.0)
                asked.connect(str(path))
                seen = json.loads(b"".join(iter(lambda: asked.recv(65536), b"")))
                if "error" in seen:
                    raise ServerError(f"{self.what}'s engine can't be looked into: {seen['error']}")
                if seen["pool"]:
                    return seen
        return None

    def wait_quiet(self, deadline: float) -> Pool:
        """Until no block is held and no request known. @error not in time: TimeoutError with the counts."""
        end = time.monotonic() + deadline
        while not (seen := self.pool()).quiet:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.what} still holds something after {deadline:g} s: {seen}")
            time.sleep(LOOK_EVERY)
        return seen

    def forget_prefixes(self) -> None:
        """Empty its prefix cache. @error the engine refuses, because blocks are held: ServerError."""
        if not post(self.url, "/reset_prefix_cache", {}, 30.0)["success"]:
            raise ServerError(f"{self.what} keeps its prefix cache, since blocks are held: {self.pool()}")


class Proxy(Kept):
    """`python -m kvloom.vllm.proxy` before prefill and decode servers; `controls` are the prefill servers' control addresses."""

    def __init__(self, prefill: list[Server], decode: list[Server], *options: str, controls: list[str] | None = None, what: str = "proxy",
                 folder: pathlib.Path | None = None):  # fmt: skip
        super().__init__(what, None, folder)
        named = [f"{server.url},control={control}" for server, control in zip(prefill, controls)] if controls else [s.url for s in prefill]
        words = ["kvloom.vllm.proxy", "--host", HOST, "--port", str(self.port)]
        words += [word for url in named for word in ("--prefill", url)]
        self._words = [*words, *(word for server in decode for word in ("--decode", server.url)), *options]
        self._environment = {"PYTHONPATH": (decode or prefill)[0].settings.environment_of()["PYTHONPATH"], "PYTHONUNBUFFERED": "1"}

    def command(self) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-m", *self._words], self._environment

    def sends_to(self, server: Server) -> bool:
        """Whether the proxy takes that server to be up."""
        seen = json.loads(_open(f"{self.url}/health", timeout=10).read())
        return {**seen["prefill"], **seen["decode"]}[server.url.removeprefix("http://")]


@contextlib.contextmanager
def running(*kept: Kept):
    """Start all at once, wait for all, and close all at the end. Servers before the proxy that needs them."""
    try:
        for one in kept:
            one.start()
        for one in kept:
            one.wait()
        yield kept
    finally:
        for one in reversed(kept):
            one.close()


def post(url: str, path: str, body: dict, deadline: float = ANSWER_DEADLINE, headers: dict | None = None):
    """POST JSON, and the answer's body parsed (None if empty). @error an HTTP error: ServerError with status and body."""
    asked = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})
    try:
        with _open(asked, timeout=deadline) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}{path} answered {error.code}: {error.read().decode(errors='replace')[:2000]}") from None
    return json.loads(text) if text else None
