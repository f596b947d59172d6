#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Run a command as every task of this SLURM job, and put the job back into the queue if the run is
# not done. The job scripts beside this one end in
#
#   CHECKPOINTS=its --save directory exec bash examples/slurm_ranks.sh pretrain_llama.py FLAG...
#
# srun is the launcher: it gives each rank its number. By how the ranks end (docs/slurm.md has more):
#
#    0  done
#   75  stopped by a signal, saved. Put back, unless SLURM is ending the job already: it puts a
#       pre-empted one back by itself, and one that was cancelled must stay away
#    2  a mistake in the flags or the data: it would only be made again
#   any other: put back if a checkpoint was made since the start: a lost node does not end the run,
#       and a job that fails again and again at one place ends
set -euo pipefail

newest() { # prints the name of the newest checkpoint; nothing where there is none
    (ls "${CHECKPOINTS:-}" 2> /dev/null || true) | { grep -E '^step_[0-9]+$' || true; } | tail -n 1
}

main() { # a function, since bash reads a script bit by bit, and somebody may change the file
    MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
    export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    local before code=0 after again state
    before=$(newest)
    echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}," \
        "last checkpoint: ${before:-none}; ranks meet at $MASTER_ADDR:$MASTER_PORT"

    trap : TERM # SLURM sends it to this shell as well, which has to outlive the ranks
    # Ranks stop one another and say why; srun must not, at the first exit code that is not 0.
    # --wait is for a rank that ended before it had met the others; SRUN_FLAGS may say otherwise.
    # shellcheck disable=SC2086
    srun --kill-on-bad-exit=0 ${SRUN_FLAGS:---wait=60} --distribution=block \
        ${CONTAINER:+--container-image="$CONTAINER" --container-mounts="$PWD"} \
        ${CONTAINER:+--container-workdir="$PWD"} python3 "$@" || code=$?

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
