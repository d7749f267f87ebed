#!/usr/bin/env bash
# test_vllm.sh [pytest arguments...]: the tests in a real, unpatched vLLM on this machine's CPU: tests/vllm. Installs vLLM first, once
# (install_vllm.sh), and kvloom's Python package for it (lib_vllm.sh).
# The last line is `N passed, M failed`.  2 cores and 16 GiB of memory; nothing is sent to another machine.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"
# shellcheck source=scripts/lib_vllm.sh
source scripts/lib_vllm.sh

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
install_vllm_and_kvloom "$log" || { close_count; exit 1; }
say "pytest tests/vllm $*"
begin=$SECONDS
run_pytest "$@" || true
echo "tests took $((SECONDS - begin)) s"
close_count
