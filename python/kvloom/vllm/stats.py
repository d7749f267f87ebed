"""Counters of transfers, through vLLM's own hooks for connectors' statistics: collected in workers, added up, shown by the server's /metrics.

Names and labels of the Prometheus metrics are at the end. Times in seconds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

import kvloom

SUMS = ("loaded", "loads_failed", "loads_cancelled", "sent", "sends_failed", "sends_cancelled", "refused", "bytes")
LISTS = ("load_seconds", "exposed")


@dataclasses.dataclass
class Counts:
    """Of one worker, since they were last taken."""

    loaded: int = 0
    loads_failed: int = 0
    loads_cancelled: int = 0
    sent: int = 0
    sends_failed: int = 0
    sends_cancelled: int = 0
    refused: int = 0
    bytes: int = 0
    load_seconds: list[float] = dataclasses.field(default_factory=list)
    exposed: list[float] = dataclasses.field(default_factory=list)

    def ended_loading(self, outcome: kvloom.Outcome, landed: int, seconds: float) -> None:
        if outcome is kvloom.Outcome.landed:
            self.loaded += 1
            self.bytes += landed
            self.load_seconds.append(seconds)
        elif outcome is kvloom.Outcome.failed:
            self.loads_failed += 1
        else:
            self.loads_cancelled += 1

    def ended_sending(self, outcome: kvloom.Outcome) -> None:
        if outcome is kvloom.Outcome.landed:
            self.sent += 1
        elif outcome is kvloom.Outcome.failed:
            self.sends_failed += 1
        else:
            self.sends_cancelled += 1

    def take(self) -> KVLoomStats | None:
        """None: nothing has happened."""
        if not any(vars(self).values()):  # asked in each step, so nothing is copied for that
            return None
        data = dataclasses.asdict(self)
        self.__init__()  # type: ignore[misc]
        return KVLoomStats(data=data)


class KVLoomStats(KVConnectorStats):
    """`data`: Counts as a dict, so that it can travel."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = dataclasses.asdict(Counts())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name in (*SUMS, *LISTS):
            self.data[name] = self.data[name] + other.data[name]
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        said: dict[str, int | float] = {name: self.data[name] for name in SUMS if self.data[name]}
        for name in LISTS:
            if values := sorted(self.data[name]):
                said[f"{name} p50"] = round(values[len(values) // 2], 6)
                said[f"{name} max"] = round(values[-1], 6)
        return said

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KVLoomPromMetrics(KVConnectorPromMetrics):
    """vllm:kvloom_transfers_total{side, outcome}, vllm:kvloom_bytes_total, vllm:kvloom_load_seconds, vllm:kvloom_exposed_seconds."""

    OUTCOMES = {
        "loaded": ("decode", "landed"), "loads_failed": ("decode", "failed"), "loads_cancelled": ("decode", "cancelled"),
        "sent": ("prefill", "landed"), "sends_failed": ("prefill", "failed"), "sends_cancelled": ("prefill", "cancelled"),
        "refused": ("both", "refused"),
    }  # fmt: skip
    BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._transfers = self._counter_cls(
            name="vllm:kvloom_transfers", documentation="Transfers of KV cache that ended.", labelnames=[*labelnames, "side", "outcome"]
        )
        self._bytes = self._counter_cls(name="vllm:kvloom_bytes", documentation="Bytes of KV cache that landed here.", labelnames=labelnames)
        self._seconds = {
            "load_seconds": self._histogram("vllm:kvloom_load_seconds", "From a load's begin until it landed."),
            "exposed": self._histogram("vllm:kvloom_exposed_seconds", "From the last layer that was ready until all was sent."),
        }

    def _histogram(self, name: str, what: str) -> Any:
        return self._histogram_cls(name=name, documentation=what, buckets=list(self.BUCKETS), labelnames=self._labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for name, outcome in self.OUTCOMES.items():
            if count := transfer_stats_data.get(name):
                self._transfers.labels(*labels, *outcome).inc(count)
        if landed := transfer_stats_data.get("bytes"):
            self._bytes.labels(*labels).inc(landed)
        for name, histogram in self._seconds.items():
            for value in transfer_stats_data.get(name) or ():
                histogram.labels(*labels).observe(value)
