#!/usr/bin/env bash
# demo.sh: builds a release and moves a KV cache from 8 prefill to 4 decode processes, every byte checked; then pushes one while it is computed.
# Writes plan.html and timeline.json.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"

scripts/install_packages.sh build
say "Building build/kvloom"
configure_release -DKVLOOM_BUILD_BENCH="$(as_configured KVLOOM_BUILD_BENCH)"
build release --target kvloom_cli

command=(build/kvloom run --model samples/glm-5.2.json --prefill cp=8:layers --decode dcp=4 --tokens 16384 --prefix 1000 --html plan.html)
say "${command[*]}"
"${command[@]}"
echo "The picture of the plan is in $PWD/plan.html"

stream=(build/kvloom run --model samples/qwen3-30b-a3b.json --prefill tp=1 --decode tp=1 --stream --trace samples/requests.jsonl
  --scale 8 --requests 8 --chunk 512 --layer-time 2ms --timeline timeline.json)
say "${stream[*]}"
"${stream[@]}"
