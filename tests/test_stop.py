# SPDX-License-Identifier: Apache-2.0
"""What follows a step, in every case: evaluate, save, agree among the ranks, stop."""

import contextlib
from itertools import product
from types import SimpleNamespace

import torch

import pretrain_llama
from training.config import FaultConfig
from training.run import guard
from training.run.stop import Decision, Due, Heard, decide

# Of one step: heard of the step before (signal, over, skipped), heard of this very one (the same),
# --on-nan stop, the last step, whether the flags make due: exit, save, evaluate; whether there is a
# --save, and data to evaluate on.
CASES = list(product((False, True), repeat=13))


def by_hand(case):
    """Return what happens after a step, in order: the rules in full, one after the other."""
    told, over, skipped, now_told, now_over, now_skipped, on_nan, last, *flags = case
    leave, keep, check, place, data = flags
    if skipped and on_nan:
        return ["not finite at 0"]
    done = []
    ended = told or over or last or leave
    saving = place and (ended or keep)
    without = skipped  # the last that is known of was skipped
    if ended or saving:
        done.append("hear of this step")
        if now_skipped and on_nan:
            return [*done, "not finite at 1"]
        told, ended, without = told or now_told, ended or now_told or now_over, now_skipped
    checking = check and data
    if checking and not told:
        done.append("evaluate")
    if saving and (ended or not without):
        done.append(f"save, must {ended}, hurry {told or without}")
    if checking and told:
        done.append("evaluate")
    if ended and not last:
        done.append(f"end, by a signal {told}")
    return done + ["return"] * ended


class AfterAStep(guard.Guard):
    """A guard that has seen a step 0."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self._judged = -1
        self._steps.append((0, 0, 1))


class Ends(Exception):
    """The run went on to a second step."""


def by_train(case, monkeypatch):
    """Return what pretrain_llama.train does after one step, with stand-ins around it."""
    *heard, on_nan, last, leave, keep, check, place, data = case
    done = []

    def interval(due):
        return 1 if due else 7

    def batches(consumed, size):
        if consumed:
            raise Ends
        return []

    def save(iteration, consumed, must, hurry):
        done.append(f"save, must {must}, hurry {hurry}")

    def close():
        done.append("hear of this step")
        return Heard(*heard[3:])

    settings = SimpleNamespace(
        on_nan="stop" if on_nan else "skip",
        exit_interval=interval(leave),
        eval_interval=interval(check) if check else None,
        exit_duration_in_mins=None,
        manual_gc=False,
    )
    kept = SimpleNamespace(save="runs/x" if place else None, save_interval=interval(keep))
    config = SimpleNamespace(
        run=settings,
        checkpoint=kept,
        model=SimpleNamespace(seq_length=1),
        log=SimpleNamespace(sample_interval=None),
        fault=FaultConfig(rerun_mode="disabled"),
    )
    run = SimpleNamespace(
        config=config,
        optimizer=SimpleNamespace(params_norm=None),
        iteration=0,
        consumed=0,
        grid=SimpleNamespace(world=None, rank=0),
        engine=None,
        sink=None,
        monitor=SimpleNamespace(action="", enter=lambda phase, action: None),
        device="cpu",
    )
    profile = contextlib.nullcontext(SimpleNamespace(step=lambda: None))
    slow = contextlib.ExitStack()
    slow.step = lambda *numbers: {}
    agreement = SimpleNamespace(ask=lambda *mine: Heard(*heard[:3]), close=close)
    scalar = torch.tensor(0.0)
    stand_ins = {
        "Guard": AfterAStep,
        "Agreement": lambda world: agreement,
        "Profile": lambda *about: profile,
        "SlowRanks": lambda *about: slow,
        "global_batch_size": lambda *about: 1,
        "learning_rate": lambda *about: 1.0,
        "decoupled_learning_rate": lambda *about: 1.0,
        "train_step": lambda *about: (scalar, scalar, scalar),
        "evaluate": lambda run, loader: done.append("evaluate"),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(pretrain_llama, name, stand_in)
    monkeypatch.setattr(guard, "global_batch_size", lambda *about: 1)
    loader = SimpleNamespace(next_global_batch=batches)
    log = SimpleNamespace(
        due=lambda iteration: False,
        values=lambda *about: {},
        step=lambda **numbers: None,
        note=lambda text: None,
        validation=lambda iteration, loss, loader: None,
    )
    signal = SimpleNamespace(
        begin=lambda speak: None,
        received=False,
        end=lambda told, how_far, saved: done.append(f"end, by a signal {told}"),
    )
    try:
        pretrain_llama.train(
            run,
            SimpleNamespace(train=loader, valid=loader if data else None),
            SimpleNamespace(
                poll=lambda: None, failed=None, save=save, passed_over=set(), reached=lambda i: None
            ),
            log,
            SimpleNamespace(unmeasured=lambda: []),
            total=1 if last else 3,
            stop_signal=signal,
        )
    except Ends:
        return done
    except FloatingPointError as error:
        return [*done, f"not finite at {str(error).split('iteration ')[1][0]}"]
    return [*done, "return"]


def test_a_step_is_followed_by_what_the_rules_say(monkeypatch):
    for case in CASES:
        assert by_train(case, monkeypatch) == by_hand(case), case


def test_what_is_decided_in_the_plain_cases():
    nothing = Decision(*[False] * 5)
    quiet, told, over = Heard(), Heard(signal=True), Heard(over=True)
    never = Due(end=False, save=False, evaluate=False, can_save=True)
    assert decide(never, quiet) == nothing
    assert decide(never, over) == Decision(True, False, True, False, False)
    both = Due(end=False, save=True, evaluate=True, can_save=True)
    assert decide(both, quiet) == Decision(False, False, True, True, False)
    assert decide(both, told) == Decision(True, True, True, False, True)  # saved first
    nowhere = Due(end=True, save=True, evaluate=False, can_save=False)
    assert decide(nowhere, quiet) == Decision(True, False, False, False, False)
    assert quiet | told | over == Heard(True, True, False)
