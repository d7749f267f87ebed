# shellcheck shell=bash disable=SC2034
# What the scripts share: the repository's root, jobs, plain sentences, and steps that are counted. Sourced, never run.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
jobs="${KVLOOM_JOBS:-$(nproc)}"
passed=0
failed=0

say() { printf '\n== %s\n' "$*"; }
give_up() { printf '%s\n' "$*" >&2; exit 1; }

# step SENTENCE COMMAND...: runs it, counts it as one check, says how it went and how long it took. Never ends the script.
step() {
  local sentence="$1" begin=$SECONDS
  shift
  say "$sentence"
  if "$@"; then
    passed=$((passed + 1))
    echo "passed in $((SECONDS - begin)) s: $sentence"
  else
    failed=$((failed + 1))
    echo "FAILED after $((SECONDS - begin)) s: $sentence"
    return 1
  fi
}

# The last line of every run of checks.
close_count() {
  printf '\n%d passed, %d failed\n' "$passed" "$failed"
  [[ "$failed" -eq 0 && "$passed" -gt 0 ]]
}

# made_once FOLDER MADE_BY VERIFY MAKE: sees to it that FOLDER is there, of the making that MADE_BY names and such that VERIFY passes; else MAKE makes it
# from nothing. Of two that would, the second waits for the first. Its last line is the folder.
made_once() {
  local folder="$1" made_by="$2" verify="$3" make="$4"
  mkdir -p "$(dirname "$folder")"
  exec 9>"$folder.lock"
  flock 9
  if [[ "$(cat "$folder/made-by" 2>/dev/null || true)" != "$made_by" ]] || ! "$verify"; then
    rm -rf "$folder"
    "$make"
    "$verify"
    echo "$made_by" >"$folder/made-by"
  fi
  echo "$folder"
}

# count_pytest LOG: adds what the log's last line counts. One that says of no test that it passed is a failure.
count_pytest() {
  local words
  words="$(tail -n 1 "$1")"
  passed=$((passed + $(number_of passed "$words")))
  failed=$((failed + $(number_of failed "$words") + $(number_of 'errors?' "$words")))
  grep -qE '[0-9]+ passed' <<<"$words" || failed=$((failed + 1))
}
number_of() { local n; n="$(sed -nE "s/.*(^|[^0-9])([0-9]+) $1([ ,].*|\$)/\2/p" <<<"$2")"; echo "${n:-0}"; } # KIND WORDS

# Two builds in one folder at a time would tread on each other: the second waits.
build() { # PRESET [cmake --build arguments...]
  local preset="$1"
  shift
  mkdir -p "$(folder_of "$preset")"
  flock "$(folder_of "$preset")/.lock" cmake --build --preset "$preset" -j "$jobs" "$@"
}

configure() { # PRESET [cmake arguments...]
  local preset="$1" log
  shift
  mkdir -p "$(folder_of "$preset")"
  log="$(folder_of "$preset")/configure.log"
  if ! flock "$(folder_of "$preset")/.lock" cmake --preset "$preset" "$@" >"$log" 2>&1; then
    cat "$log" >&2
    return 1
  fi
}

# The transport between GPUs wants a CUDA toolkit to build, and no GPU.
cuda_switch() { if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then echo ON; else echo OFF; fi; }

# The release build without the tests, and so without their packages, unless somebody configured it with them.
configure_release() { configure release -DKVLOOM_BUILD_TESTS="$(as_configured KVLOOM_BUILD_TESTS)" "$@"; }
as_configured() { if grep -qs "^$1:BOOL=ON$" build/CMakeCache.txt; then echo ON; else echo OFF; fi; }

folder_of() { if [[ "$1" == release ]]; then echo build; else echo "build-$1"; fi; }

# The sanitizers of GCC 12 and clang 14 lose their way when a newer kernel spreads addresses over more than 28 bits.
steady() {
  if setarch -R true 2>/dev/null; then setarch -R "$@"; else "$@"; fi
}

# run_tests PRESET [ctest arguments...]: all cases of the build, each counted; the words of those that failed.
run_tests() {
  local folder tests_passed tests_failed
  folder="$(folder_of "$1")"
  shift
  rm -f "$folder/tests.xml"
  export ASAN_OPTIONS="strict_string_checks=1:detect_stack_use_after_return=1:${ASAN_OPTIONS:-}"
  export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}" TSAN_OPTIONS="halt_on_error=1:${TSAN_OPTIONS:-}"
  steady ctest --test-dir "$folder" -j "$jobs" --no-tests=error --output-junit tests.xml "$@" >"$folder/tests.log" 2>&1 || true
  if ! python3 scripts/count.py "$folder/tests.xml" "$folder/tests.count"; then
    echo "ctest did not get as far as running tests; the end of $folder/tests.log:"
    tail -n 40 "$folder/tests.log"
  fi
  read -r tests_passed tests_failed <"$folder/tests.count"
  passed=$((passed + tests_passed))
  failed=$((failed + tests_failed))
  [[ "$tests_failed" -eq 0 ]]
}
