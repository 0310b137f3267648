# Every target sets up what it needs by itself; `make help` lists them.
#   PYTHON=/path/to/python3.12   the interpreter to use     VENV=.venv   where to install
VENV ?= .venv
BIN := $(VENV)/bin
# Two workers fill a small machine; more would only share its memory.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: help setup quickstart test test-all lint format lock clean kernels

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/:/' | column -t -s:

setup: ## make the virtual environment (instant when nothing changed)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash tools/setup.sh

quickstart: setup ## train a small latent-feedback model on this machine, and show what the passes do
	@$(BIN)/python examples/quickstart/run.py

# One thread per process: the tests start several processes each. Compiling costs more than tests gain.
test test-all: export OMP_NUM_THREADS ?= 1
test test-all: export TORCHDYNAMO_DISABLE ?= 1

test: lint ## lint, and the fast tests
	$(PYTEST)

test-all: lint ## lint, and every test, the long ones too
	$(PYTEST) -m "full or not full"

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernels: setup ## build the compiled fusion kernels anew (C++; CUDA where nvcc is)
	$(BIN)/python kernels/build.py

lock: setup ## resolve the dependencies anew into requirements.lock
	$(BIN)/python -m pip install --quiet "uv==$$(sed -n 's/^UV_VERSION=//p' tools/setup.sh)"
	$(BIN)/uv pip compile pyproject.toml --extra hf --extra optim --extra profile --extra quantize --extra dev \
	  --universal --python-version 3.12 --generate-hashes --no-annotate --no-header \
	  --no-emit-index-url --quiet -o requirements.lock

clean: ## remove the virtual environment and what the tools left
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
