.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm check bench bench-vllm bench-vllm-peers mutants soak format clean

help: ## Say what there is
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 25

demo: ## Install what is needed, build a release, move a KV cache between processes and check every byte
	@scripts/demo.sh

test: ## Everything that has to hold, from nothing: formatting, warnings, clang-tidy, all tests under sanitizers, fuzzing
	@scripts/test.sh

test-vllm: ## Install a real vLLM for CPUs and run what needs one: servers, the connector, recordings
	@scripts/test_vllm.sh

check: ## The inner loop: build what changed and run the quick tests (FOLDERS="plan bind" for some only)
	@scripts/check.sh $(FOLDERS)

bench: ## Build a release, run the benchmarks, print the table of ratios
	@scripts/bench.sh

bench-vllm-peers: ## kvloom beside vLLM's own NIXL and Mooncake connectors, in real vLLM servers on this CPU: ends, idle cost, time to first token
	@scripts/bench_vllm_peers.sh

bench-vllm: ## Install a real vLLM for CPUs and measure what the connector costs it while nothing is transferred
	@scripts/bench_vllm.sh

mutants: ## Break the session layer in each way of tests/mutants: the simulator has to see it
	@scripts/mutants.sh

soak: ## Serve 2,000 requests with processes that die, and check every byte
	@scripts/soak.sh

format: ## Format our C++ files
	@scripts/format.sh

clean: ## Remove what was built
	@rm -rf build build-asan build-debug build-fuzz build-mutants build-tsan plan.html timeline.json
