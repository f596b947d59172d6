# SPDX-License-Identifier: Apache-2.0
"""Check the flags of a mixture of experts."""

from collections.abc import Iterator
from typing import Any

from mpu.pipeline.schedules import OVERLAPPING
from training.flags.flag_table import live_flags
from training.flags.megatron import vocabulary
from training.settings.arguments import EXPERTS, MoEConfig
from training.settings.config import Config, UsageError
from training.settings.pipeline_schedule import micro_batch_counts, schedule_of

OVERLAP, DISPATCHER = "--overlap-moe-expert-parallel-comm", "--moe-token-dispatcher-type"
INSTANCES = "--num-distributed-optimizer-instances"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
OURS, NORMALISED = "model/moe.py", "model/qwen3.py"


def choose_file(moe: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Fill in the model's file if --model-file is left out; return the settings of experts.

    Without --num-experts these are the defaults, whatever is given. Raises UsageError if
    --model-file names another dense model than --qk-layernorm does.
    """
    if moe.get("num_experts", 0) > 1:
        model.setdefault("model_file", OURS)
        return moe
    if moe.get("qk_layernorm") and model.setdefault("model_file", NORMALISED) != NORMALISED:
        raise UsageError(
            f"--qk-layernorm is --model-file {NORMALISED}, and --model-file is "
            f"{model['model_file']}: give one of them"
        )
    return {}


def check_given(given: dict[str, Any]) -> None:
    """Raise UsageError for an accepted flag that cannot be ignored in a model with experts."""
    if given.get(EXPERTS, 0) > 1:
        of_megatron = given.keys() - live_flags().keys()
        for name, why in vocabulary().with_experts.items() if of_megatron else ():
            if name in given:
                raise UsageError(f"{name} with {EXPERTS} {given[EXPERTS]}: {why}; leave it out")


def notes(config: Config) -> Iterator[str]:
    """Yield lines on flags without effect, and on results that depend on the layout."""
    m = config.moe
    if m.experts and m.moe_router_pre_softmax and m.moe_router_score_function != "softmax":
        yield (
            "--moe-router-pre-softmax has no effect, also in Megatron-LM, with "
            f"--moe-router-score-function {m.moe_router_score_function}: there is no softmax"
        )
    if m.experts and config.parallel.overlap_moe_expert_parallel_comm:
        most = max(micro_batch_counts(config))
        if not any(schedule_of(config, most).pairs):
            yield (
                f"{OVERLAP} has no effect: with {most} micro-batches no forward overlaps a "
                "backward; use more micro-batches or fewer pipeline stages"
            )
    if m.experts and m.moe_expert_capacity_factor:
        yield (
            f"--moe-expert-capacity-factor {m.moe_expert_capacity_factor:g} counts a rank's tokens "
            "of a micro-batch, so which tokens are dropped depends on the layout and on "
            "--micro-batch-size"
        )
    if m.experts and "aux_loss" in m.moe_router_load_balancing_type and any(m.moe_aux_loss_coeff):
        yield (
            "--moe-router-load-balancing-type aux_loss is computed over a micro-batch, so it "
            "depends on --micro-batch-size; seq_aux_loss is the same for every layout"
        )


def check(config: Config) -> None:
    """Raise UsageError if experts do not fit the layout, or another flag."""
    p, m = config.parallel, config.moe
    ep, tp = p.expert_model_parallel_size, p.tensor_model_parallel_size
    if not m.experts:
        if p.expert_tensor_parallel_size > 1:
            raise UsageError(f"{ETP} {p.expert_tensor_parallel_size} needs {EXPERTS}")
        return
    etp = p.expert_tensor_parallel_size or tp
    if etp > 1:
        left = "" if p.expert_tensor_parallel_size else " (the default, --tensor-model-"
        left += "" if p.expert_tensor_parallel_size else "parallel-size)"
        raise UsageError(f"{ETP} {etp}{left}: splitting an expert is not available; give {ETP} 1")
    if m.experts % ep:
        raise UsageError(f"{EXPERTS} {m.experts} is not a multiple of {EP} {ep}")
    stage = tp * p.context_parallel_size * p.data_parallel_size
    if stage % ep:
        raise UsageError(
            f"{EP} {ep} does not divide the {stage} ranks of a pipeline stage "
            "(tensor x context x data)"
        )
    copies, ranks = p.num_distributed_optimizer_instances, stage // ep
    if ranks % copies:
        raise UsageError(
            f"{INSTANCES} {copies} does not divide the {ranks} ranks that hold the same experts "
            f"({stage} of a pipeline stage / {EP} {ep}) into equal groups"
        )
    skew, most = config.rehearse.rehearse_expert_skew, min(ep, m.experts / m.moe_router_topk)
    if skew != 1.0 and not 1.0 <= skew <= most:
        raise UsageError(
            f"--rehearse-expert-skew {skew:g} must be from 1 to {most:g}: a token goes to an "
            f"expert once, so one of {ep} ranks (ep) gets at most {most:g} times the mean"
        )
    if skew != 1.0 and not (config.run.dry_run or config.rehearse.rehearse):
        raise UsageError(
            f"--rehearse-expert-skew {skew:g} is for --rehearse and --dry-run: in a run the router "
            "decides"
        )
    kinds, coefficients = m.moe_router_load_balancing_type, m.moe_aux_loss_coeff
    if not kinds or len(coefficients) not in (1, len(kinds)):
        raise UsageError(
            f"--moe-aux-loss-coeff has {len(coefficients)} values and --moe-router-load-balancing-"
            f"type {len(kinds)}: give one coefficient for each type"
        )
    if m.moe_router_topk > m.experts:
        raise UsageError(
            f"--moe-router-topk {m.moe_router_topk} is more than {EXPERTS} {m.experts}"
        )
    softmax = m.moe_router_score_function == "softmax"
    if m.moe_router_topk == 1 and softmax and not m.moe_router_pre_softmax:
        raise UsageError(
            "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one expert is 1, "
            "so the router would not be trained"
        )
    _check_groups(m)
    if p.overlap_moe_expert_parallel_comm:
        _check_overlap(config)
    freq = m.moe_layer_freq
    if isinstance(freq, tuple) and len(freq) != config.model.num_layers:
        raise UsageError(
            f"--moe-layer-freq lists {len(freq)} layers, and --num-layers is "
            f"{config.model.num_layers}"
        )


def _check_overlap(config: Config) -> None:
    """Raise UsageError if no forward can overlap a backward."""
    p = config.parallel
    if p.schedule not in OVERLAPPING:
        raise UsageError(
            f"{OVERLAP} needs --pipeline-schedule {' or '.join(OVERLAPPING)}, not {p.schedule}: "
            "other schedules do not pair a forward with the backward after it"
        )
    if p.zero == 3 and p.pipeline_model_parallel_size == 1:
        raise UsageError(
            f"{OVERLAP} is not available at --zero-stage 3 without a pipeline: the two "
            "micro-batches alternate between the weights of two layers, which would be gathered "
            "again at each change"
        )


def _check_groups(m: MoEConfig) -> None:
    """Raise UsageError if the groups of experts do not fit the number of experts, or k."""
    groups, best, k = m.moe_router_num_groups, m.moe_router_group_topk, m.moe_router_topk
    if groups < 2:
        return
    if m.experts % groups:
        raise UsageError(f"--moe-router-num-groups {groups} does not divide {EXPERTS} {m.experts}")
    if not 1 <= best <= groups or k % best:
        raise UsageError(
            f"--moe-router-group-topk {best or 'left out'}: must be from 1 to "
            f"--moe-router-num-groups {groups} and divide --moe-router-topk {k}"
        )
    if best * (m.experts // groups) < k:
        raise UsageError(
            f"--moe-router-group-topk {best}: {best} groups of {m.experts // groups} experts are "
            f"fewer experts than --moe-router-topk {k}"
        )
