"""Processes of one vLLM server wait for each other by short sleeps, not by sched_yield in a loop: vLLM's own other way, which it takes on Python < 3.11.1.

Why: a server is three processes at least, and here they share a core. Linux (seen on 6.18) moves who yields in a loop ever further back in the core's
queue, and with it whoever wakes next, so that a process that has something to do may get nothing for up to a second, which is as long as vLLM's
processes spin. That struck all connectors at random: 870 ms in place of 217 for one request in three. No server with a core for each process sees it.
A plugin as vLLM offers them (entry point vllm.general_plugins), called in each process. Source: vllm/distributed/utils.py, USE_SCHED_YIELD.
"""

import vllm.distributed.utils


def nap() -> None:
    vllm.distributed.utils.USE_SCHED_YIELD = False
