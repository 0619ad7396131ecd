# Everything a contributor types. `make` alone says what there is.

BIN    := .venv/bin
STAMP  := .venv/.installed
NATIVE := $(wildcard packages/*/native/CMakeLists.txt packages/*/native/*/*.cpp packages/*/native/*/*.h)
INPUTS := pyproject.toml $(wildcard packages/*/pyproject.toml) $(NATIVE) requirements/torch-cpu.txt requirements/checks.txt
TINY   := var/tiny
PORT   ?= 8000
JOBS   ?= 2

# One file, one worker: what a module shares (a running server, an engine) starts once.
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider -n $(JOBS) --dist loadfile
# Marked so: what needs more than `make setup` gives, each in a lane of its own.
HERE   := not fleet and not adapters and not triton

.PHONY: help setup serve test test-slow test-fleet test-adapters test-kernels check fix docs bench clean

help:
	@echo 'make setup   make .venv with everything installed'
	@echo 'make serve   two ranks, one question answered, then up until Ctrl-C (PORT=8000)'
	@echo 'make test    the tests, without those that take minutes (make test-slow has all)'
	@echo 'make test-fleet  whole fleets on this machine: Linux, as root, with Docker (installed where apt-get is)'
	@echo 'make test-adapters  the plug-ins inside vLLM and SGLang, each in an environment of its own (downloads them once)'
	@echo 'make test-kernels   the GPU kernels without a GPU: interpreted, and compiled for sm_90 (downloads Triton once)'
	@echo 'make check   lint, types, layers, generated pages, changelog'
	@echo 'make fix     format, fix what can be fixed, regenerate docs/reference'
	@echo 'make bench   measure the engine and the row store into bench/results'

setup: $(STAMP)

$(STAMP): $(INPUTS)
	@tools/setup.sh $@ $^

serve: setup
	@exec $(BIN)/deskfleet demo pocket --tp 2 --port $(PORT)

test: setup
	$(PYTEST) -m 'not slow and $(HERE)'

test-slow: setup
	$(PYTEST) -m '$(HERE)'

test-fleet: setup
	@tools/fleet_bed.sh
	$(PYTEST) -m fleet tests/fleet

test-adapters: setup
	@tools/adapters_env.sh
	$(PYTEST) -m adapters tests/adapters

test-kernels: setup
	@tools/triton_env.sh var/triton
	PYTHONPATH=src:packages/deskfleet-engram/src:. var/triton/bin/python -m pytest -q -p no:cacheprovider -m triton tests/gpu

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PYTHONPATH=adapters/deskfleet-vllm/src:adapters/deskfleet-sglang/src $(BIN)/lint-imports
	$(BIN)/python tools/gen_docs.py --check
	$(BIN)/python tools/check_changelog.py

fix: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python tools/gen_docs.py

docs: setup
	$(BIN)/python tools/gen_docs.py

bench: setup
	@[ -d $(TINY) ] || $(BIN)/deskfleet make-tiny $(TINY)
	$(BIN)/deskfleet bench engine $(TINY) --out-dir bench/results
	$(BIN)/deskfleet bench prefix $(TINY) --out-dir bench/results
	$(BIN)/deskfleet bench speculation pocket --tokens 96 --rounds 9 --ask 'Count from 1 to 40.' \
		--ask 'Tell me a story about a librarian and a beetle.' \
		--ask 'Give me a Python function that returns the multiples of 14 below a number.' --out-dir bench/results
	@command -v fio >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -qq -y fio; } || \
		echo 'bench: without fio (on Debian: apt-get install fio) the ratios to it are left out' >&2
	$(BIN)/deskfleet bench engram --directory var/bench --out-dir bench/results
	@$(BIN)/python tools/gen_docs.py

clean:
	rm -rf .venv var .mypy_cache .ruff_cache .import_linter_cache .hypothesis
