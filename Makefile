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

.PHONY: help setup serve test test-slow test-fleet check fix docs bench clean

help:
	@echo 'make setup   make .venv with everything installed'
	@echo 'make serve   two ranks, one question answered, then up until Ctrl-C (PORT=8000)'
	@echo 'make test    the tests, without those that take minutes (make test-slow has all)'
	@echo 'make test-fleet  whole fleets on this machine: Linux, as root, with Docker (installed where apt-get is)'
	@echo 'make check   lint, types, layers, generated pages, changelog'
	@echo 'make fix     format, fix what can be fixed, regenerate docs/reference'
	@echo 'make bench   measure the engine and the row store into bench/results'

setup: $(STAMP)

$(STAMP): $(INPUTS)
	@tools/setup.sh $@ $^

serve: setup
	@exec $(BIN)/deskfleet demo pocket --tp 2 --port $(PORT)

test: setup
	$(PYTEST) -m 'not slow and not fleet'

test-slow: setup
	$(PYTEST) -m 'not fleet'

test-fleet: setup
	@tools/fleet_bed.sh
	$(PYTEST) -m fleet tests/fleet

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
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
	$(BIN)/deskfleet bench speculation $(TINY) --out-dir bench/results
	@command -v fio >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -qq -y fio; } || \
		echo 'bench: without fio (on Debian: apt-get install fio) the ratios to it are left out' >&2
	$(BIN)/deskfleet bench engram --directory var/bench --out-dir bench/results
	@$(BIN)/python tools/gen_docs.py

clean:
	rm -rf .venv var .mypy_cache .ruff_cache .import_linter_cache .hypothesis
