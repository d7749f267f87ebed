"""Real servers with KVLoomConnector behind the proxy, as users run them, their processes waiting as they do by default: answers are one server's."""

from ask import prompts_of, together
from harness import Proxy, Server, running
from meeting import free_ports, kvloom_connector
from models import model
from settings import Settings

LENGTHS = [1, 40, 128, 129, 257, 700, 1_100, 1_900]


def test_answers_through_the_proxy_are_one_servers():
    port = free_ports(1)
    prefill = Server(Settings(model("llama"), naps=False, connector=kvloom_connector("kv_producer", control_port=port)), "prefill")
    decode = Server(Settings(model("llama"), naps=False, connector=kvloom_connector("kv_consumer")), "decode")
    prompts = prompts_of(LENGTHS, seed=3)
    with running(prefill, decode):
        with running(Proxy([prefill], [decode], "--alone-below", "0", controls=[f"tcp://127.0.0.1:{port}"])) as (proxy,):
            served = together(proxy.url, prompts, max_tokens=12, at_once=8)
            prefill.wait_quiet(10)
            decode.wait_quiet(10)
            counted = decode.metrics()
        # What landed is in decode's prefix cache: without it, decode computes all by itself.
        decode.forget_prefixes()
        alone = together(decode.url, prompts, max_tokens=12, at_once=1)
    # All but the last token of each came from prefill: nothing of the one that has no other.
    assert counted["vllm:external_prefix_cache_hits_total"] == sum(length - 1 for length in LENGTHS)
    assert counted["vllm:kvloom_transfers_total"] == len(LENGTHS) - 1
    assert [answer.tokens for answer in served] == [answer.tokens for answer in alone]
