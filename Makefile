# make serve: a server to talk to.  make demo: one answer, then end.
# make test: everything that proves it but for containers, some 20 minutes on two cores.  make test-quick: unit tests and
# kernels, some 4 minutes.  make test-containers builds the images and needs a Docker engine.
#
# They need Python 3.11 or newer with its venv module (Debian: apt install python3-venv) and nothing else.
# Another interpreter: make PYTHON=/path/to/python3.12 …

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.pagoda-installed
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# The newest torch that pyproject.toml allows, and the one the tests run with.
TORCH := torch==2.13.0

.PHONY: docs install serve demo test test-quick test-containers lint proto clean
.DEFAULT_GOAL := serve

install: $(STAMP)

serve: install
	@exec $(BIN)/pagoda serve $(ARGS)

demo: install
	@exec $(BIN)/pagoda demo $(ARGS)

# Two files of tests at a time, in the order of their names: processes first, what is short last. ARGS='-n 0 tests/unit'
# for one at a time.
test: install
	@echo "Tests: unit, kernels, service, process, exactness, conformance, compat, two files at a time. Some 20 minutes on"
	@echo "two cores. make test-quick runs unit and kernels alone; make test-containers runs what needs a Docker engine."
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/container $(ARGS)

test-quick: install
	@echo "Tests: unit and kernels, two files at a time, some 4 minutes on two cores"
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/kernels tests/unit \
		--ignore=tests/kernels/triton/test_run_all.py $(ARGS)

test-containers: install
	@$(BIN)/python -m pytest -o faulthandler_timeout=1200 tests/container $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h')
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_protos.py

docs: install
	$(BIN)/python scripts/docs_pages.py
	$(BIN)/python -m benchmarks.page
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html; with search: $(BIN)/python -m http.server --directory site 8080"

proto: install
	$(BIN)/python scripts/generate_protos.py

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Pagoda needs Python 3.11 or newer; $(PYTHON) is not. Name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "No venv module: apt install python3-venv" >&2; exit 1; }

# torch goes first and alone: where pip is pointed at CPU wheels of this version it takes one, and the second command
# finds torch there instead of choosing anew, which on a machine without a GPU would fetch gigabytes of CUDA.
$(STAMP): $(BIN)/python pyproject.toml hatch_build.py scripts/generate_protos.py $(shell find protos -name '*.proto')
	@echo "Installing Pagoda and what it needs into $(VENV); the first time takes some minutes"
	@$(PIP) install "$(TORCH)"
	@$(PIP) install --editable ".[dev]"
	@$(BIN)/python -m pagoda_kernels.native.build || true
	@touch $@
