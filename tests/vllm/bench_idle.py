"""bench_idle.py [--rounds N] [--steps N]: what KVLoomConnector costs while it is attached and nothing is transferred.

Steps: engines in processes of their own that differ in the connector alone, on one core, each in turn in every round: one request decodes, and
each step's time is taken in the engine. Two have no connector: what they differ by is what this machine can't tell from nothing. One has a
connector that does nothing (null_connector.py): what vLLM does more where there is any. Tiny model: a step of 3 ms, so that microseconds show.
Idle: servers without and with it, all their processes' CPU time while nobody asks; and tokens a second of one stream, in turn.
Prints tables; asserts nothing. Times of medians of rounds, with the least and the most of the rounds.
"""

import argparse
import statistics
import time

from ask import complete, prompts_of
from harness import Server, running
from instance import Instance
from meeting import free_ports
from models import model
from settings import Settings, connector

IDLE = 10.0  # seconds
SETTLE = 2.0  # seconds before that: vLLM's processes spin for one after the last step, with any connector or none
PROMPT = 64  # tokens
CORE = 1
NOTHING, AGAIN, NULL, OURS = "no connector", "no connector, again", "a connector that does nothing", "KVLoomConnector"


def connectors() -> dict[str, dict | None]:
    ours = connector("KVLoomConnector", "kvloom.vllm", "kv_both", control_port=free_ports(1))
    return {NOTHING: None, AGAIN: None, NULL: connector("NullConnector", "null_connector"), OURS: ours}


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def steps(rounds: int, count: int) -> None:
    settings = Settings(model("llama"), naps=False, prefix_caching=False, cores=(CORE,))
    engines = {name: Instance(settings.but(connector=config), name) for name, config in connectors().items()}
    (prompt,) = prompts_of([PROMPT])
    times: dict[str, list[float]] = {name: [] for name in engines}
    try:
        for engine in engines.values():
            engine.ready().step_times(prompt, 50)
        for number in range(rounds):
            for name in list(engines) if number % 2 else reversed(engines):
                times[name].append(1e6 * statistics.median(engines[name].step_times(prompt, count)[1:]))
    finally:
        for engine in engines.values():
            engine.close()
    print(f"\nA decode step, one request, tiny llama, core {CORE}: medians of {rounds} rounds of {count} steps (least to most)\n")
    print(f"| {'':30s} | us a step | us more than without |\n|---|---|---|")
    for name, each in times.items():
        more = [own - nothing for own, nothing in zip(each, times[NOTHING])]
        print(f"| {name:30s} | {spread(each, '.0f')} | {spread(more, '+.0f') if name != NOTHING else ''} |")


def idle(rounds: int, tokens: int) -> None:
    settings = Settings(model("llama"), naps=False, prefix_caching=False)
    servers = {name: Server(settings.but(connector=config), "server") for name, config in connectors().items() if name in (NOTHING, OURS)}
    (prompt,) = prompts_of([PROMPT])
    with running(*servers.values()):
        rates: dict[str, list[float]] = {name: [] for name in servers}
        for server in servers.values():
            complete(server.url, prompt, tokens)
        for number in range(rounds):
            for name in list(servers) if number % 2 else reversed(servers):
                rates[name].append(tokens / complete(servers[name].url, prompt, tokens).seconds)
        time.sleep(SETTLE)
        before = {name: server.cpu_seconds() for name, server in servers.items()}
        time.sleep(IDLE)
        used = {name: 100 * (server.cpu_seconds() - before[name]) / IDLE for name, server in servers.items()}
    print(f"\nServers: one answer of {tokens} tokens, medians of {rounds} (least to most); CPU of all processes while idle for {IDLE:g} s\n")
    print(f"| {'':30s} | tokens/s | idle, % of a core |\n|---|---|---|")
    for name in servers:
        print(f"| {name:30s} | {spread(rates[name], '.1f')} | {used[name]:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=400)
    asked = parser.parse_args()
    steps(asked.rounds, asked.steps)
    idle(asked.rounds, asked.steps)


if __name__ == "__main__":
    main()
