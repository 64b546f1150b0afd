# make demo   environment, install, the built-in comparison, where its report is
# make bench  this machine: ours against Opacus, torch.func and plain PyTorch
# make test   environment, install with development tools, ruff, mypy, pytest
# make fuzz   thousands of strange inputs to every command, and a table of what became of them; half an hour
# make soak   eight sites and a server with a fault every few seconds, and whether all they wrote down agrees; half an hour
# make docs   execute the notebooks, build the documentation site into build/site; some minutes
# make test-wheel   build the wheel, install it alone, run the README's walks and the examples with it; some minutes
# make test-deployment   real processes, killed and stopped; servers and sites over Flower, lied to; a Ray cluster; three minutes of the soak; a quarter of an hour

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test docs fuzz soak test-wheel test-deployment bench lint clean

demo: $(VENV)/installed
	$(BIN)/coterie compare --out runs/demo --resume

test: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadfile

fuzz: $(VENV)/installed-dev
	$(BIN)/python tests/fuzz/everything.py --log "fuzz/$$(date +%Y%m%d-%H%M%S)"

soak: $(VENV)/installed-dev
	$(BIN)/python tests/soak/soak.py --minutes 30 --least 60

test-deployment: $(VENV)/installed-dev
	$(BIN)/pytest -m deployment tests

test-wheel: $(VENV)/installed-dev
	$(BIN)/pytest -m wheel tests/wheel

# A notebook is executed again when it, the package or the way of executing changed.
NOTEBOOKS := $(patsubst docs/notebooks/%.ipynb,build/notebooks/%.md,$(wildcard docs/notebooks/*.ipynb))
PACKAGE   := $(shell find src -name '*.py')

docs: $(NOTEBOOKS) $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; to search in it: $(BIN)/python -m http.server --directory build/site"

build/notebooks/%.md: docs/notebooks/%.ipynb docs/site/execute.py $(PACKAGE) | $(VENV)/installed-docs
	$(BIN)/python docs/site/execute.py build/notebooks $<

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

$(VENV)/installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
