# Every target works on a fresh machine that has Python 3.11 or newer with venv and pip, and make.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.synced

# Where there is no home, tools get one inside the checkout.
export HOME := $(or $(HOME),$(CURDIR)/.uv/home)
# A virtual environment that is active, or named elsewhere, is not ours.
export UV_PROJECT_ENVIRONMENT := .venv
unexport VIRTUAL_ENV

UV := $(or $(shell command -v uv 2>/dev/null),.uv/bin/uv)
APT := env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get

.DEFAULT_GOAL := help
.PHONY: help env broker demo test soak side-by-side scenes soak-webhook forgeries prometheus \
    pictures check format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

env: $(STAMP)  ## set up .venv with everything that uv.lock names

$(STAMP): pyproject.toml uv.lock | $(filter .uv/bin/uv,$(UV))
	$(UV) sync --locked --all-groups --no-group docs
	@touch $@

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet --disable-pip-version-check uv

WITHOUT_RABBITMQ := Install a RabbitMQ server (apt-get, dnf or brew install it), or set \
    SMS_BRIDGE_RABBITMQ__URL (demo) or SMS_BRIDGE_TEST_AMQP_URL (tests) to one that runs.
WITHOUT_PROMETHEUS := Install Prometheus: the programs prometheus and promtool must be on PATH.

# RUNLEVEL=1 keeps a package from starting a server of the system's: ours are private ones.
# $(call apt_install,PACKAGE,WHAT TO DO OTHERWISE)
define apt_install
	if ! command -v apt-get >/dev/null; then as=none; \
	elif [ "$$(id -u)" = 0 ]; then as=; \
	elif sudo -n true 2>/dev/null; then as='sudo -n'; \
	else as=none; fi; \
	if [ "$$as" != none ]; then \
	    $$as $(APT) update; \
	    $$as $(APT) install -y --no-install-recommends $(1) && exit 0; \
	fi; \
	echo '$(2)' >&2; \
	exit 1
endef

broker: $(STAMP)  ## install a RabbitMQ server, unless there is one or a URL names one
	@if [ -n "$$SMS_BRIDGE_RABBITMQ__URL$$SMS_BRIDGE_TEST_AMQP_URL" ] || \
	    $(BIN)/python -c 'from bridge.sandbox.broker import find_scripts as f; f()' 2>/dev/null; \
	then exit 0; fi; \
	$(call apt_install,rabbitmq-server,$(WITHOUT_RABBITMQ))

prometheus:  ## install Prometheus and promtool, unless they are there
	@if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi; \
	$(call apt_install,prometheus,$(WITHOUT_PROMETHEUS))

demo: $(STAMP) broker  ## run both directions for real, with faults, and account for every message (KEEP=1 leaves it running)
	$(BIN)/python -m bridge demo $(if $(KEEP),--keep)

test: $(STAMP) broker prometheus  ## run all tests, those with a real RabbitMQ and Prometheus too
	$(BIN)/pytest

pictures: $(STAMP) broker prometheus  ## run the demo and draw the dashboards from it, as docs/img/*.png
	$(UV) sync --locked --all-groups
	PYTHONPATH=. $(BIN)/python docs/pictures.py

MESSAGES ?= 50000
SEED ?= 1
soak: $(STAMP) broker  ## random faults for half an hour, then count what is lost or sent twice (MESSAGES=50000 SEED=1)
	PYTHONPATH=. $(BIN)/python tests/soak/run.py --messages $(MESSAGES) --seed $(SEED)

side-by-side: $(STAMP) broker  ## the usual ways to lose messages beside ours, in five minutes (WRITE=1 puts it into the docs)
	PYTHONPATH=. $(BIN)/python tests/soak/side_by_side.py $(if $(WRITE),--write)

scenes: $(STAMP) broker  ## long proofs of single promises, in half an hour (SCENES="sigterm kill" WRITE=1)
	PYTHONPATH=. $(BIN)/python tests/soak/scenes.py $(SCENES) $(if $(WRITE),--write)

EVENTS ?= 100000
KILLS ?= 20
soak-webhook: $(STAMP) broker  ## webhooks while the secret is rotated and the broker killed, then count what is refused or lost (EVENTS=100000 KILLS=20 SEED=1)
	PYTHONPATH=. $(BIN)/python tests/soak/webhook.py --events $(EVENTS) --kills $(KILLS) --seed $(SEED)

COUNT ?= 1000000
forgeries: $(STAMP)  ## forge so many signed webhooks, of which none may be accepted (COUNT=1000000 SEED=1)
	PYTHONPATH=. $(BIN)/python tests/soak/forgeries.py --count $(COUNT) --seed $(SEED)

check: $(STAMP)  ## lint, formatting, types, import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## format the code and fix what can be fixed by itself
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean:  ## remove .venv, caches and build results
	rm -rf .venv .uv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find bridge tests -name __pycache__ -type d -prune -exec rm -rf {} +
