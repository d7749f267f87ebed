#!/usr/bin/env bash
# test.sh: everything that has to hold. The last line is `N passed, M failed` over all checks and test cases.
# Scripts and formatting; a build with ASan, UBSan and warnings as errors; clang-tidy; all tests, the end-to-end and install tests
# among them; ThreadSanitizer for the folders that have threads; a minute of fuzzing; the Python package in a wheel of its own.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"
threaded=(src/transport tests/endpoint)  # the rest of the session layer is pure: it has no threads

scripts/install_packages.sh test
step "Scripts: shellcheck" shellcheck -x scripts/*.sh .ci/run || true
step "Formatting" scripts/format.sh --check || true

# Its tests bring a driver of their own.
cuda="$(cuda_switch)"
[[ "$cuda" == ON ]] || echo "No CUDA toolkit (nvcc): src/transport/cuda is not built and not tested."
asan() { configure asan -DKVLOOM_CUDA="$cuda" && build asan; }
if step "Build with ASan, UBSan and warnings as errors" asan; then
  say "Tests"
  begin=$SECONDS
  run_tests asan || true
  echo "tests took $((SECONDS - begin)) s"
  step "clang-tidy" python3 scripts/tidy.py build-asan --jobs "$jobs" || true
else
  echo "Nothing could be tested."
  close_count
fi

tsan_targets=()
for folder in "${threaded[@]}"; do tsan_targets+=("$(basename "$folder")_test"); done
tsan() { configure tsan -DKVLOOM_CUDA="$cuda" && build tsan --target "${tsan_targets[@]}"; }
if step "Build of ${threaded[*]} with ThreadSanitizer" tsan; then
  say "Tests under ThreadSanitizer"
  # Loopback and faulty transports, copy kernels and the endpoints' cluster have one thread: ASan has seen all of theirs.
  run_tests tsan -L "^($(IFS='|'; echo "${tsan_targets[*]}"))\$" -E '^(Loopback|Faulty|All/CopyKernels|Endpoints|Cases|ControlServer|Seen|Pace)' || true
fi

# Scripts that close with a count of their own: it is added to ours.
counted() { # COMMAND...
  local log="build-asan/${1##*/}.log" ended=0 words its_passed its_failed
  "$@" | tee "$log" || ended=1
  words="$(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p' "$log" | tail -n 1)"
  read -r its_passed its_failed <<<"${words:-0 $ended}"
  passed=$((passed + its_passed))
  failed=$((failed + its_failed))
}

say "A minute of fuzzing"
counted scripts/fuzz.sh "${KVLOOM_FUZZ_SECONDS:-60}"

say "The Python package"
counted scripts/test_python.sh python3  # without a name it also tests the wheel of 3.12 and newer

say "All of it took $((SECONDS / 60)) min $((SECONDS % 60)) s"
close_count
