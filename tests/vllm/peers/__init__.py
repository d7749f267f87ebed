"""kvloom beside vLLM's own connectors, in real servers on this machine's CPU: `make bench-vllm-peers` (scripts/bench_vllm_peers.sh)."""
