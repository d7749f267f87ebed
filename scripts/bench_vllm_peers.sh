#!/usr/bin/env bash
# bench_vllm_peers.sh [arguments of tests/vllm/peers]: kvloom beside vLLM's own NixlConnector and MooncakeConnector, in real vLLM servers on this
# machine's CPU: what becomes of requests whose other half dies, the idle cost, time to first token (tests/vllm/peers). Installs vLLM, kvloom and the
# peers first, once (install_vllm.sh, install_peers.sh). Half an hour or more on 2 cores with 24 GiB; figures only count where nothing else runs. The
# table is printed, and written with all samples to build/bench-vllm-peers.json. KVLOOM_PACKAGES names an installed kvloom that is used as it is.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=scripts/lib_vllm.sh
source scripts/lib_vllm.sh

install_peers() { scripts/install_peers.sh | tee "$log"; }

install_vllm_and_kvloom || exit 1
step "NIXL and Mooncake are installed" install_peers || exit 1
KVLOOM_VLLM_PEERS="$(tail -n 1 "$log")"
export KVLOOM_VLLM_PEERS
say "kvloom beside vLLM's own connectors"
PYTHONPATH="$PWD/tests/vllm" "$environment/bin/python" -m peers --json build/bench-vllm-peers.json "$@" | tee build/bench-vllm-peers.txt
