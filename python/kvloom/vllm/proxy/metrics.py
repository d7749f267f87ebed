"""What the proxy counts, as Prometheus text. One registry per proxy: no globals, so that two proxies in one process (tests)
count apart."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvloom.vllm.proxy.choose import Pool
from kvloom.vllm.proxy.config import Role

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Names are in docs/proxy.md; a series is added there and here together (a test compares them)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter("kvloom_proxy_requests", "Requests that ended", ["route", "outcome"], registry=r)
        self.open = Gauge("kvloom_proxy_open_requests", "Requests that have not ended", registry=r)
        self.attempts = Counter(
            "kvloom_proxy_attempts", "Requests to instances that ended", ["role", "instance", "outcome"], registry=r
        )
        self.retries = Counter(
            "kvloom_proxy_retries", "Attempts that were made again, by whose failure it was", ["role"], registry=r
        )
        self.alone = Counter("kvloom_proxy_decode_alone", "Attempts with no transfer", ["reason"], registry=r)
        self.prompt = Counter("kvloom_proxy_prompt_tokens", "Prompt tokens sent, estimated", ["role"], registry=r)
        self.matched = Counter(
            "kvloom_proxy_matched_tokens", "Prompt tokens sent to where their prefix was before", ["role"], registry=r
        )
        self.up = Gauge("kvloom_proxy_instance_up", "1: gets requests", ["role", "instance"], registry=r)
        self.instance_open = Gauge(
            "kvloom_proxy_instance_open_requests", "Requests open on an instance", ["role", "instance"], registry=r
        )
        self.instance_tokens = Gauge(
            "kvloom_proxy_instance_open_tokens", "Tokens of these, estimated", ["role", "instance"], registry=r
        )
        self.checks = Counter("kvloom_proxy_health_checks", "Looks at /health", ["role", "instance", "outcome"], registry=r)
        self.first = Histogram(
            "kvloom_proxy_first_byte_seconds", "From request to first content", ["route"], buckets=SECONDS, registry=r
        )
        self.total = Histogram("kvloom_proxy_request_seconds", "From request to end", ["route"], buckets=SECONDS, registry=r)
        self.prefill = Histogram(
            "kvloom_proxy_prefill_seconds", "Of prefill requests that succeeded", buckets=SECONDS, registry=r
        )
        self.draining = Gauge("kvloom_proxy_draining", "1: SIGTERM came", registry=r)

    def text(self, pools: Iterable[tuple[Role, Pool]]) -> bytes:
        """Prometheus text, with the instances as they are now."""
        for role, pool in pools:
            for member in pool.members:
                self.up.labels(role, member.name).set(member.up)
                self.instance_open.labels(role, member.name).set(member.open)
                self.instance_tokens.labels(role, member.name).set(member.tokens)
        return generate_latest(self.registry)
