#!/usr/bin/env bash
# fuzz.sh SECONDS: builds every tests/fuzz/*_fuzz.cc with libFuzzer and runs them for SECONDS of processor time in all, in equal parts,
# as many at once as there are processors.
# Seeds are read from tests/fuzz/corpus/<name>/; what is found anew goes to build-fuzz/corpus/<name>/.
# Prints a closing line `N passed, M failed`, one per target.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"
seconds="${1:?usage: fuzz.sh SECONDS}"

shopt -s nullglob
sources=(tests/fuzz/*_fuzz.cc)
if [[ ${#sources[@]} -eq 0 ]]; then
  echo "There are no fuzz targets yet."
  exit 0
fi
configure fuzz
build fuzz --target fuzzers >build-fuzz/build.log 2>&1 || { tail -n 60 build-fuzz/build.log; give_up "The fuzz targets do not build."; }

fuzz() { # NAME SECONDS
  local name="$1" log="build-fuzz/fuzz/$1.log" seeds=()
  mkdir -p "build-fuzz/corpus/$name"
  [[ -d "tests/fuzz/corpus/$name" ]] && seeds=("tests/fuzz/corpus/$name")
  if steady "build-fuzz/fuzz/$name" -max_total_time="$2" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="build-fuzz/fuzz/$name-" \
    "build-fuzz/corpus/$name" "${seeds[@]}" >"$log" 2>&1; then
    echo "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs, none that breaks it"
  else
    tail -n 60 "$log"
    echo "To see it again: build-fuzz/fuzz/$name <the file named above>"
    return 1
  fi
}

mkdir -p build-fuzz/fuzz
share=$((seconds / ${#sources[@]}))
ended() { # PID NAME
  local status=0
  wait "$1" || status=$?
  cat "build-fuzz/fuzz/$2.said"
  return "$status"
}
for ((first = 0; first < ${#sources[@]}; first += jobs)); do
  declare -A running=()
  for source in "${sources[@]:first:jobs}"; do
    name="$(basename "$source" .cc)"
    fuzz "$name" "$share" >"build-fuzz/fuzz/$name.said" 2>&1 &
    running[$name]=$!
  done
  for name in "${!running[@]}"; do
    step "$name, $share s" ended "${running[$name]}" "$name" || true
  done
done
close_count
