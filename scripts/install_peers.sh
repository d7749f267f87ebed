#!/usr/bin/env bash
# install_peers.sh [FOLDER]: what vLLM's own connectors NixlConnector and MooncakeConnector need, for `make bench-vllm-peers`. Wheels from
# PyPI, without their requirements, in a folder of their own that is put on PYTHONPATH: the environment of install_vllm.sh stays as it is,
# and no test sees them. The folder is KVLOOM_VLLM_PEERS, or ~/.cache/kvloom/vllm-peers-0.32.0; one that is complete and of this script's
# making is kept as it is. Its last line is the folder. 110 MB over the network, 370 MB of disk, a minute.
#
# nixl and nixl-cu13: NIXL with UCX 1.23 inside; its CUDA libraries are opened when used, so it loads without a GPU. The Mooncake of this
# name is built without CUDA, and links libibverbs and libcurl of the system (install_packages.sh peers).
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"

vllm_version=0.32.0
wheels=(nixl==1.5.1 nixl-cu13==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1)

folder="${1:-${KVLOOM_VLLM_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/kvloom/vllm-peers-$vllm_version}}"
made_by="$(sha256sum <scripts/install_peers.sh | cut -d' ' -f1)"

# That both load: an agent of NIXL with its UCX, and Mooncake's engine on TCP.
verify() {
  PYTHONPATH="$folder" NIXL_LOG_LEVEL=ERROR "$environment/bin/python" - 2>"$log" <<'PYTHON' || { cat "$log" >&2; return 1; }
from importlib.metadata import version
from mooncake.engine import TransferEngine
from nixl._api import nixl_agent, nixl_agent_config
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, "Mooncake's engine doesn't start with tcp"
nixl_agent("kvloom-probe", nixl_agent_config(backends=["UCX"]))
print(f"NIXL {version('nixl')}, Mooncake {version('mooncake-transfer-engine-non-cuda')}")
PYTHON
}

install_wheels() {
  say "Making $folder: ${wheels[*]}"
  "$environment/bin/pip" install -q --no-deps --target "$folder" "${wheels[@]}"
}

log="$(mktemp)"
trap 'rm -f "$log"' EXIT
scripts/install_packages.sh peers
environment="$(scripts/install_vllm.sh | tail -n 1)"
made_once "$folder" "$made_by" verify install_wheels
