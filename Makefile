# What people run here. Everything works from a fresh clone: each target sets up what it needs.
PYTHON  := .venv/bin/python
SEED    ?= 0
MODEL   ?= demo
FRESH   ?=
SET     ?=
JUDGE   ?=
AGENT   ?=
WORKERS ?= 2
SLOTS   ?= 6

RUN_DIR ?= runs/$(MODEL)$(if $(JUDGE),-judge-$(JUDGE))$(if $(AGENT),-$(AGENT))
TASKS   := runs/tasks/seed$(SEED)
NUM_TRAIN   := 24
NUM_HELDOUT := 96
NUM_UNSEEN  := 48

.PHONY: setup setup-run setup-gpu demo chaos test test-all lint bench images gpu-check clean

setup:
	@bash infra/setup/setup.sh

# And what a run starts from.
setup-run:
	@bash infra/setup/setup.sh run

# On a machine with NVIDIA GPUs: .venv with the learner on CUDA, .venv-engine with SGLang. docs/plan.md says more.
setup-gpu:
	@bash infra/setup/setup_gpu.sh

# make demo [SEED=0] [MODEL=demo|smollm2-135m] [JUDGE=rule|model] [AGENT=mini-swe-agent] [FRESH=1] [SET="key=value ..."]: the whole system on this
# machine. After Ctrl-C the same command resumes.
demo: setup-run $(TASKS)/unseen.jsonl model-$(MODEL) judge-$(JUDGE) agent-$(AGENT)
	@bash infra/setup/set_aside.sh $(RUN_DIR) $(SEED)
	@$(PYTHON) -m infra.local $(or $(RECIPE_$(MODEL)_$(if $(JUDGE),judge)),$(RECIPE_$(MODEL))) --run-dir $(RUN_DIR) $(if $(FRESH),--fresh) \
	    --workers $(WORKERS) --slots $(SLOTS) $(ENGINE_$(MODEL)) \
	    --prepare "-m trainer.demo images $(TASKS)/family" \
	    --prepare "-m workers.verify $(TASKS)/train.jsonl --new" $(PREPARE_$(AGENT)) \
	    -- --set seed=$(SEED) --set tasks.train=$(CURDIR)/$(TASKS)/train.jsonl \
	    --set tasks.heldout=$(CURDIR)/$(TASKS)/heldout.jsonl --set tasks.heldout_sets.unseen=$(CURDIR)/$(TASKS)/unseen.jsonl \
	    $(foreach key,$(JUDGE_$(JUDGE)) $(SET_$(AGENT)) $(SET),--set $(key))

# make chaos [KILLS=200] [SEED=0]: kills processes of a separate system at random instants; exit status 0 if nothing was lost.
KILLS ?= 200
chaos: setup
	@$(PYTHON) -m infra.chaos --kills $(KILLS) --seed $(SEED)

RECIPE_demo         := trainer/recipes/demo.toml
RECIPE_demo_judge   := trainer/recipes/demo_judge.toml
RECIPE_smollm2-135m := trainer/recipes/smollm2_135m.toml
# The engine has one thread, as by default: workers, containers and learner want the cores too, and two would wait for each other.
ENGINE_smollm2-135m := --dtype bfloat16

# Who scores the steps of each rollout: a rule that needs no model, or a real model behind an engine and a router of its own. That is slow on
# two cores, so it is asked little, and the run is short.
SMOLLM2    := models/SmolLM2-135M-Instruct
JUDGE_rule := judge.method=rule judge.name=evidence credit.method=outcome_then_steps
JUDGE_model := judge.method=votes judge.name=SmolLM2-135M-Instruct judge.tokenizer=$(CURDIR)/$(SMOLLM2) \
    judge.score_submission=false judge.templates=$(CURDIR)/trainer/recipes/judge_small.yaml \
    judge.num_votes=2 judge.max_new_tokens=8 judge.prompt_tokens=1024 judge.history_steps=2 judge.wait_s=900 batch.groups_per_step=2 \
    credit.method=outcome_then_steps num_steps=2 evaluation.episodes=16 evaluation.greedy_episodes=0

# Who plays: the built-in loop, or mini-swe-agent's own package as a program in the sandbox, with the same prompts.
PROGRAM                := runs/demo-mini-swe-agent.toml
PREPARE_mini-swe-agent := --prepare "-m workers.harness build mini"
SET_mini-swe-agent     := rollout.harness=$(CURDIR)/$(PROGRAM) rollout.context.policy=stop

.PHONY: agent- agent-mini-swe-agent
agent-:
agent-mini-swe-agent: setup
	@$(PYTHON) -m trainer.demo program --out $(PROGRAM)

.PHONY: model-demo model-smollm2-135m judge- judge-rule judge-model smollm2
model-demo judge- judge-rule:
judge-model: smollm2
smollm2: setup
	@$(PYTHON) -m infra.smollm2 --out $(SMOLLM2)
# The pretrained model solves nothing as it comes, so it first imitates the demo's teacher. After Ctrl-C the same command goes on.
model-smollm2-135m: smollm2
	@$(PYTHON) -m trainer.warmstart --model $(SMOLLM2) --out models/SmolLM2-135M-demo

$(TASKS)/unseen.jsonl: | setup
	@rm -rf $(TASKS)
	@$(PYTHON) -m trainer.demo tasks --out $(TASKS)/family --seed $(SEED) \
	    --train $(NUM_TRAIN) --heldout $(NUM_HELDOUT) --unseen $(NUM_UNSEEN)
	@$(PYTHON) -m workers.tasksets import fleet $(TASKS)/family/train --out $(TASKS)/train.jsonl
	@$(PYTHON) -m workers.tasksets import fleet $(TASKS)/family/heldout --out $(TASKS)/heldout.jsonl
	@$(PYTHON) -m workers.tasksets import fleet $(TASKS)/family/unseen --out $@

# Lint, types and the quick suite: what CI runs. tests/README.md says which suite is for what. If make is killed,
# so are the tests; set-up goes on to its end, and the next run waits for that.
test:
	@setpriv --pdeathsig KILL bash infra/setup/test.sh quick

# Lint, types and the quick tests of what differs from the branch main.
check:
	@setpriv --pdeathsig KILL bash infra/setup/test.sh changed

# Every test.
test-all:
	@setpriv --pdeathsig KILL bash infra/setup/test.sh all

lint: setup
	@bash infra/setup/lint.sh

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

# make gpu-check [CHECK="--only kernels"] [GPU_PYTHON=python3]: what holds on this machine's NVIDIA GPUs, step by step; docs/plan.md has more.
# Exit status 3 says that nothing failed and something could not be run, as with one GPU; the last line says what.
CHECK      ?=
GPU_PYTHON ?= $(if $(wildcard $(PYTHON)),$(PYTHON),python3)
gpu-check:
	@$(GPU_PYTHON) -m benchmarks.gpu_check $(CHECK) || [ $$? -eq 3 ]

# Keeps runs and models.
clean:
	@$(PYTHON) -m infra.services down 2>/dev/null || true
	rm -rf .venv .run .pytest_cache .ruff_cache .hypothesis swerve.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
