#!/usr/bin/env bash
# install_packages.sh build|bench|mutants|peers|python|test|vllm: sees to it that the Debian packages for that job are there.
# As root it installs what is missing; otherwise it says the one line to run, and fails if something is missing.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"

build_packages=(g++ cmake make ninja-build ccache pkg-config libfmt-dev libexpected-dev libcli11-dev nlohmann-json3-dev libxxhash-dev
  libflatbuffers-dev flatbuffers-compiler libzmq3-dev cppzmq-dev prometheus-cpp-dev)
mutant_packages=("${build_packages[@]}" git patch)
bench_packages=("${build_packages[@]}" libbenchmark-dev)
python_packages=("${build_packages[@]}" python3 python3-dev python3-venv)
test_packages=("${bench_packages[@]}" clang clang-format clang-tidy libclang-rt-14-dev libgtest-dev libgmock-dev librapidcheck-dev
  python3 python3-dev python3-venv shellcheck git zsh fish)
vllm_packages=(gcc libc6-dev binutils libnuma1 python3 python3-venv)
peers_packages=("${vllm_packages[@]}" libibverbs1 libcurl4)

case "${1:-}" in
  build) wanted=("${build_packages[@]}") ;;
  mutants) wanted=("${mutant_packages[@]}") ;;
  bench) wanted=("${bench_packages[@]}") ;;
  peers) wanted=("${peers_packages[@]}") ;;
  python) wanted=("${python_packages[@]}") ;;
  test) wanted=("${test_packages[@]}") ;;
  vllm) wanted=("${vllm_packages[@]}") ;;
  *) echo "usage: install_packages.sh build|bench|mutants|peers|python|test|vllm" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "This is no Debian: please see yourself that these are installed: ${wanted[*]}"
  exit 0
fi
missing=()
for package in "${wanted[@]}"; do
  status="$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)"
  [[ "$status" == installed ]] || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

if [[ "$(id -u)" -ne 0 ]]; then
  give_up "Some packages are missing. Please run: sudo apt-get install -y --no-install-recommends ${missing[*]}"
fi
say "Installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
