# Needs Python 3.11 or newer (mlx-lm 0.32 does) and make; everything else goes into .venv. "make help" lists the targets.

PYTHON ?= python3
PROMPT ?= What is the capital of France?
MAX_TOKENS ?= 100
PYTEST_ARGS ?= -ra
# What the doctor of "make check-gpu" finds, and the kernels' texts of "make compile-metal".
REPORT ?= out/doctor.txt
METAL ?= out/metal
# Versions of the development tools; "constraints.txt constraints-lowest.txt" has the lowest MLX and mlx-lm, too.
CONSTRAINTS ?= constraints.txt
# One MLX process uses about one core on a CPU. Each gets a run of neighbouring tests, which share models and servers.
PYTEST_JOBS ?= 2
# Of "make test-quick".
TESTS ?= tests/kv tests/prefix tests/cache tests/attention tests/engine/test_scheduler.py
BENCH ?= batch
BENCH_ARGS ?= --random llama-22m --cases 1x256,1x1024,4x256,8x256 --out out/bench

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# Sources are compiled, and assertions rewritten, once for all processes and runs, wherever the tests are started.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest
comma := ,

# The MLX backend to install: an extra of pyproject.toml. macOS has Metal in mlx itself and needs none.
ifeq ($(origin EXTRA),undefined)
  ifeq ($(shell uname -s),Darwin)
    EXTRA :=
  else
    EXTRA := $(shell smi="$$(nvidia-smi 2>/dev/null)" || { echo cpu; exit; }; \
      case "$$smi" in (*"CUDA Version: 12."*) echo cuda12;; (*) echo cuda13;; esac)
  endif
endif

# An install leaves a stamp that names what it installed. Another EXTRA has other stamps and so installs again.
STAMP := $(VENV)/.installed-$(or $(EXTRA),default)
DEV_STAMP := $(STAMP)-dev
BENCH_STAMP := $(STAMP)-bench

export PROMPT
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# $(call install,extras): this checkout, editable. MLX's backends overwrite each other's files, so when a stamp
# speaks of another backend, MLX goes first.
define install
	@set -e; \
	for stamp in $(VENV)/.installed-*; do \
	  case "$$stamp" in \
	    "$(STAMP)"|"$(STAMP)"-*|"$(VENV)/.installed-*") ;; \
	    *) $(PY) -m pip uninstall --quiet --yes mlx mlx-cpu mlx-metal mlx-cuda-12 mlx-cuda-13; \
	       rm -f $(VENV)/.installed-*; break ;; \
	  esac; \
	done
	PYTHONWARNINGS="ignore:Editable installation" $(PY) -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) \
	  --editable ".$(if $(1),[$(1)])"
	@touch $@
endef

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-slow test-models check-gpu compile-metal lint bench clean

help:
	@echo "make demo       generate text with the demo model through the paged cache"
	@echo "make test       run the tests except the exhaustive ones"
	@echo "make test-quick  run those of blocks, prefixes and scheduling, a minute, or of TESTS=tests/..."
	@echo "make test-slow  run the exhaustive ones (85 minutes on 2 cores)"
	@echo "make test-models  every model module of mlx-lm against docs/models.md"
	@echo "make check-gpu  on a machine with a GPU: doctor, its tests, kernels and a model against references"
	@echo "make compile-metal  on a Mac with Xcode: the kernels' texts with Apple's compiler"
	@echo "make lint       ruff, mypy and the layers of imports"
	@echo "make bench      run a benchmark: BENCH=$(BENCH) (scripts/bench.py --help lists them)"
	@echo "make clean      remove .venv and caches (not the demo model)"
	@echo
	@echo "Variables: PYTHON=$(PYTHON) EXTRA=$(EXTRA) (cpu, cuda12, cuda13, or empty on macOS)"
	@echo "           PROMPT, MAX_TOKENS (demo), PYTEST_ARGS, PYTEST_JOBS (test, test-slow), TESTS, BENCH, BENCH_ARGS (bench),"
	@echo "           REPORT (check-gpu), METAL (compile-metal), CONSTRAINTS (versions that are installed)"

$(VENV)/.created:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || \
	  { echo "error: $(PYTHON) not found; install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: mlx_paged needs Python 3.11 or newer, and $(PYTHON) is $$("$(PYTHON)" --version 2>&1);" \
	    "name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import platform as p, sys; sys.exit((p.system(), p.machine()) == ("Darwin", "x86_64"))' || \
	  { echo "error: MLX has no packages for x86 on macOS; use a native arm64 Python: make PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear $(VENV) || \
	  { rm -rf $(VENV); echo "error: cannot create $(VENV); on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	$(PY) -m pip install --quiet --upgrade pip
	@touch $@

$(STAMP): pyproject.toml $(CONSTRAINTS) $(VENV)/.created
	@echo "installing mlx_paged and what it needs into $(VENV)"
	$(call install,$(if $(EXTRA),$(EXTRA)$(comma))server$(comma)grammar)

$(DEV_STAMP): pyproject.toml $(CONSTRAINTS) $(VENV)/.created
	$(call install,$(if $(EXTRA),$(EXTRA)$(comma))dev)

$(BENCH_STAMP): pyproject.toml $(CONSTRAINTS) $(VENV)/.created
	$(call install,$(if $(EXTRA),$(EXTRA)$(comma))bench)

demo: $(STAMP)
	@model="$$($(PY) scripts/demo_model.py)" && \
	$(BIN)/mlx_paged generate --model "$$model" --prompt "$$PROMPT" --max-tokens $(MAX_TOKENS) --cache-stats && \
	printf '\nNext:\n  . $(BIN)/activate\n  mlx_paged chat --model "%s"\n  mlx_paged server --model "%s"\n%s\n' "$$model" "$$model" \
	  "  curl localhost:8080/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'"

test: $(DEV_STAMP)
	@$(PY) scripts/demo_model.py >/dev/null
	$(PYTEST) -n $(PYTEST_JOBS) --dist worksteal --durations 10 -m "not slow" $(PYTEST_ARGS)

test-quick: $(DEV_STAMP)
	$(PYTEST) -q -x -n $(PYTEST_JOBS) --dist worksteal -m "not slow and not demo_model" $(PYTEST_ARGS) $(TESTS)

test-slow: $(DEV_STAMP)
	@$(PY) scripts/demo_model.py >/dev/null
	HYPOTHESIS_PROFILE=default $(PYTEST) -n $(PYTEST_JOBS) --dist worksteal -m slow $(PYTEST_ARGS)

# All four run, whichever fails. Not "pytest -n": one process at a time has the GPU.
check-gpu: $(DEV_STAMP)
	@failed=; set -x; \
	$(PY) -m mlx_paged doctor --report $(REPORT) || failed=1; \
	$(PYTEST) -m gpu $(PYTEST_ARGS) tests || failed=1; \
	$(PY) scripts/validate_kernel.py || failed=1; \
	$(PY) scripts/validate_model.py --random llama-1b --contexts 512,8192,32768 || failed=1; \
	test -z "$$failed"

compile-metal: $(DEV_STAMP)
	$(PY) scripts/dump_kernels.py $(METAL)
	$(PY) scripts/support/compile_metal.py $(METAL)

test-models: $(DEV_STAMP)
	$(PYTEST) -n $(PYTEST_JOBS) -m models $(PYTEST_ARGS) tests/patches/models/test_models.py

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(BENCH_STAMP)
	$(PY) scripts/bench.py $(BENCH) $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
