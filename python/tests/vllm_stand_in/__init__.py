"""A stand-in for vLLM: its calls to a KV connector, in the order of a recording, without vLLM.

    with installed("0.32.0"):                                    modules named vllm.*, as that release has them
        from kvloom.vllm import KVLoomConnector
        replay = Replay(KVLoomConnector, read("chunked"), params={"a": {...}})
        replay.run()                                             raises Differs where the connector breaks the interface

Tests that call in an order of their own do it with what engine.py makes: requests, a scheduler's output, configurations, tensors.
A recording is a real vLLM 0.32's (tests/vllm/record.py). Releases 0.24 to 0.32 differ from it by what versions.py declares, and by no more.
What the connector answers must be what was recorded, or vLLM would have gone on in another way; *when* a load or a send ends is free.
"""

from vllm_stand_in.modules import installed
from vllm_stand_in.recording import Recording, read, recordings
from vllm_stand_in.replay import Differs, Replay
from vllm_stand_in.versions import RELEASES, Release

__all__ = ["RELEASES", "Differs", "Recording", "Release", "Replay", "installed", "read", "recordings"]
