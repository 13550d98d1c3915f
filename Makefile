# Everything a newcomer needs: `make demo` and `make test` build .venv themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PEER   := .venv-pycose
NODE   := tests/interop/node_modules
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format docs site bench wheels interop clean

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: $(VENV)/.test  ## a private training on simulated 12-lead ECG, end to end (under three minutes)
	$(BIN)/lamina demo

test: lint interop  ## linters, types, import order, and every test that is not marked slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: lint interop $(VENV)/.aarch64  ## the same with the slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --timeout 3600

lint: $(VENV)/.test  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.test  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test  ## write the pages that are made from the code
	$(BIN)/python docs/make_pages.py

site: $(VENV)/.test  ## build the documentation site: build/site/index.html, which needs no server and no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.bench  ## time and memory of a private step against the plain step and Opacus
	$(BIN)/python benchmarks/step.py

wheels: $(VENV)/.test $(VENV)/.aarch64  ## dist/: a wheel for this machine, and one for Linux on aarch64
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist .
	CC=aarch64-linux-gnu-gcc LDSHARED='aarch64-linux-gnu-gcc -shared' _PYTHON_HOST_PLATFORM=linux-aarch64 \
	  $(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist .

interop: $(PEER)/.done $(NODE)/.done $(VENV)/.go $(VENV)/.postgres $(VENV)/.browser $(VENV)/.shell  ## other people's COSE, Go's tree, a database, a browser

clean:  ## remove the environment and every cache (keeps runs/)
	rm -rf $(VENV) $(PEER) $(NODE) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info src/lamina/engine/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per extra. A changed pyproject.toml, constraints.txt or native source installs again.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("lamina needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": try make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

NATIVE := setup.py $(wildcard src/lamina/engine/native/*.[ch])
$(VENV)/.test: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	@echo 'installing Lamina and its tools into $(VENV) (a few minutes, once) …'
	$(PIP) -e '.[test,plot,demo]'
	@touch $@

$(VENV)/.bench: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	@echo 'installing the peers to measure against …'
	$(PIP) -e '.[test,bench]'
	@touch $@ $(VENV)/.test

# Peers for the interop tests. Where one cannot be installed its tests are skipped, or fail with LAMINA_REQUIRE_ALL=1.
$(PEER)/.done: tests/interop/pycose.txt
	@echo 'installing pycose into $(PEER) …'
	@$(PYTHON) -m venv $(PEER) \
	  && $(PEER)/bin/python -m pip install -qq --disable-pip-version-check -r $< \
	  && touch $@ || echo 'pycose could not be installed: its tests will be skipped'

$(NODE)/.done: tests/interop/package.json tests/interop/package-lock.json
	@echo 'installing @auth0/cose and axe-core into $(NODE) …'
	@command -v npm >/dev/null || { $(call debian,nodejs npm); }; cd tests/interop && npm ci --silent --ignore-scripts --omit=optional --no-audit --no-fund \
	  && touch node_modules/.done || echo '@auth0/cose could not be installed: its tests will be skipped'

# What the tests need from the distribution: installed if we may, otherwise their tests are skipped (or fail, see above).
debian = [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && export DEBIAN_FRONTEND=noninteractive \
  && { apt-get install -qq -y --no-install-recommends $(1) >/dev/null 2>&1 \
       || { apt-get update -qq && apt-get install -qq -y --no-install-recommends $(1) >/dev/null; }; }

# Go's own notes and trees, for tests/ledger/test_go.py.
has_go = command -v go >/dev/null && [ -d /usr/share/gocode/src/golang.org/x/mod/sumdb ]
$(VENV)/.go: | $(VENV)/bin/python
	@$(has_go) || { echo 'installing Go and golang.org/x/mod …'; $(call debian,golang-go golang-golang-x-mod-dev); }; \
	$(has_go) && touch $@ || echo 'Go is not installed (golang-go, golang-golang-x-mod-dev): its tests will be skipped'

# A PostgreSQL server, for the ledger's second store.
has_postgres = command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1
$(VENV)/.postgres: | $(VENV)/bin/python
	@$(has_postgres) || { echo 'installing PostgreSQL …'; $(call debian,postgresql); }; \
	$(has_postgres) && touch $@ || echo 'PostgreSQL is not installed: its tests will be skipped'

# A browser, for the tests of pages.
$(VENV)/.browser: | $(VENV)/bin/python
	@command -v chromium >/dev/null || { echo 'installing Chromium …'; $(call debian,chromium); }; \
	command -v chromium >/dev/null && touch $@ || echo 'Chromium is not installed: its tests will be skipped'

# Shell tools, for the page on verifying a release without Python.
$(VENV)/.shell: | $(VENV)/bin/python
	@{ command -v jq && command -v openssl; } >/dev/null || { echo 'installing jq and openssl …'; $(call debian,jq openssl); }; \
	{ command -v jq && command -v openssl; } >/dev/null && touch $@ || echo 'jq or openssl is not installed: a test will be skipped'

# A compiler and an emulator of aarch64, for its wheel and for tests/engine/native/test_aarch64.py.
has_aarch64 = command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null
$(VENV)/.aarch64: | $(VENV)/bin/python
	@$(has_aarch64) || { echo 'installing a compiler and an emulator of aarch64 …'; $(call debian,gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user); }; \
	$(has_aarch64) && touch $@ || echo 'aarch64 can be neither built nor emulated here: its tests will be skipped'
