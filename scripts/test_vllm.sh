#!/usr/bin/env bash
# test_vllm.sh [pytest arguments...]: the tests in a real, unpatched vLLM on this machine's CPU: tests/vllm. Installs vLLM first, once
# (install_vllm.sh), and kvloom's Python package into build/vllm-packages, so that checkouts that share the vLLM don't share a kvloom.
# The last line is `N passed, M failed`.  2 cores and 16 GiB of memory; nothing is sent to another machine.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"

packages="$PWD/build/vllm-packages"

install_kvloom() { install_kvloom_for_vllm "$environment" "$packages"; }

install_vllm() { scripts/install_vllm.sh | tee "$log"; }

# counted WORDS KIND: the number before KIND in pytest's last line.
counted() { local n; n="$(sed -nE "s/.*(^|[^0-9])([0-9]+) $2([ ,].*|\$)/\2/p" <<<"$1")"; echo "${n:-0}"; }

run_pytest() {
  local words
  "$environment/bin/python" -m pytest tests/vllm -q -p no:cacheprovider "$@" | tee "$log"
  words="$(tail -n 1 "$log")"
  passed=$((passed + $(counted "$words" passed)))
  failed=$((failed + $(counted "$words" failed) + $(counted "$words" 'errors?')))
  grep -qE '[0-9]+ passed' <<<"$words" || failed=$((failed + 1))
}

mkdir -p build
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
step "vLLM for CPUs is installed" install_vllm || { close_count; exit 1; }
environment="$(tail -n 1 "$log")"
step "kvloom's Python package is there for it" install_kvloom || { close_count; exit 1; }
[[ ! -d "$packages/kvloom" ]] || export KVLOOM_PACKAGES="$packages"
say "pytest tests/vllm $*"
run_pytest "$@" || true
close_count
