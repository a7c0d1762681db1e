# Each target sets up what it needs: a virtual environment with the exact versions of constraints.txt, kept outside
# the clone and reused by every clone that wants the same. The package itself is not installed there but put on
# PYTHONPATH, so two clones cannot run each other's code.
PYTHON ?= python3
HF_COEFSFL_VENVS ?= $(HOME)/.cache/hf_coefsfl
ARGS ?=
export HF_COEFSFL_VENVS

# Prints the path of the environment, on stderr what is being done. Python rather than shell: its lock is there on
# every Unix, ends with the process that held it however that died, and pyproject.toml can be read properly.
define VENV_SETUP
import fcntl, hashlib, os, pathlib, platform, shutil, subprocess, sys, time
if sys.version_info < (3, 11):
    sys.exit(f"error: the versions in constraints.txt need Python 3.11 or newer, {sys.executable} is "
             f"{platform.python_version()}: make PYTHON=python3.11 ...")
import tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
wanted = sorted({*project["dependencies"], *(r for e in project["optional-dependencies"].values() for r in e)})
constraints = pathlib.Path("constraints.txt").read_text()
key = hashlib.sha256("\n".join([sys.version, platform.machine(), constraints, *wanted]).encode()).hexdigest()[:12]
venvs = pathlib.Path(os.environ["HF_COEFSFL_VENVS"]).expanduser().absolute()
venvs.mkdir(parents=True, exist_ok=True)
venv, stamp = venvs / f"venv-{key}", venvs / f"venv-{key}" / ".complete"
python = venv / "bin" / "python"

def say(text):
    print(text, file=sys.stderr, flush=True)

def usable():  # complete, and the Python it was made from is still there
    return stamp.exists() and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0

if not usable():
    with open(venvs / f"venv-{key}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that sets up {venv}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not usable():
            if venv.exists():
                say(f"removing the unfinished {venv}")
                shutil.rmtree(venv)
            say(f"setting up {venv} (once; 2 to 5 minutes, about 6 GB)")
            start, keep_lock = time.time(), {"pass_fds": [lock.fileno()]}  # an orphaned pip holds the lock until it ends
            subprocess.run([sys.executable, "-m", "venv", venv], check=True, **keep_lock)
            pip = subprocess.Popen(
                [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt", *wanted],
                stderr=subprocess.PIPE, stdout=sys.stderr, text=True, **keep_lock)
            for line in pip.stderr:
                if not line.startswith("WARNING: Location "):  # a local index without the package: pip looks on
                    say(line.rstrip())
            if pip.wait():
                sys.exit(f"error: pip could not install the versions of constraints.txt into {venv}")
            stamp.touch()
            say(f"set up {venv} in {time.time() - start:.0f} s")
print(venv)
endef
export VENV_SETUP

# `$(IN_VENV) command` runs a command of the environment on this clone.
IN_VENV = venv=$$($(PYTHON) -c "$$VENV_SETUP") && PATH="$$venv/bin:$$PATH" PYTHONPATH="$(CURDIR)"

.PHONY: help venv quickstart test lint format clean

help: ## list the targets
	@awk -F ': ## ' '/^[a-z]+: ## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: ## set up the virtual environment and print its path
	@$(PYTHON) -c "$$VENV_SETUP"

quickstart: ## train a small split model from end to end, on a CPU in minutes
	@$(IN_VENV) accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		recipes/quickstart.py $(ARGS)

test: ## run the tests (ARGS="-k partition" for some)
	@$(IN_VENV) OMP_NUM_THREADS=1 python -m pytest -n 2 $(ARGS)

lint: ## check style, formatting and types
	@$(IN_VENV) sh -c 'failed=0; for check in "ruff check ." "ruff format --check ." mypy; do $$check || failed=1; done; exit $$failed'

format: ## sort imports, fix what can be fixed, format
	@$(IN_VENV) sh -ec 'ruff check --fix .; ruff format .'

clean: ## remove caches and build products, not the environment
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
