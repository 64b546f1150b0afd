# make demo   environment, install, the built-in comparison, where its report is
# make bench  this machine: ours against Opacus, torch.func and plain PyTorch
# make test   environment, install with development tools, ruff, mypy, pytest
# make fuzz   thousands of strange inputs to every command, and a table of what became of them; half an hour
# make test-deployment   real processes, killed and stopped; servers and sites over Flower, lied to; a Ray cluster; some minutes

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test fuzz test-deployment bench lint clean

demo: $(VENV)/installed
	$(BIN)/coterie compare --out runs/demo --resume

test: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadfile

fuzz: $(VENV)/installed-dev
	$(BIN)/python tests/fuzz/everything.py --log "fuzz/$$(date +%Y%m%d-%H%M%S)"

test-deployment: $(VENV)/installed-dev
	$(BIN)/pytest -m deployment tests

bench: $(VENV)/installed-dev
	$(BIN)/coterie bench

lint: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

$(BIN)/python:
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[fast]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
