# What people run here. Everything works from a fresh clone: each target sets up what it needs.
PYTHON  := .venv/bin/python
SEED    ?= 0
MODEL   ?= demo
FRESH   ?=
SET     ?=
WORKERS ?= 2
SLOTS   ?= 6

RUN_DIR ?= runs/$(MODEL)
TASKS   := runs/tasks/seed$(SEED)
NUM_TRAIN   := 24
NUM_HELDOUT := 128

.PHONY: setup demo chaos test lint bench images gpu-check clean

setup:
	@bash infra/setup/setup.sh

# make demo [SEED=0] [MODEL=demo|smollm2-135m] [FRESH=1] [SET="key=value ..."]: the whole system on this machine. After Ctrl-C the same command resumes.
demo: setup $(TASKS)/heldout.jsonl model-$(MODEL)
	@bash infra/setup/set_aside.sh $(RUN_DIR) $(SEED)
	@$(PYTHON) -m infra.local $(RECIPE_$(MODEL)) --run-dir $(RUN_DIR) $(if $(FRESH),--fresh) \
	    --workers $(WORKERS) --slots $(SLOTS) \
	    --prepare "-m trainer.demo images $(TASKS)/family" \
	    --prepare "-m workers.verify $(TASKS)/train.jsonl --new" \
	    -- --set seed=$(SEED) --set tasks.train=$(CURDIR)/$(TASKS)/train.jsonl \
	    --set tasks.heldout=$(CURDIR)/$(TASKS)/heldout.jsonl $(foreach key,$(SET),--set $(key))

# make chaos [KILLS=200] [SEED=0]: kills processes of a separate system at random instants; exit status 0 if nothing was lost.
KILLS ?= 200
chaos: setup
	@$(PYTHON) -m infra.chaos --kills $(KILLS) --seed $(SEED)

RECIPE_demo         := trainer/recipes/demo.toml
RECIPE_smollm2-135m := trainer/recipes/smollm2_135m.toml

.PHONY: model-demo model-smollm2-135m
model-demo:
model-smollm2-135m: setup
	@$(PYTHON) -m infra.models.smollm2 --out models/SmolLM2-135M-Instruct

$(TASKS)/heldout.jsonl: | setup
	@rm -rf $(TASKS)
	@$(PYTHON) -m trainer.demo tasks --out $(TASKS)/family --seed $(SEED) \
	    --train $(NUM_TRAIN) --heldout $(NUM_HELDOUT)
	@$(PYTHON) -m trainer.tasksets import fleet $(TASKS)/family/train --out $(TASKS)/train.jsonl
	@$(PYTHON) -m trainer.tasksets import fleet $(TASKS)/family/heldout --out $@

# pytest prints the last line.
test: setup
	@bash infra/setup/test.sh

lint: setup
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m basedpyright

# Ratios to named rivals and floors, see benchmarks/README.md. BENCH=--short takes minutes. Use an idle machine.
bench: setup
	@$(PYTHON) -m infra.services up
	@$(PYTHON) -m infra.images.build task-base
	@$(PYTHON) -m benchmarks $(BENCH)

# Images for docker-compose.yml, from Debian packages and this machine's package index. Where `docker compose` is missing, it is
# installed for this user first, so that `docker compose up workers` works afterwards.
images: setup
	@bash infra/docker/compose.sh install
	@$(PYTHON) -m infra.images.build
	@bash infra/docker/wheels.sh
	@COMPOSE_PROFILES=cpu,trainer bash infra/docker/compose.sh build

gpu-check:
	@bash infra/setup/gpu_check.sh

# Keeps runs and models.
clean:
	@$(PYTHON) -m infra.services down 2>/dev/null || true
	rm -rf .venv .run .pytest_cache .ruff_cache .hypothesis swerve.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
