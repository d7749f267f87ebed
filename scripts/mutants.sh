#!/usr/bin/env bash
# mutants.sh [SCHEDULES]: is the simulator able to fail? Each tests/mutants/*.patch breaks the session layer in one way; it is applied to a
# copy of the tree, built, and has to be caught within SCHEDULES schedules (10,000). The last line is `caught N of M`.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"
schedules="${1:-10000}"

scripts/install_packages.sh mutants
copy=build-mutants/tree
rm -rf "$copy"
mkdir -p "$copy"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$copy"
say "Building the copy in $copy"
cmake -S "$copy" -B build-mutants/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DKVLOOM_BUILD_TESTS=OFF -DKVLOOM_BUILD_BENCH=OFF \
  -DCMAKE_CXX_FLAGS=-Wno-error >build-mutants/configure.log
make_copy() { cmake --build build-mutants/build -j "$jobs" --target kvloom_cli >build-mutants/build.log 2>&1; }
make_copy || { tail -n 40 build-mutants/build.log; give_up "The copy does not build."; }
build-mutants/build/kvloom simulate --schedules "$schedules" --seed 1 --jobs "$jobs" >build-mutants/whole.log ||
  give_up "The tree as it is breaks an invariant: build-mutants/whole.log"

caught=0
patches=(tests/mutants/*.patch)
say "Mutants, within $schedules schedules each"
printf '%-46s %-8s %s\n' mutant caught "by"
for patch in "${patches[@]}"; do
  name="$(basename "$patch" .patch)"
  patch -s -d "$copy" -p1 <"$patch"
  said="does not build"
  mark=no
  if make_copy; then
    said=""
    if build-mutants/build/kvloom simulate --schedules "$schedules" --seed 1 --jobs "$jobs" >build-mutants/run.log 2>build-mutants/said.log; then
      said="nothing"
    else
      mark=yes
      caught=$((caught + 1))
      said="$(sed -n '1{s/^schedule //;s/ on node [0-9]*.*//;p}' build-mutants/said.log | cut -c1-100)"
    fi
  fi
  printf '%-46s %-8s %s\n' "${name//_/ }" "$mark" "$said"
  patch -s -R -d "$copy" -p1 <"$patch"
done
echo "caught $caught of ${#patches[@]}"
[[ "$caught" -eq "${#patches[@]}" ]]
