#!/usr/bin/env bash
# bench_vllm_peers.sh [arguments of tests/vllm/peers]: kvloom beside vLLM's own NixlConnector and MooncakeConnector, in real vLLM servers on this
# machine's CPU: what becomes of requests whose other half dies, the idle cost, time to first token (tests/vllm/peers). Installs vLLM, kvloom and the
# peers first, once (install_vllm.sh, install_peers.sh). Ten to fifteen minutes on 2 cores with 24 GiB; figures only count where nothing else runs. The
# table is printed, and written with all samples to build/bench-vllm-peers.json. KVLOOM_PACKAGES names an installed kvloom that is used as it is.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"

say "vLLM for CPUs is installed"
environment="$(scripts/install_vllm.sh | tee /dev/stderr | tail -n 1)"
say "NIXL and Mooncake are installed"
KVLOOM_VLLM_PEERS="$(scripts/install_peers.sh | tee /dev/stderr | tail -n 1)"
export KVLOOM_VLLM_PEERS
if [[ -z "${KVLOOM_PACKAGES:-}" ]]; then
  say "kvloom's Python package is there for it"
  export KVLOOM_PACKAGES="$PWD/build/vllm-packages"
  mkdir -p build
  install_kvloom_for_vllm "$environment" "$KVLOOM_PACKAGES"
fi
say "kvloom beside vLLM's own connectors"
mkdir -p build
PYTHONPATH="$PWD/tests/vllm" "$environment/bin/python" -m peers --json build/bench-vllm-peers.json "$@" | tee build/bench-vllm-peers.txt
