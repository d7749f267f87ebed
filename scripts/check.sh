#!/usr/bin/env bash
# check.sh [FOLDER...]: the inner loop. Formatting of changed files, what has to be built again (ASan and UBSan), and the quick tests.
# With folders (plan, bind, end_to_end, ...) it builds and runs the tests of these only.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"

targets=() labels=()
if [[ $# -gt 0 ]]; then
  targets=(--target "${@/%/_test}")
  labels=(-L "^($(IFS='|'; echo "${*/%/_test}"))\$")
fi
[[ -f build-asan/build.ninja ]] || { scripts/install_packages.sh test; configure asan; }

step "Formatting of changed files" scripts/format.sh --check --changed || true
if step "Build of what changed, warnings as errors" build asan "${targets[@]}"; then
  say "Tests"
  run_tests asan "${labels[@]}" -LE slow || true
fi
close_count
