#!/usr/bin/env bash
# soak.sh [OPTION...]: builds a release and serves 2,000 requests with ranks that die: kvloom soak. The last line is
# `soak: N requests, W wrong bytes, P pages lost, F descriptors lost`.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"

scripts/install_packages.sh build
configure_release -DKVLOOM_BUILD_BENCH="$(as_configured KVLOOM_BUILD_BENCH)"
build release --target kvloom_cli
say "2,000 requests, 16 at once, 5% cancelled, a rank killed each 200"
build/kvloom soak --requests 2000 --at-once 16 --cancel-percent 5 --kill-every 200 --trace samples/requests.jsonl --scale 64 "$@"
