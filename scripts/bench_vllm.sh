#!/usr/bin/env bash
# bench_vllm.sh [arguments of tests/vllm/bench_idle.py...]: what the connector costs a real vLLM on CPUs while nothing is transferred. Installs vLLM
# first, once. 5 minutes on 2 idle cores; others that compute beside it are measured, too.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=scripts/lib_vllm.sh
source scripts/lib_vllm.sh

install_vllm_and_kvloom || give_up "Without vLLM nothing can be measured."
say "tests/vllm/bench_idle.py $*"
grep -m 1 'model name' /proc/cpuinfo || true
"$environment/bin/python" tests/vllm/bench_idle.py "$@"
