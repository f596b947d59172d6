# SPDX-License-Identifier: Apache-2.0
"""A model for lm-evaluation-harness (lm_eval, an optional package), computed by a Scorer.

Texts are tokenized as by lm_eval's model for transformers: with the token that begins a document if
the tokenizer begins documents with it. All ranks run the harness side by side, so each builds the
same requests, and the Scorer divides them among the replicas.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from tools.evaluator.score import Scorer
from tools.generate import generate
from training.data.tokenizer import Tokenizer

NEW_TOKENS = 256  # of a generated answer, if the task gives no number


def check_installed() -> str:
    """Return lm_eval's version. Raises ValueError if it is not installed."""
    try:
        import lm_eval
    except ImportError as error:
        raise ValueError(
            f"the package lm_eval is not installed ({error}); pip install 'weft-llm[eval]', or "
            "pip install 'lm_eval>=0.4.9,<0.5'"
        ) from None
    return str(lm_eval.__version__)


def find_tasks(names: Sequence[str], include_path: str | None) -> Any:
    """Return the harness's task manager, after making each task and reading its data.

    Raises ValueError for an unknown name, and for a task whose data is neither here nor can be
    downloaded.
    """
    from lm_eval.tasks import TaskManager, get_task_dict

    manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            like = [known for known in manager.all_tasks if name.lower() in known.lower()][:5]
            near = f"; names that contain it: {', '.join(like)}" if like else ""
            raise ValueError(f"--tasks {name}: lm_eval has no such task or group{near}")
        try:
            get_task_dict([name], manager)
        except Exception as error:  # of datasets, of a hub, of the task's own code
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"--tasks {name}: its data cannot be read or downloaded ({type(error).__name__}: "
                f"{first}); on a machine with a network lm_eval downloads it, into HF_HOME"
            ) from None
    return manager


def harness_model(scorer: Scorer, tokenizer: Tokenizer) -> Any:
    """Return a model for lm_eval's simple_evaluate."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Weft(TemplateLM):  # type: ignore[misc]
        """The names are lm_eval's."""

        @property
        def eot_token_id(self) -> int:
            return first_token(tokenizer) if tokenizer.eod is None else tokenizer.eod

        @property
        def prefix_token_id(self) -> int:
            return first_token(tokenizer)

        @property
        def max_length(self) -> int:
            return scorer.max_length

        @property
        def tokenizer_name(self) -> str:
            return hashlib.sha256(tokenizer.digest().encode()).hexdigest()

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **more: Any
        ) -> list[int]:
            begins = add_special_tokens is not False and tokenizer.starts_with_bos
            return tokenizer.encode(string, bos=begins)

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **more: Any
        ) -> list[tuple[float, bool]]:
            return scorer.log_likelihoods([(given, new) for _, given, new in requests])

        def loglikelihood_rolling(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[float]:
            rows, owners = [], []
            for i, request in enumerate(requests):
                windows = get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=scorer.max_length,
                    context_len=1,
                )
                found = [make_disjoint_window(window) for window in windows]
                rows += found
                owners += [i] * len(found)
            totals = [0.0] * len(requests)
            for i, (value, _) in zip(owners, scorer.log_likelihoods(rows), strict=True):
                totals[i] += value
            return totals

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            arguments = [request.args for request in requests]
            scorer.compare(arguments)
            scorer.progress.begin("generating texts:", len(arguments))
            return scorer.share(arguments, lambda each: self._continued(*each))

        def _continued(self, context: str, options: dict[str, Any]) -> str:
            stops = options.get("until") or []
            stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
            new = new_tokens(options)
            room = scorer.max_length - new
            if room < 1:
                raise ValueError(
                    f"a task asks for {new} new tokens, but the model takes {scorer.max_length} "
                    "with its prompt (--max-length)"
                )
            ids = (self.tok_encode(context) or [self.prefix_token_id])[-room:]

            def ended(row: list[int]) -> bool:
                text = tokenizer.decode(row)
                return any(stop in text for stop in stops)

            draw = bool(options.get("do_sample")) and options.get("temperature") != 0
            [row] = generate(
                scorer.model,
                ids,
                max_new_tokens=new,
                temperature=float(options.get("temperature", 1.0)) if draw else 0.0,
                top_k=int(options.get("top_k") or 0),
                top_p=float(options.get("top_p") or 1.0),
                stop=tokenizer.eod,
                until=ended if stops else None,
            )
            text = tokenizer.decode(row)
            for stop in stops:
                text = text.split(stop)[0]
            return text

    return Weft()


def first_token(tokenizer: Tokenizer) -> int:
    """Return the token before a text: bos, else the end of a document. Raises ValueError."""
    found = tokenizer.bos if tokenizer.bos is not None else tokenizer.eod
    if found is None:
        raise ValueError("the tokenizer has no token that begins or ends a document")
    return found


def new_tokens(options: dict[str, Any]) -> int:
    """Return the number of new tokens in a task's options, under any of lm_eval's names."""
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        if options.get(name) is not None:
            return int(options[name])
    return NEW_TOKENS
