"""Prefill and decode servers with a witness, proxies between any two of them, and forty prompts that share their beginnings.

For test_serving.py and test_serving_kinds.py.

    site = Site("prefill", "kv_producer", of("llama"), folder)         a Server; its connector writes checksums (witness.py) into `folder`
    with way(prefill, decode) as proxy: together(proxy.url, PROMPTS)     all requests take a transfer, however short
"""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator

from ask import Completion, complete, together
from harness import HOST, Proxy, Server, running
from meeting import free_ports, kvloom_connector
from settings import REPOSITORY, Settings
from witness import FOLDER, WITNESS, Seen, compare

TOKENS = 12  # of each answer
AT_ONCE = 8
OWN = 60  # tokens at the end of every second prompt of a family, which no other has
QUIET = 20.0  # seconds
SILENCE = 30.0  # seconds: nobody is frozen here, and four servers on two cores may be quiet for a while
ALONE = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129)  # lengths of prompts that share nothing
FAMILIES = (  # lengths of prompts that begin alike
    (200, 255, 256, 257, 300, 384, 385, 512),
    (513, 600, 640, 700, 768, 769, 900),
    (1_000, 1_100, 1_200, 1_280, 1_400, 1_500),
    (1_024, 1_600, 1_700, 1_800, 1_900),
)
# By family: tokens of it that prefill and decode have computed before. Multiples of no block: what is found is less.
WARM = ((0, 150), (420, 0), (300, 700), (900, 450))


class Site(Server):
    """A server with the witness. `control` is its rank 0's control address, where it prefills; its ranks' ports follow."""

    def __init__(self, what: str, role: str, settings: Settings, folder: pathlib.Path):
        port = free_ports(settings.tp)
        self.control = f"tcp://{HOST}:{port},ranks={settings.tp}"
        extra = {"silence": SILENCE} | ({} if role == "kv_consumer" else {"control_port": port})
        environment = (*settings.environment, (FOLDER, str(folder)))
        super().__init__(settings.but(connector=kvloom_connector(role, **extra) | WITNESS, environment=environment), what)


@contextlib.contextmanager
def way(prefill: Site, decode: Site) -> Iterator[Proxy]:
    """A proxy that sends each request to both."""
    with running(Proxy([prefill], [decode], "--alone-below", "0", controls=[prefill.control])) as (proxy,):
        yield proxy


def license_text() -> str:
    """A text that everybody has."""
    return (REPOSITORY / "LICENSE").read_text()


def family(text: list[int], number: int) -> list[int]:
    """What the prompts of a family begin with: the text, from another place on."""
    return turned(text, 151 * (number + 1))


def turned(text: list[int], places: int) -> list[int]:
    places %= len(text)
    return text[places:] + text[:places]


def forty(text: list[int]) -> list[list[int]]:
    """The prompts, 1 to 1,900 tokens, in an order in which families mix. @pre `text` has 1,900 tokens."""
    found = [turned(text, 37 * place)[:length] for place, length in enumerate(ALONE)]
    for number, lengths in enumerate(FAMILIES):
        for place, length in enumerate(lengths):
            own = turned(text, 61 * length)[: OWN * (place % 2)]
            found.append(family(text, number)[: length - len(own)] + own)
    return sorted(found, key=lambda prompt: len(prompt) * 7_919 % 1_009)


def forget(*sites: Site) -> None:
    for site in sites:
        site.wait_quiet(QUIET)
        site.forget_prefixes()


def warm(text: list[int], prefill: Site, decode: Site) -> None:
    """Each side has other beginnings in its cache. @pre both have forgotten all."""
    for number, (of_prefill, of_decode) in enumerate(WARM):
        for site, tokens in ((prefill, of_prefill), (decode, of_decode)):
            if tokens:
                complete(site.url, family(text, number)[:tokens], 1)


def hits_of(text: list[int], folder: pathlib.Path, prefill: Site, proxy: Proxy) -> list[tuple[int, int]]:
    """One prompt of each family, one after another: (tokens that prefill had, tokens that decode had)."""
    found = []
    for number in range(len(FAMILIES)):
        fresh(folder)
        before = prefill.metrics()["vllm:prefix_cache_hits_total"]
        complete(proxy.url, family(text, number)[:1_000], 1)
        prefill.wait_quiet(QUIET)
        (seen,) = compare(folder)
        assert not seen.wrong
        found.append((int(prefill.metrics()["vllm:prefix_cache_hits_total"] - before), seen.begin))
    return found


def hits_wanted(prefill: Site, decode: Site) -> list[tuple[int, int]]:
    """Whole blocks are found."""
    of_prefill, of_decode = prefill.settings.block, decode.settings.block
    return [(there // of_prefill * of_prefill, here // of_decode * of_decode) for there, here in WARM]


def served(
    prompts: list[list[int]], folder: pathlib.Path, prefill: Site, decode: Site, proxy: Proxy, at_once: int = AT_ONCE
) -> tuple[list[Completion], list[Seen]]:
    """All prompts, `at_once` at a time. @return the answers, and what was seen of the transfers."""
    fresh(folder)
    answers = together(proxy.url, prompts, TOKENS, at_once)
    prefill.wait_quiet(QUIET)
    decode.wait_quiet(QUIET)
    return answers, compare(folder)


def bytes_are_prefills(seen: list[Seen], *sites: Site) -> None:
    """@error a transfer that failed or whose bytes differ: AssertionError with what the servers said of transfers."""
    wrong = [one for one in seen if one.wrong]
    said = [f"{site.what}: {line}" for site in sites for line in site.log.read_text(errors="replace").splitlines() if "kvloom: request" in line]
    assert seen and not wrong, "\n".join([f"{len(wrong)} of {len(seen)} transfers", *map(str, wrong[:5]), *said[-20:]])


def fresh(folder: pathlib.Path) -> None:
    """The witness writes, and nothing is there yet."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
