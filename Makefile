# Everything a newcomer needs: `make serve` and `make test`. Each installs what it needs, once.
#
#   make serve ARGS="--port 8123"        start every process
#   make test  ARGS="-k router"          run the tests (ARGS goes to pytest)
#   make check                           format, lint, types, layers
#   make bench ARGS="--repeats 5"        how late the HTTP loop runs while long prompts are tokenized

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: serve test check format bench clean

serve: $(VENV)/serve.installed
	@exec $(BIN)/tokservice serve $(ARGS)

test: $(VENV)/develop.installed
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(ARGS)

check: $(VENV)/develop.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/develop.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/develop.installed
	$(BIN)/python scripts/bench_loop_lag.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/serve.installed: setup.cfg constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/develop.installed: setup.cfg constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[test,clients,check,bench]'
	@touch $@ $(VENV)/serve.installed
