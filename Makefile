# Two commands do everything: `make soak` and `make test`. Both build on `make env`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
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
	$(BIN)/python -m pytest -m 'not slow and not llama and not gpu'

test-slow: env     ## what takes minutes; CI runs it after `make test`
	$(BIN)/python -m pytest -m 'slow and not llama and not gpu'

check: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache dist build
