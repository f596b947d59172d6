#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Run a command as every task of this SLURM job, and requeue the job if the run is
# not done. The job scripts in this folder end in
#
#   CHECKPOINTS=its --save directory exec bash examples/slurm_ranks.sh pretrain_llama.py FLAG...
#
# srun is the launcher: it gives each rank its number. By how the ranks end (docs/slurm.md has more):
#
#    0  done
#   75  stopped by a signal, saved. Requeued, unless SLURM is ending the job already: it puts a
#       pre-empted one back by itself, and one that was cancelled must stay away
#    2  a mistake in the flags or the data: it would only be made again
#   any other: requeued if a checkpoint was made since the start: a lost node does not end the run,
#       and a job that fails again and again at one place ends
#
# With DRY_RUN_FIRST=yes one task dry-runs the flags before the first start of the ranks, unless
# FITS=yes: a model that does not fit, or a mistake in the flags, ends here. Both run with .venv's
# Python if there is a .venv and no other environment is active, in a container with its python3.
# PYTHON=... names another.
#
# CONTAINER=image: in this container, where the cluster has pyxis. $PWD is mounted, and so are the
# folders of DATA, TOKENIZER and OUT where they are absolute paths; MOUNTS=a:b,c adds others.
set -euo pipefail

newest() { # prints the name of the newest checkpoint; nothing where there is none
    (ls "${CHECKPOINTS:-}" 2> /dev/null || true) | { grep -E '^step_[0-9]+$' || true; } | tail -n 1
}

mounts() { # prints what the container sees, separated by commas
    local found=$PWD path
    for path in "${DATA:+$(dirname "$DATA")}" "${TOKENIZER:+$(dirname "$TOKENIZER")}" "${OUT:-}"; do
        case $path in
            "$PWD" | "$PWD"/* | *[,:]*) ;;
            /*) found+=,$path:$path ;;
        esac
    done
    echo "$found${MOUNTS:+,$MOUNTS}"
}

main() { # a function, since bash reads a script bit by bit, and somebody may change the file
    MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
    export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    # each node keeps what Triton compiles: ranks of many nodes in one shared folder get in each
    # other's way
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-$(id -u)}
    local before code=0 after again state ranks python=${PYTHON:-python3} inside=() cpus=()
    # some versions of srun do not take it from the job
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || cpus=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    if [ -n "${CONTAINER:-}" ]; then
        if [ -n "${OUT:-}" ]; then mkdir -p "$OUT"; fi # what is mounted must be there
        inside=(--container-image="$CONTAINER" --container-mounts="$(mounts)"
            --container-workdir="$PWD")
    elif [ -z "${PYTHON:-}${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x .venv/bin/python ]; then
        python=$PWD/.venv/bin/python
    fi
    before=$(newest)
    echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}," \
        "last checkpoint: ${before:-none}; ranks meet at $MASTER_ADDR:$MASTER_PORT"

    if [ "${DRY_RUN_FIRST:-no}${FITS:-no}${SLURM_RESTART_COUNT:-0}" = yesno0 ]; then
        ranks=${SLURM_NTASKS:-$((SLURM_NNODES * ${SLURM_NTASKS_PER_NODE:-1}))}
        WORLD_SIZE=$ranks srun --nodes=1 --ntasks=1 ${cpus[@]+"${cpus[@]}"} ${inside[@]+"${inside[@]}"} \
            "$python" "$@" --dry-run > "dry-run-$SLURM_JOB_ID.txt" || code=$?
        if [ $code != 0 ] || grep "does NOT fit" "dry-run-$SLURM_JOB_ID.txt"; then
            echo "job $SLURM_JOB_ID: the dry run ended with $code (dry-run-$SLURM_JOB_ID.txt);" \
                "FITS=yes starts the ranks all the same"
            exit 2
        fi
        rm "dry-run-$SLURM_JOB_ID.txt"
    fi

    trap : TERM # SLURM sends it to this shell as well, which has to outlive the ranks
    # Ranks stop one another and say why; srun must not, at the first exit code that is not 0.
    # --wait is for a rank that ended before it had met the others; SRUN_FLAGS may say otherwise.
    # shellcheck disable=SC2086
    srun --kill-on-bad-exit=0 ${cpus[@]+"${cpus[@]}"} ${SRUN_FLAGS:---wait=60} --distribution=block \
        ${inside[@]+"${inside[@]}"} "$python" "$@" || code=$?

    after=$(newest)
    echo "job $SLURM_JOB_ID: exit code $code, last checkpoint: ${after:-none}"
    case $code in
        0 | 2) again=no ;;
        75) again=yes ;;
        *) [ "$after" = "$before" ] && again=no || again=yes ;;
    esac
    if [ $again = yes ]; then
        state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T || true)
        if [ "$state" = RUNNING ]; then
            echo "job $SLURM_JOB_ID: back into the queue"
            scontrol requeue "$SLURM_JOB_ID"
        else
            echo "job $SLURM_JOB_ID: ${state:-gone}, so left to SLURM"
        fi
    fi
    exit $code
}
main "$@"
