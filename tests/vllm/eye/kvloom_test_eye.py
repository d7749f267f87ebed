"""An eye in vLLM's engine: counts of its pool of blocks and of its requests, read from outside while it runs, at any moment.

Why: vLLM's own gauge (vllm:kv_cache_usage_perc) is written when a step ends, so blocks that come back after the last step are not in it,
and those are what the tests ask about. It is a plugin as vLLM offers them (entry point vllm.general_plugins), called in each process;
it changes nothing and calls nothing of vLLM but getters. It listens only where the environment variable KVLOOM_TEST_EYE names a folder:
on FOLDER/PID.sock, one JSON object for each connection; `pool` is null in processes that have none.
"""

import json
import os
import socket
import sys
import threading
import weakref
from collections import Counter

FOLDER = "KVLOOM_TEST_EYE"


class Eye:
    """Finds the scheduler of this process and reads it. @pre called in a thread of its own."""

    def __init__(self):
        self._engine = lambda: None

    def _scheduler(self):
        """Of the engine whose loop is somewhere on a thread's stack. (Not searched among all objects: vLLM hides them, gc.freeze.)"""
        from vllm.v1.engine.core import EngineCore

        if self._engine() is None:
            for frame in sys._current_frames().values():
                while frame is not None:
                    if isinstance(engine := frame.f_locals.get("self"), EngineCore):
                        self._engine = weakref.ref(engine)
                    frame = frame.f_back
        return getattr(self._engine(), "scheduler", None)

    def look(self) -> dict:
        """What is seen now; `pool` is None where this process has no scheduler."""
        scheduler = self._scheduler()
        return {"pid": os.getpid(), **(look_at(scheduler) if scheduler is not None else {"pool": None})}


def look_at(scheduler) -> dict:
    """Counts of vLLM's scheduler. `blocks` is without the null block, which is never free."""
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "pool": {"blocks": pool.num_gpu_blocks - 1, "free": pool.get_num_free_blocks(), "cached": len(pool.cached_block_hash_to_block)},
        "requests": dict(Counter(request.status.name for request in list(scheduler.requests.values()))),
    }


def _answer(listener: socket.socket) -> None:
    eye = Eye()
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                seen = eye.look()
            except Exception as error:  # whatever it is belongs to the test that asked, not to the engine
                seen = {"pid": os.getpid(), "pool": None, "error": repr(error)}
            try:
                connection.sendall(json.dumps(seen).encode())
            except OSError:
                pass


def open_eye() -> None:
    """vLLM calls it in every process, sometimes more than once."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    path = os.path.join(folder, f"{os.getpid()}.sock")
    if os.path.exists(path):
        return
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)
    threading.Thread(target=_answer, args=(listener,), name="kvloom-test-eye", daemon=True).start()
