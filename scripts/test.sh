#!/usr/bin/env bash
# test.sh: everything that has to hold. The last line is `N passed, M failed` over all checks and test cases.
# Scripts and formatting; a build with ASan, UBSan and warnings as errors; clang-tidy; all tests, the end-to-end and install tests
# among them; ThreadSanitizer for the folders that have threads; a minute of fuzzing.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"
threaded=(src/transport tests/endpoint)  # the rest of the session layer is pure: it has no threads

scripts/install_packages.sh test
step "Scripts: shellcheck" shellcheck -x scripts/*.sh .ci/run || true
step "Formatting" scripts/format.sh --check || true

# The GPU transport wants a CUDA toolkit to build, and no GPU: its tests bring a driver of their own.
nvcc="$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)"
cuda=ON
if [[ -z "$nvcc" ]]; then
  cuda=OFF
  echo "No CUDA toolkit (nvcc): src/transport/cuda is not built and not tested."
fi
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
tsan() { configure tsan && build tsan --target "${tsan_targets[@]}"; }
if step "Build of ${threaded[*]} with ThreadSanitizer" tsan; then
  say "Tests under ThreadSanitizer"
  # Loopback and faulty transports, copy kernels and the endpoints' cluster have one thread: ASan has seen all of theirs.
  run_tests tsan -L "^($(IFS='|'; echo "${tsan_targets[*]}"))\$" -E '^(Loopback|Faulty|All/CopyKernels|Endpoints|Cases|ControlServer|Seen|Pace)' || true
fi

say "A minute of fuzzing"
if scripts/fuzz.sh "${KVLOOM_FUZZ_SECONDS:-60}" | tee build-asan/fuzz.log; then fuzz_failed=0; else fuzz_failed=1; fi
counted="$(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p' build-asan/fuzz.log | tail -n 1)"
read -r fuzz_passed fuzz_failed <<<"${counted:-0 $fuzz_failed}"
passed=$((passed + fuzz_passed))
failed=$((failed + fuzz_failed))

say "All of it took $((SECONDS / 60)) min $((SECONDS % 60)) s"
close_count
