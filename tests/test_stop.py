# SPDX-License-Identifier: Apache-2.0
"""What follows a step, in every case: evaluate, save, agree among the ranks, stop."""

import contextlib
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import pretrain_llama
from mpu.launch import Launch
from training.run.step import BACK, CONTINUE, Decision, Step, after_step, combine
from training.run.stop import StepFlags
from training.run.watch import guard
from training.settings.arguments import FaultConfig

# Of one step: heard of the step before (signal, over, skipped), heard of this very one (the same),
# --on-nan stop, the last step, whether the flags make due: exit, save, evaluate; whether there is a
# --save, and data to evaluate on; whether there is --keep-best, and this step's loss is the lowest.
CASES = [(*case, False) for case in product((False, True), repeat=13)]
CASES += [(*case[:10], True, True, True, True) for case in product((False, True), repeat=10)]


def by_hand(case):
    """Return what happens after a step, in order: the rules in full, one after the other."""
    told, over, skipped, now_told, now_over, now_skipped, on_nan, last, *flags = case
    leave, keep, check, place, data, best = flags
    if skipped and on_nan:
        return ["not finite at 0"]
    done = []
    ended = told or over or last or leave
    saving = place and (ended or keep)
    without = skipped  # the last that is known of was skipped
    if ended or saving or check:
        done.append("hear of this step")
        if now_skipped and on_nan:
            return [*done, "not finite at 1"]
        told, ended, without = told or now_told, ended or now_told or now_over, now_skipped
    checking = check and data
    saving = place and (ended or (keep and not without))
    if checking and not told:
        done.append("evaluate")
    if saving or (best and not told and not without):
        alone = ", for its loss alone" * (not saving)
        done.append(f"save, must {ended}, hurry {told or without}{alone}")
    if checking and told:
        done.append("evaluate")
        done += ["save, must True, hurry True"] * best
    if ended and not last:
        done.append(f"end, by a signal {told}")
    return done + ["return"] * ended


class AfterAStep(guard.Guard):
    """A guard that has seen a step 0."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self._before = Step(0, 0, 1, 1.0, None)


class Ends(Exception):
    """The run went on to a second step."""


def by_train(case, monkeypatch):
    """Return what pretrain_llama.train does after one step, with stand-ins around it."""
    *heard, on_nan, last, leave, keep, check, place, data, best = case
    done = []

    def interval(due):
        return 1 if due else 7

    def batches(consumed, size):
        if consumed:
            raise Ends
        return []

    def save(iteration, consumed, must, hurry, only_best=False):
        alone = ", for its loss alone" * only_best
        done.append(f"save, must {must}, hurry {hurry}{alone}")

    def close():
        done.append("hear of this step")
        return StepFlags(*heard[3:])

    settings = SimpleNamespace(
        on_nan="stop" if on_nan else "skip",
        exit_interval=interval(leave),
        eval_interval=interval(check) if check else None,
        start_eval_at_iter=None,
        eval_at_start=False,
        exit_duration_in_mins=None,
        manual_gc=False,
    )
    kept = SimpleNamespace(
        save="runs/x" if place else None,
        save_interval=interval(keep),
        keep_best="" if best else None,
    )
    config = SimpleNamespace(
        run=settings,
        checkpoint=kept,
        model=SimpleNamespace(seq_length=1),
        log=SimpleNamespace(
            sample_interval=None, log_digests=None, log_layer_rms_interval=None, profile=False,
            record_memory_history=False, log_max_attention_logit=False,
        ),
        optimizer=SimpleNamespace(qk_clip=False),
        moe=SimpleNamespace(experts=0),
        fault=FaultConfig(rerun_mode="disabled"),
        stages=(),
    )
    run = SimpleNamespace(
        config=config,
        optimizer=SimpleNamespace(params_norm=None),
        model=SimpleNamespace(ctx=SimpleNamespace(auxiliary_losses=SimpleNamespace(mean=None))),
        iteration=0,
        consumed=0,
        grid=SimpleNamespace(world=None, world_size=1, rank=0, launch=Launch()),
        engine=None,
        sink=None,
        monitor=SimpleNamespace(
            action="", enter=lambda phase, action: None, activity=SimpleNamespace(begun=0.0)
        ),
        device=torch.device("cpu"),
    )
    watcher = contextlib.ExitStack()
    watcher.after_step = lambda step: CONTINUE
    agreement = SimpleNamespace(ask=lambda *mine: StepFlags(*heard[:3]), close=close)
    scalar = torch.tensor(0.0)
    stand_ins = {
        "Guard": AfterAStep,
        "Agreement": lambda world: agreement,
        "MemoryReport": lambda *about: watcher,
        "train_step": lambda *about: (scalar, scalar, scalar),
        "evaluate": lambda run, loader: (done.append("evaluate") or 0.0, 0.0),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(pretrain_llama, name, stand_in)
    of_next = lambda run: Step(run.iteration + 1, run.consumed, 1, 1.0, None)  # noqa: E731
    monkeypatch.setattr(Step, "next", of_next)
    loader = SimpleNamespace(next_global_batch=batches, dataset=SimpleNamespace(length=9))
    log = SimpleNamespace(
        interval=SimpleNamespace(seconds=0.0),
        values=lambda *about: {},
        after_step=watcher.after_step,
        note=lambda text: None,
        timing=lambda kind: contextlib.nullcontext(),
        validation=lambda iteration, loss, size, part: None,
    )
    signal = SimpleNamespace(
        begin=lambda: None,
        received=False,
        end=lambda told, how_far, saved, next_stage: done.append(f"end, by a signal {told}"),
    )
    try:
        pretrain_llama.train(
            run,
            SimpleNamespace(train=loader, valid={"validation": loader} if data else {}),
            SimpleNamespace(
                poll=lambda: None,
                failed=None,
                save=save,
                evaluated=lambda iteration, losses: best and losses == {"validation": 0.0},
                saved=SimpleNamespace(passed_over=set()),
                names={},
                digests={},
                after_step=watcher.after_step,
            ),
            log,
            SimpleNamespace(auto=None),
            total=1 if last else 3,
            stop_signal=signal,
        )
    except Ends:
        return done
    except FloatingPointError as error:
        return [*done, f"not finite at {str(error).split('iteration ')[1][0]}"]
    return [*done, "return"]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.prove)])
def test_a_step_is_followed_by_what_the_rules_say(monkeypatch, every):
    for case in CASES[::every]:
        assert by_train(case, monkeypatch) == by_hand(case), case


# what watchers ask for after a step -> what follows it
RULES = [
    ({}, {}),
    ({"save"}, {"save"}),
    ({"save", "skipped"}, {"skipped"}),  # the weights are a step older: an older save is as good
    ({"stop", "save", "skipped"}, {"stop", "save", "skipped"}),  # but the last step is saved
    ({"stop"}, {"stop"}),  # there is no --save
    ({"evaluate", "sample", "save"}, {"evaluate", "sample", "save"}),
    ({"stop", "signal", "save", "evaluate"}, {"stop", "signal", "save", "evaluate_after_save"}),
    ({"back", "stop", "signal", "save", "evaluate", "sample"}, {"back"}),
]


def decided(*names):
    return Decision(**dict.fromkeys(names, True))


def test_decisions_are_combined_by_one_rule():
    """Whoever asks, in whatever order, the same follows."""
    for asked, follows in RULES:
        each = [decided(name) for name in sorted(asked)]
        for decisions in ([decided(*asked)], each, each[::-1], [*each, CONTINUE, *each]):
            assert combine(decisions) == decided(*follows), asked


def test_nobody_looks_at_a_step_that_was_gone_back_on():
    looked = []

    class Looks:
        def __init__(self, decision):
            self.decision = decision

        def after_step(self, step):
            looked.append(step.decided)
            return self.decision

    step = Step(1, 0, 8, 1e-3, None)
    watchers = [Looks(decided("save")), Looks(BACK), Looks(decided("stop"))]
    assert after_step(step, watchers) == BACK
    assert looked == [CONTINUE, decided("save")]  # each sees what those before it asked for


def test_a_flag_counts_whoever_reports_it():
    assert StepFlags() | StepFlags(signal=True) | StepFlags(over=True) == StepFlags(
        True, True, False
    )
