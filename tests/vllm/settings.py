"""How a vLLM of the tests is set up, once for servers and for engines in the test's own process.  A value; knows no process.

So that two servers fit on 2 cores with 24 GiB and their outputs can be compared token for token:
  - one OpenMP thread each (without OMP_NUM_THREADS vLLM's threads fight for the core: 8 times slower), bound to a core only where times are
    compared: bound to one that others use, a server waits while another core idles;
  - the pool is counted in blocks, not in GiB: `blocks`;
  - float32, greedy, --enforce-eager. What a token's logits are summed of depends on how its step was batched (chunk sizes, other requests),
    so two servers differ in the last bits. In bfloat16 that is enough to choose another of two near tokens; in float32 it wasn't seen to be.
    KV bytes are equal only where the chunks were the same;
  - float32 also fixes how the CPU's attention packs a page: K transposed, [head_dim, block], then V. bfloat16 on a processor with AMX is
    packed in tiles, and blocks that are no multiple of 32 in rows of 16 (vllm/v1/attention/backends/cpu_attn.py, _get_attn_isa).
"""

import dataclasses
import json
import os
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
NAME = "m"  # what all servers call their model
TRACED = {"mode": 2, "backend": "eager"}  # CompilationMode.DYNAMO_TRACE_ONCE


@dataclasses.dataclass(frozen=True)
class Settings:
    """One vLLM. Sizes are tokens unless said otherwise; `connector` is the value of --kv-transfer-config."""

    model: str | pathlib.Path
    connector: dict | None = None
    dtype: str = "float32"
    max_length: int = 2048
    chunk: int = 256  # most tokens of one step: longer prompts are computed in several
    at_once: int = 16  # most requests that run together
    block: int = 128
    blocks: int = 256  # in the pool, the null block included
    prefix_caching: bool = True
    whole_prompt_fits: bool = True  # a prompt is begun only where there are blocks for all of it; False: it may be preempted between two chunks
    tp: int = 1
    pp: int = 1
    cores: tuple[int, ...] | None = None  # which cores its ranks are bound to, one each; None: to none, the kernel chooses
    seed: int = 0
    gpu_memory: float | None = None  # part of a GPU's memory that it may take; None: it is on a CPU
    naps: bool = True  # its processes wait for each other by naps (napping/), since they share cores; False: by yields, vLLM's default
    traced: bool = False  # models are traced by Dynamo and run as they are, with no compiler: what vLLM's warm-up sets up is there
    more: tuple[str, ...] = ()  # further words of the command line
    environment: tuple[tuple[str, str], ...] = ()

    def but(self, **changes) -> "Settings":
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    def environment_of(self) -> dict[str, str]:
        """The variables that its processes run with, on top of the test's own."""
        if self.cores is not None and len(self.cores) != self.ranks:
            raise ValueError(f"tp={self.tp}, pp={self.pp} need a core for each rank; cores={self.cores}")
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in self.cores) if self.cores is not None else "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # the route that empties the prefix cache
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(python_path(self.naps)),
            "PYTHONUNBUFFERED": "1",
            **dict(self.environment),
        }

    def command(self, port: int) -> list[str]:
        """The words after `python -m` that serve it on 127.0.0.1."""
        words = ["vllm.entrypoints.cli.main", "serve", str(self.model), "--served-model-name", NAME, "--host", "127.0.0.1"]
        words += ["--port", str(port), *(("--compilation-config", json.dumps(TRACED)) if self.traced else ("--enforce-eager",))]
        for name, value in self._engine_fields().items():
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
            else:
                words += [f"--{name.replace('_', '-')}", str(value)]
        if self.connector is not None:
            words += ["--kv-transfer-config", json.dumps(self.connector)]
        return [*words, *self.more]

    def engine_arguments(self) -> dict:
        """The keyword arguments of vllm.LLM for the same."""
        run = {"compilation_config": TRACED} if self.traced else {"enforce_eager": True}
        arguments = {"model": str(self.model), **run, **self._engine_fields()}
        if self.gpu_memory is not None:
            arguments["gpu_memory_utilization"] = self.gpu_memory
        if self.connector is None:
            return arguments
        of_cpu = {"kv_buffer_device"} if self.gpu_memory is not None else set()
        return arguments | {"kv_transfer_config": {name: value for name, value in self.connector.items() if name not in of_cpu}}

    def _engine_fields(self) -> dict:
        return {
            "dtype": self.dtype, "max_model_len": self.max_length, "max_num_batched_tokens": self.chunk, "max_num_seqs": self.at_once,
            "block_size": self.block, "num_gpu_blocks_override": self.blocks, "enable_prefix_caching": self.prefix_caching,
            "tensor_parallel_size": self.tp, "pipeline_parallel_size": self.pp, "seed": self.seed,
            "scheduler_reserve_full_isl": self.whole_prompt_fits,
        }  # fmt: skip


def of(kind: str, **changes) -> Settings:
    """The settings for one of our models (models.py): float32, but where vLLM's attention for it wants bfloat16 (MLA with AMX)."""
    from models import model

    return Settings(model(kind), dtype="bfloat16" if kind == "mla" else "float32").but(**changes)


def python_path(naps: bool = True) -> list[str]:
    """Where vLLM's processes find the tests' own modules and kvloom: KVLOOM_PACKAGES if named (an installed one), else the sources."""
    kvloom = os.environ.get("KVLOOM_PACKAGES") or str(REPOSITORY / "python")
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    plugins = [str(HERE / "eye"), *([str(HERE / "napping")] if naps else [])]
    return [str(HERE), *plugins, kvloom, *inherited]


def connector(name: str, module: str | None = None, role: str = "kv_both", **extra) -> dict:
    """A --kv-transfer-config: a class of vLLM's own by its name, or any by module and name. `extra` is kv_connector_extra_config."""
    config = {"kv_connector": name, "kv_role": role, "kv_buffer_device": "cpu", "kv_connector_extra_config": extra}
    return config | ({"kv_connector_module_path": module} if module else {})
