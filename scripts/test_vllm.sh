#!/usr/bin/env bash
# test_vllm.sh [pytest arguments...]: the tests in a real, unpatched vLLM on this machine's CPU: tests/vllm. Installs vLLM first, once
# (install_vllm.sh), and kvloom's Python package for it (lib_vllm.sh).
# The last line is `N passed, M failed`.  2 cores and 16 GiB of memory; nothing is sent to another machine.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=scripts/lib_vllm.sh
source scripts/lib_vllm.sh

install_vllm_and_kvloom || { close_count; exit 1; }
say "pytest tests/vllm $*"
begin=$SECONDS
"$environment/bin/python" -m pytest tests/vllm -q -p no:cacheprovider "$@" | tee "$log" || true
echo "tests took $((SECONDS - begin)) s"
count_pytest "$log"
close_count
