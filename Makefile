# Two commands matter: `make demo` (a real model, with and without speculation) and `make test`.
# Another torch build: make demo TORCH="torch==2.13.0" PIP_FLAGS="--index-url URL"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
PYTEST_FLAGS ?=
BIN := $(VENV)/bin

.PHONY: demo test check format clean

demo: $(VENV)/.installed
	$(BIN)/outpace compare smollm2-135m-instruct --draft lookup

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: outpace needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
		|| { echo "error: this Python cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch is pinned and comes first: a plain "torch" may bring another, much larger build.
$(VENV)/.torch: $(BIN)/python
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) "$(TORCH)"
	touch $@

NATIVE := $(wildcard src/outpace/kernels/native/*.cpp src/outpace/kernels/native/*.h src/outpace/kernels/native/*.inc)

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py $(NATIVE)
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.torch pyproject.toml setup.py $(NATIVE)
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
