#!/usr/bin/env bash
# bench.sh: builds a release, runs the benchmarks, and prints the table of ratios. All figures are in build/bench.json.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"

scripts/install_packages.sh bench
say "Building the benchmarks in build/"
configure_release -DKVLOOM_BUILD_BENCH=ON
build release --target kvloom_cli
if compgen -G 'bench/*.cc' >/dev/null; then
  build release --target kvloom_bench
  say "Running build/kvloom_bench"
  build/kvloom_bench --benchmark_out=build/bench.json --benchmark_out_format=json "$@"
fi
say "The ratios: build/kvloom bench"
build/kvloom bench
