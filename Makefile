# The commands of Weft. `make` alone lists them; everything runs from this checkout, in .venv.
PYTHON ?= python3
RUN    := .venv/bin/python
# A variable counts only if it is given on make's own command line, so that a DATA or TP in somebody's
# environment changes nothing.
given   = $(if $(findstring command line,$(origin $(1))),$($(1)))
quoted  = '$(subst ','\'',$(DATA))'
flag    = $(if $(call given,$(1)),$(2) $($(1)))
whole   = case "$(or $(call given,$(1)),1)" in ''|*[!0-9]*|0*) echo "make train: $(1)=$($(1)): it must be a whole number, 1 or more" >&2; exit 1;; esac;

# The variables that each command reads. Any other on make's command line would change nothing: it is refused.
takes.train        := DATA JSON_KEYS ON_BAD_DOCUMENT TP PP ITERS OUT
takes.check-data   := $(takes.train)
takes.test         := JOBS
takes.prove        := PART
takes.chaos        := CASES SEED MINUTES KINDS ONLY OUT
takes.rehearse     := WORLD RANK DEVICE EXAMPLE ARGS
takes.explain      := TP CP CP_COMM DP PP ZERO LAYERS MICRO_BATCHES RECOMPUTE SCHEDULE TIED SP FP8 EXPERTS EP DISPATCHER SHARED OVERLAP OPTIMIZER TIMELINE ARGS
takes.fork-check   := MODEL ONLY ARGS
takes.bench        := CASES COMPILE
takes.bench-pipeline := CASES
takes.bench-zero   := CASES LEVELS DEEPSPEED
takes.same-bits    := BASE RUNS
takes.bench-commit := BASE CASES PAIRS
takes.gpu-check    := PART ROWS OUT ARGS
COMMANDS := help setup check-data train test prove chaos rehearse explain fork-check lint bench bench-overlap bench-context bench-pipeline bench-zero same-bits bench-commit gpu-check slurm-check
GOALS    := $(or $(MAKECMDGOALS),help)
TAKEN    := PYTHON $(if $(filter-out $(COMMANDS),$(GOALS)),$(takes.train)) $(foreach goal,$(GOALS),$(takes.$(goal)))
STRANGE  := $(firstword $(filter-out $(TAKEN),$(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name)))))
EMPTY    := $(firstword $(foreach name,$(TAKEN),$(if $(findstring command line,$(origin $(name))),$(if $(strip $($(name))),,$(name)))))
ifneq ($(EMPTY),)
$(error $(EMPTY)= is empty: give it a value, or leave it out)
endif
ifneq ($(STRANGE),)
CAPITALS := $(shell printf %s '$(STRANGE)' | tr '[:lower:]' '[:upper:]')
$(error $(STRANGE)=$($(STRANGE)): make $(or $(MAKECMDGOALS),without a command) takes no $(STRANGE)$(if $(filter $(CAPITALS),$(TAKEN)),; did you mean $(CAPITALS)?,: it takes $(sort $(TAKEN))))
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: FORCE $(COMMANDS)

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

setup: ## make .venv (PYTHON=... chooses the interpreter; its own torch is used if 2.11 or newer) and the native library
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "make setup: there is no $(PYTHON); install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) tools/setup_env.py $(if $(filter file default,$(origin PYTHON)),,--chosen)

# before set-up, which may take minutes
check-data:
	@$(if $(call given,DATA),p=$(RUN); [ -x $$p ] || p=$(PYTHON); ! $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || $$p tools/build_corpus.py --data $(quoted) --check-only)
	@$(call whole,TP) $(call whole,PP) $(call whole,ITERS) :
	@case "$(or $(call given,TP),1)" in 1|2) ;; *) echo "make train: TP=$(TP): TP is 1 or 2 here, as this small model has 2 heads of keys and values; PP is 1 to 6" >&2; exit 1;; esac
	@[ "$(or $(call given,PP),1)" -le 6 ] || { echo "make train: PP=$(PP): PP is 1 to 6 here, as this small model has 4 layers, an embedding and a head" >&2; exit 1; }

# What `make train` trains on. A file is made where it is missing, or older than what it is made from.
QUICK  := $(or $(call given,OUT),runs/quickstart$(if $(call given,DATA),-$(firstword $(shell printf %s $(quoted) | cksum))))
CORPUS  = $(if $(call given,DATA),--data $(quoted)) $(call flag,ON_BAD_DOCUMENT,--on-bad-document) $(if $(call given,JSON_KEYS),--json-keys $(JSON_KEYS))
TOKENS := weft_text_document.idx

# DATA's sizes and times: it is looked at each time, and written only where they have changed
$(QUICK)/source.json: FORCE
	@$(RUN) tools/build_corpus.py $(CORPUS) --source $@

$(QUICK)/corpus/corpus.json: $(QUICK)/source.json tools/build_corpus.py
	$(RUN) tools/build_corpus.py $(CORPUS) --output-dir $(@D)

$(QUICK)/tokenizer/weft.model: $(QUICK)/corpus/corpus.json tools/train_tokenizer.py
	@mkdir -p $(@D)
	$(RUN) tools/train_tokenizer.py --input $(QUICK)/corpus/train.jsonl --check $(QUICK)/corpus/heldout.jsonl --vocab-size 2048 --output-prefix $(basename $@)

$(QUICK)/tokens/%/$(TOKENS): $(QUICK)/tokenizer/weft.model tools/preprocess_data.py
	@mkdir -p $(@D)
	$(RUN) tools/preprocess_data.py --input $(QUICK)/corpus/$*.jsonl --append-eod --tokenizer-type SentencePieceTokenizer --tokenizer-model $< --output-prefix $(@D)/weft

train: check-data setup $(QUICK)/tokens/train/$(TOKENS) $(QUICK)/tokens/heldout/$(TOKENS) ## pretrain a small Llama on this machine, 2 ranks, about 3 minutes (PP=2 TP=1 ITERS=500 DATA="a.txt folder b/*.jsonl.gz" JSON_KEYS=content ON_BAD_DOCUMENT=skip ...)
	@$(RUN) tools/quickstart.py --out $(QUICK) $(call flag,TP,--tp) $(call flag,PP,--pp) $(call flag,ITERS,--iters)

# mypy takes one core for half a minute, so it runs beside the tests, which wait at times. Many
# containers set PYTHONDONTWRITEBYTECODE: each of some hundred processes would compile everything again.
test: setup ## on the CPU: lint, and run the short form of every test that needs no GPU, in two processes (JOBS=4)
	@echo "make test: on the CPU, also where there is a GPU; make gpu-check tests the GPU"
	$(RUN) -m ruff check .
	@types=$$(mktemp) && trap 'kill $$!; rm -f $$types' INT TERM && { $(RUN) -m mypy >$$types 2>&1 & } && \
	PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(RUN) -m pytest -q -rs -n $(or $(call given,JOBS),2) --dist loadfile --no-loadscope-reorder; \
	tests=$$?; wait $$!; types_code=$$?; echo "$(RUN) -m mypy"; cat $$types; rm -f $$types; exit $$((tests ? tests : types_code))

prove: setup ## run every test in its long form, part by part, each timed (PART="kills model" runs these; tests/prove.py lists them)
	@OMP_NUM_THREADS=1 $(RUN) tests/prove.py $(call given,PART)

chaos: setup ## play a seeded storm of faults of every kind on real runs, as root on Linux, 20 minutes (CASES=300 SEED=7 MINUTES=5 KINDS="kill disk" OUT=runs/chaos)
	@OMP_NUM_THREADS=1 $(RUN) tests/chaos/storm.py $(call flag,CASES,--cases) $(call flag,SEED,--seed) $(call flag,MINUTES,--minutes) \
	  $(call flag,KINDS,--kinds) $(call flag,ONLY,--only) $(call flag,OUT,--out)

rehearse: setup ## run one rank's steps of an example on a GPU without memory: launches, memory, traffic, time, mistakes (WORLD=8 RANK=0 DEVICE=h100 EXAMPLE=llama3_8b_one_node.sh ARGS="--more-flags")
	@WORLD_SIZE=$(or $(call given,WORLD),8) LAUNCH=$(RUN) bash examples/$(or $(call given,EXAMPLE),llama3_8b_one_node.sh) --rehearse $(call flag,RANK,--rehearse-rank) $(call flag,DEVICE,--rehearse-device) $(call given,ARGS)

explain: setup ## print every collective and message of one tiny step (TP=2 CP=2 CP_COMM=a2a DP=2 ZERO=3 PP=2 SCHEDULE=zb-v TIED=1 LAYERS=4 MICRO_BATCHES=3 RECOMPUTE=full SP=0 FP8=tensorwise EXPERTS=4 EP=2 DISPATCHER=alltoall SHARED=1 OVERLAP=1 OPTIMIZER=muon ARGS="--more-flags"), and draw it (TIMELINE=step.svg)
	@$(RUN) tools/explain.py $(call flag,TP,--tp) $(call flag,CP,--cp) $(call flag,CP_COMM,--cp-comm-type) $(call flag,DP,--dp) $(call flag,PP,--pp) $(call flag,ZERO,--zero) \
	  $(call flag,LAYERS,--layers) $(call flag,MICRO_BATCHES,--micro-batches) $(call flag,RECOMPUTE,--recompute-granularity) \
	  $(call flag,SCHEDULE,--schedule) $(if $(filter 1,$(call given,TIED)),--tied) $(if $(filter 0,$(call given,SP)),--no-sequence-parallel) \
	  $(call flag,FP8,--fp8-recipe) $(call flag,EXPERTS,--num-experts) $(call flag,EP,--ep) $(call flag,DISPATCHER,--dispatcher) $(if $(filter 1,$(call given,SHARED)),--shared-expert) $(call flag,OPTIMIZER,--optimizer) \
	  $(if $(filter 1,$(call given,OVERLAP)),--overlap-moe-expert-parallel-comm) $(call flag,TIMELINE,--timeline) $(call given,ARGS)

fork-check: setup ## check a model's file: one rank against every kind of layout, 1 to 2 minutes (MODEL=path/to/fork.py ONLY="tp 2; dp 2" ARGS="--own-flag 3")
	@$(RUN) tools/fork_check.py $(call flag,MODEL,--model) $(if $(call given,ONLY),--only "$(ONLY)") $(if $(call given,ARGS),-- $(ARGS))

lint: setup ## run ruff on all files, and mypy --strict on all of the product
	$(RUN) -m ruff check .
	$(RUN) -m mypy

bench: setup ## measure training steps against PyTorch's own parallel stack, 20 minutes (CASES="tiny-fp32-1 tiny-fp32-2 ..." COMPILE=1: also its stack under torch.compile)
	$(RUN) benchmarks/bench_step.py $(call flag,CASES,--cases) $(if $(filter 1,$(call given,COMPILE)),--compile)

bench-overlap: setup ## measure tensor parallel 2: shared memory against gloo, overlapped matmuls, a step against a peer, 30 minutes
	$(RUN) benchmarks/bench_shared_memory.py
	$(RUN) benchmarks/bench_matmul.py --dtype fp32 bf16
	$(RUN) benchmarks/bench_tp.py

bench-context: setup ## measure context parallelism: steps at cp 2 against one process, attention at cp 4 against ideal, 20 minutes
	$(RUN) benchmarks/bench_context.py

bench-pipeline: setup ## measure pipeline schedules against torch's and against our simulator, 30 minutes (CASES="tiny/1f1b/8 ...")
	$(RUN) benchmarks/bench_pipeline.py $(call flag,CASES,--cases)

bench-zero: setup ## measure the ZeRO levels against FSDP2 and DeepSpeed, 60 minutes (CASES="tiny-fp32-2 ..." LEVELS="1 3" DEEPSPEED=/path/to/python that has it)
	$(RUN) benchmarks/bench_zero.py $(call flag,CASES,--cases) $(call flag,LEVELS,--levels) $(call flag,DEEPSPEED,--deepspeed-python)

same-bits: setup ## compare losses, norms, checkpoints and resumes with another commit's, bit for bit (BASE=commit RUNS="tp2-sp forked ...")
	$(RUN) benchmarks/compare_bits.py $(or $(call given,BASE),HEAD) $(call flag,RUNS,--runs)

bench-commit: setup ## compare the speed with another commit's in interleaved pairs, about 17 minutes (BASE=commit CASES="tiny-fp32-1 ..." PAIRS=9)
	$(RUN) benchmarks/compare_speed.py $(or $(call given,BASE),HEAD) $(call flag,CASES,--cases) $(call flag,PAIRS,--pairs)

gpu-check: ## check and measure the GPU path with PYTHON and its own torch, in calls of 9 minutes; results in OUT, $$OUT or runs/gpu-check (PART="steps experts" ROWS="step-6 run-bf16" ARGS="--tiny --device cpu")
	@$(PYTHON) tests/gpu/check.py $(call given,PART) $(call given,ROWS) $(call flag,OUT,--out) $(call given,ARGS)

slurm-check: setup ## check a job on a real SLURM (Debian's, started here as root): pre-empted, out of time, cancelled, a node dead, 8 minutes
	$(RUN) tests/slurm/check.py
