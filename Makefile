# `make help` lists the targets. Every target sets up its own Python environment first.
# The one place that names the default base.
BASE ?= $(shell cat patches/default)
# quick, full, or auto: full where a full build takes under 20 minutes on this machine.
BUILD ?= auto
# Such as linux/arm64; empty for this machine's platform.
PLATFORM ?=
ARGS ?=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help bundle base-image test test-unit test-witness test-upstream test-mutations test-integration test-image \
        test-nomad lint lint-workflows release lock lock-dev lock-check docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

$(STAMP): scripts/requirements-dev.lock pyproject.toml scripts/make-venv.sh
	@sh scripts/make-venv.sh "$(PYTHON)" "$(VENV)"

bundle: $(STAMP) ## build the image for BASE (default: patches/default; BUILD=quick|full|auto) and dist/BASE/
	@$(BIN)/sm12x bundle --base $(BASE) --build $(BUILD) $(if $(PLATFORM),--platform $(PLATFORM)) $(ARGS)

base-image: $(STAMP) ## make the base image with debootstrap where none can be pulled
	@$(BIN)/sm12x bundle --base $(BASE) --base-image-only $(if $(PLATFORM),--platform $(PLATFORM)) $(ARGS)

test: lint test-unit test-witness test-upstream test-integration ## every test that needs no GPU

test-unit: $(STAMP) ## unit tests: no process, no network, under 30 s
	@$(BIN)/pytest -n auto --maxprocesses 4 tests/unit

test-witness: $(STAMP) ## each patch's witness: red on the untouched base, green on the patched one
	@sh scripts/make-tools.sh $(BIN)/python
	@$(BIN)/sm12x-dev check --base $(BASE)
	@$(BIN)/sm12x-dev witness --base $(BASE) --jobs 4 $(ARGS)

test-upstream: $(STAMP) ## the release's own unit tests: the stack may make none worse
	@$(BIN)/sm12x-dev upstream-tests --base $(BASE) $(ARGS)

test-mutations: $(STAMP) ## edits of patched lines: each has to turn a witness red (minutes)
	@sh scripts/make-tools.sh $(BIN)/python
	@$(BIN)/sm12x-dev mutate --base $(BASE) $(ARGS)

test-integration: $(STAMP) ## tests that run real git, real wheels, real compilers
	@sh scripts/make-tools.sh $(BIN)/python
	@$(BIN)/pytest -n 2 --dist loadgroup tests/integration

test-image: $(STAMP) ## tests of the image that `make bundle` has built
	@BASE=$(BASE) $(BIN)/pytest -n 2 tests/image

test-nomad: $(STAMP) ## the Nomad specifications, under a Nomad built here, with the bundle's image
	@BASE=$(BASE) $(BIN)/pytest tests/nomad

lint: $(STAMP) ## ruff, mypy --strict, hadolint, generated files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/hadolint Dockerfile.builder Dockerfile.bundle
	@$(BIN)/sm12x-dev check --base $(BASE) --messages-only
	@$(BIN)/sm12x-dev docs --check

# DRY=1 pushes nothing. TO names the images' repository: HOST/OWNER/NAME.
TO ?= host/owner/vllm-sm12x
DRY ?=
release: bundle ## what is published of BASE, checked, in build/release; DRY=1 pushes nothing, TO=HOST/OWNER/NAME
	@$(BIN)/sm12x-dev release make --base $(BASE) --out build/release $(if $(DRY),--uncommitted)
	@$(BIN)/sm12x-dev release push build/release --to $(TO) $(if $(DRY),--dry-run)
	@$(if $(DRY),$(BIN)/sm12x-dev release publish build/release --to $(TO) --dry-run)

lint-workflows: $(STAMP) ## actionlint (needs Go) and zizmor
	@$(BIN)/zizmor --offline --quiet .github
	@go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12

lock: $(STAMP) ## make the locked requirements of BASE again
	@$(BIN)/sm12x-dev lock --base $(BASE)

lock-check: $(STAMP) ## fail if the locked requirements of BASE are not what `make lock` makes
	@$(BIN)/sm12x-dev lock --base $(BASE) --check

lock-dev: $(STAMP) ## make the locks of the development and the witness tools again
	@$(BIN)/uv pip compile scripts/requirements-dev.in --universal --python-version 3.11 \
	  --generate-hashes --custom-compile-command "make lock-dev" -q -o scripts/requirements-dev.lock
	@cd scripts/sm12x/data/bench && ../../../../$(BIN)/uv pip compile requirements.in --universal \
	  --python-version 3.11 --generate-hashes --custom-compile-command "make lock-dev" -q -o requirements.lock
	@$(BIN)/uv pip compile tests/witness/requirements.in --universal --python-version 3.11 \
	  --generate-hashes --custom-compile-command "make lock-dev" -q \
	  --no-emit-package packaging --no-emit-package pygments -o tests/witness/requirements.lock
	@$(BIN)/uv pip compile tests/witness/upstream.in --universal --python-version 3.11 \
	  --generate-hashes --custom-compile-command "make lock-dev" -q \
	  -c tests/witness/requirements.lock $(foreach name,colorama iniconfig packaging pluggy pygments \
	  pytest typing-extensions,--no-emit-package $(name)) -o tests/witness/upstream.lock

docs: $(STAMP) ## write the generated parts of README.md, docs/ and nomad-examples/
	@$(BIN)/sm12x-dev docs

clean: ## remove make's output from the checkout (the download cache stays)
	rm -rf $(VENV) dist build
