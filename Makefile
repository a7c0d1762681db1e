# Each target sets up what it needs: a virtual environment with the exact versions of constraints.txt, kept outside
# the clone and reused by every clone that wants the same. The package itself is not installed there but put on
# PYTHONPATH, so two clones cannot run each other's code. HF_COEFSFL_VENVS says where else than ~/.cache/hf_coefsfl.
PYTHON ?= python3
ARGS ?=

# `$(IN_VENV) command` runs a command of the environment on this clone.
IN_VENV = venv=$$($(PYTHON) .ci/venv.py) && PATH="$$venv/bin:$$PATH" PYTHONPATH="$(CURDIR)"

.PHONY: help venv quickstart test test-all test-torchao lint format docs dist clean

help: ## list the targets
	@awk -F ': ## ' '/^[a-z-]+: ## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: ## set up the virtual environment and print its path
	@$(PYTHON) .ci/venv.py

quickstart: ## train a small split model from end to end, on a CPU in minutes
	@$(IN_VENV) accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		recipes/quickstart.py $(ARGS)

PYTEST = OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal

test: ## run the fast tests, 10 minutes on two cores (ARGS="-k partition" for some)
	@$(IN_VENV) $(PYTEST) -m "not slow" $(ARGS)

test-all: ## run all tests, 35 minutes on two cores: soak, real networks and data, every method and model
	@$(IN_VENV) $(PYTEST) $(ARGS)

test-torchao: ## run the tests on weights that torchao keeps in int8, with torchao
	@$(IN_VENV) sh -c 'PYTHONPATH="$$PYTHONPATH:$$0/beside" OMP_NUM_THREADS=1 python -m pytest tests/trainer/test_torchao.py' "$$venv"

lint: ## check style, formatting, types and the direction of imports
	@$(IN_VENV) sh -c 'failed=0; for check in "ruff check ." "ruff format --check ." mypy lint-imports; do $$check || failed=1; done; exit $$failed'

format: ## sort imports, fix what can be fixed, format
	@$(IN_VENV) sh -ec 'ruff check --fix .; ruff format .'

docs: ## build the documentation with search and API into site/
	@$(IN_VENV) NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --quiet && echo "site/index.html"

dist: ## build the wheel and the source distribution into dist/
	@rm -rf build dist
	@$(IN_VENV) python -m build --no-isolation

clean: ## remove caches and build products, not the environment
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
