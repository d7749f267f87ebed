"""What must not take an engine down, or take another request with it: vLLM ends the whole engine for an exception out of a connector."""

from __future__ import annotations

import fcntl
import os
import resource
import types

import pytest
from vllm_stand_in import installed
from vllm_stand_in.engine import Request, alike, output, vllm_config

import kvloom

with installed():
    from kvloom.vllm.params import Settings, Transfer
    from kvloom.vllm.scheduler_side import SchedulerSide
    from kvloom.vllm.worker_side import WorkerSide, computes_in_parts

pytestmark = pytest.mark.usefixtures("stand_in")

SAID = {"role": "decode", "transfer": "key", "seconds": 30, "prefill": ["tcp://127.0.0.1:1"]}
HALF = "\ud800"  # what JSON's "\ud800" is in Python: no UTF-8


def _config(**parallel):
    """`parallel`: more of what stands in the parallel config."""
    config = vllm_config(alike(2, 16), 4)
    vars(config.parallel_config).update(parallel)
    return config


# ---- what a request says ----


@pytest.mark.parametrize("params", ["a text", ["kvloom"], 7, 0.5])
def test_parameters_that_are_no_object_are_refused(params):
    """vLLM's vllm_xargs may say kv_transfer_params too, and then it is what a client likes."""
    with pytest.raises(kvloom.InvalidArgument, match="kv_transfer_params=.*wanted an object"):
        Transfer.parse(params)


@pytest.mark.parametrize(
    "wrong", [{"transfer": HALF}, {"prefill": [f"tcp://{HALF}:1"]}, {"prefill_keys": [HALF]}], ids=["transfer", "prefill", "prefill_keys"]
)
def test_text_that_is_no_utf8_is_refused(wrong):
    with pytest.raises(kvloom.InvalidArgument, match="UTF-8"):
        Transfer.parse({"kvloom": SAID | wrong})


def test_more_prefill_ranks_than_anybody_has_are_refused():
    """Each would cost a connection."""
    with pytest.raises(kvloom.InvalidArgument, match="1025 addresses: wanted one for each prefill rank, at the most 1024"):
        Transfer.parse({"kvloom": SAID | {"prefill": ["tcp://127.0.0.1:1"] * 1025}})


@pytest.mark.parametrize("params", ["a text", ["kvloom"], {"kvloom": SAID | {"transfer": HALF}}], ids=["text", "list", "half a pair"])
@pytest.mark.parametrize("decodes", [True, False])
def test_such_a_request_fails_alone(params, decodes):
    """On a decode server as a load that failed; on a prefill server it is computed, and nothing is sent."""
    side, request = SchedulerSide(prefills=not decodes, decodes=decodes, groups=1), Request("a", 300, params)
    side.know(request)
    assert side.matched(request, 0) == ((299, True) if decodes else (0, False))
    side.allocated(request, ([1, 2, 3],), 299 if decodes else 0)
    step = side.build(output())
    assert [load.request for load in step.loads if load.refused] == (["a"] if decodes else []) and not step.offers
    assert not side.finished(request)


# ---- what a server is like ----


def test_an_idle_step_waits_on_any_descriptor():
    """select() knows those below 1024; the worker of a GPU may have more open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    side = WorkerSide(_config(), None, Settings(), prefills=False, decodes=True)
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1024)
    side.decode = types.SimpleNamespace(open=True, session=high)
    side._wait_for_news()
    for descriptor in (reading, writing, high):
        os.close(descriptor)


def test_a_folder_of_traces_that_is_not_there_stops_the_server(tmp_path):
    config, settings = _config(), {"trace": str(tmp_path)}
    WorkerSide(config, None, Settings.parse(settings, prefills=False), prefills=False, decodes=True)
    with pytest.raises(kvloom.InvalidArgument, match="trace=.*no such folder"):
        WorkerSide(config, None, Settings.parse({"trace": str(tmp_path / "none")}, prefills=False), prefills=False, decodes=True)


def test_a_step_in_parts_is_known():
    parallel = [{}, {"enable_dbo": True}, {"enable_dbo": False, "use_ubatching": True}]
    assert [computes_in_parts(_config(**more)) for more in parallel] == [False, True, True]
