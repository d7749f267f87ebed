"""The benchmark against vLLM's own connectors (peers/): what it makes of what it measured. No server is started."""

from failures import Row
from peers import ends, idle, report, ttft

NOTHING = {"outcome": "none", "tokens": (), "answered": None, "prefill_free": None, "decode_free": None, "pools_equal": True}


def samples(connector: str, milliseconds: list[float], recomputed: int = 0) -> list[ttft.Sample]:
    """One a round, of each length, one at once and eight."""
    return [
        ttft.Sample(connector, number, length, at_once, (each / 1e3,), recomputed, 0)
        for number, each in enumerate(milliseconds) for length in ttft.LENGTHS for at_once in ttft.AT_ONCE
    ]  # fmt: skip


def figure(figures: list[report.Figure], what: str) -> report.Figure:
    return next(one for one in figures if one.what == what)


def row(way: str, scenario: str, **seen) -> Row:
    return Row(way, scenario, **(NOTHING | seen))


def test_a_connector_is_compared_with_the_single_server_of_its_own_round():
    """The machine was twice as slow in the second round: the median of the differences is not the difference of the medians."""
    measured = samples("none", [100, 200, 100]) + samples("kvloom", [110, 211, 112]) + samples("nixl", [109, 260, 170])
    figures = report.ttft_figures(measured)
    assert round(figure(figures, "TTFT 256 tokens, 1 at once, kvloom").value, 6) == 11
    assert round(figure(figures, "TTFT 256 tokens, 1 at once, nixl").value, 6) == 60
    assert figure(figures, "TTFT 256 tokens, 1 at once, kvloom").holds is True
    assert figure(figures, "TTFT 256 tokens, 1 at once, nixl").holds is None


def test_the_lowest_is_missed_by_who_is_not():
    measured = samples("none", [100]) + samples("kvloom", [120], recomputed=250) + samples("mooncake", [119])
    missed = figure(report.ttft_figures(measured), "TTFT 1900 tokens, 8 at once, kvloom")
    assert missed.holds is False
    assert "250 prompt tokens computed by decode" in missed.shape
    assert "MISSED" in report.text([missed])


def test_alone_nobody_is_the_lowest():
    assert figure(report.ttft_figures(samples("none", [9]) + samples("kvloom", [10])), "TTFT 256 tokens, 1 at once, kvloom").holds is None


def test_idle_is_what_is_beyond_a_server_without_a_connector():
    figures = report.idle_figures([idle.Idle("none", "", 0.5), idle.Idle("kvloom", "decode", 1.4), idle.Idle("nixl", "decode", 100.5)])
    assert round(figures[1].value, 6) == 0.9
    assert figures[1].holds is True
    assert figures[2].holds is None


def test_an_end_has_two_seconds_or_two_more_than_it_was_given():
    assert ends.holds(row("kvloom", "D asks, P never comes", outcome="tokens", answered=3.9, decode_free=3.9, looked_at="D"))
    assert not ends.holds(row("kvloom", "P killed while D waits", outcome="tokens", answered=3.9, decode_free=3.9, looked_at="D"))
    assert not ends.holds(row("kvloom", "D's client leaves", prefill_free=2.5, decode_free=0.1, looked_at="PD"))
    assert not ends.holds(row("kvloom", "D asks, P never comes", outcome="no answer"))
    assert not ends.holds(row("kvloom", "D's client leaves", pools_equal=False))
    assert not ends.holds(row("kvloom", "D's client leaves", prefill_free=0.1, looked_at="PD"))
    assert not ends.holds(row("kvloom", "D's client leaves", happened=False))


def test_what_a_server_still_holds_stands_in_the_table():
    shown = report.ends_text([row("mooncake", "P done, D never asks", prefill_free=None, looked_at="P", pools_equal=False)])
    assert "| - | never | - | no |" in shown
    assert "goal" not in shown
