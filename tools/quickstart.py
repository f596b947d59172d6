# SPDX-License-Identifier: Apache-2.0
"""Train the Llama of `make train` on 2 ranks, print its results, and draw its loss.

    make train                                      the standard library's sources, TP 2, 3 minutes
    make train PP=2                                 the same in two pipeline stages, TP 1
    make train DATA="a.txt b/ c/*.gz" TP=1          your own text, one process
    make train DATA="my text.txt" ITERS=500         one file will do; 500 iterations

The Makefile makes corpus, tokenizer and tokens if they are missing or their source has changed. The
training resumes from its last checkpoint: after a call that was stopped, the next one trains to the
same iteration; after a finished one, it trains ITERS more iterations.
"""

import contextlib
import hashlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

import numpy as np

from mpu.launch import cores
from tools.build_corpus import text_of
from tools.command_line import Parser, error_line
from training.data.files import write_text
from training.data.indexed import IndexedTokens
from training.files.owned import json_with
from training.files.untrusted import open_plain, parse_json, printable, read_json, read_plain

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.path.relpath(sys.executable, ROOT)
CORES = cores()
VOCABULARY = 2048
TOKENS = "weft_text_document"  # the name of tools/preprocess_data.py for the prefix weft
ITERATIONS = 1000
LARGEST = 1 << 28  # bytes of a log, and of a line of the corpus
NUMBERS = ("iteration", "lr", "validation_loss", "validation_bits_per_byte", "tokens_per_second")
TEXT = ("path", "text")
FULL_VALIDATION = 65_536  # held-out tokens up to which every evaluation reads all of them
TP, PP = range(1, 3), range(1, 7)  # the parts that the model's heads and layers can be cut into
# fmt: off
MODEL: dict[str, Any] = {
    "num-layers": 4, "hidden-size": 192, "ffn-hidden-size": 512,
    "num-attention-heads": 6, "num-query-groups": 2,
    "seq-length": 256, "max-position-embeddings": 256,
    "normalization": "RMSNorm", "position-embedding-type": "rope",
    "micro-batch-size": 4, "global-batch-size": 4,
    "lr": 4e-3, "min-lr": 2e-4, "lr-decay-style": "cosine",
    "weight-decay": 0.1, "adam-beta2": 0.95, "clip-grad": 1.0,
    "log-interval": 10, "eval-iters": 10,
}
# fmt: on
SWITCHES = ["group-query-attention", "swiglu", "disable-bias-linear"]


def command_line(flags: dict[str, Any], switches: list[str]) -> list[str]:
    """Return {"num-layers": 4} and ["swiglu"] as ["--num-layers", "4", "--swiglu"]."""
    pairs = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return pairs + [f"--{name}" for name in switches]


def show(command: list[str], threads: int | None = None) -> None:
    """Print a command as typed in the checkout, one flag per line."""
    words = [f"OMP_NUM_THREADS={threads}"] * bool(threads) + [shlex.quote(word) for word in command]
    print("\n  $ " + printable(" ".join(words)).replace(" --", " \\\n      --") + "\n", flush=True)


def run(command: list[str], threads: int | None = CORES, stdout: int | None = None) -> str:
    """Run a command of this checkout; return its stdout if that is piped.

    threads: None lets the command choose. It runs in a session of its own, so that Ctrl-C reaches
    it once, from here, and its ranks have time to finish their step and save.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with subprocess.Popen(
        command, env=environment, text=True, start_new_session=True, stdout=stdout
    ) as child:
        try:
            output = child.communicate()[0]
        except KeyboardInterrupt:
            number = signal.SIGINT if "pretrain_llama.py" in command else signal.SIGTERM
            while child.poll() is None:  # a second Ctrl-C signals once more: no time to save
                for process in ranks(child.pid) if "--nproc-per-node" in command else [child.pid]:
                    os.kill(process, number)
                with contextlib.suppress(KeyboardInterrupt):
                    child.wait()
            raise
    if child.returncode:
        script = next(Path(word).name for word in command if word.endswith(".py"))
        raise SystemExit(f"make train: {script} failed (see above)")
    return output


def ranks(launcher: int) -> list[int]:
    """Return the processes that torchrun started: signalled, they save, and torchrun ends quietly.

    Without /proc, return the launcher itself, which passes a signal on but prints a traceback.
    """
    file = Path(f"/proc/{launcher}/task/{launcher}/children")
    started = file.read_text().split() if file.exists() else []
    return [int(process) for process in started] or [launcher]


def unigram_entropy(prefix: Path) -> float:
    """Return the entropy of a token file's own frequencies, in nats a token.

    No model that ignores the context can have a lower loss on these tokens.
    """
    counts = np.unique(IndexedTokens(str(prefix)).tokens, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())


def evaluated(heldout: Path) -> tuple[int, bool]:
    """Return the number of held-out tokens that an evaluation reads, and whether these are all."""
    there = Path(f"{heldout}.idx").exists()
    tokens = int(IndexedTokens(str(heldout)).count) if there else FULL_VALIDATION + 1
    few = MODEL["eval-iters"] * MODEL["global-batch-size"] * MODEL["seq-length"]
    return (tokens, True) if tokens <= FULL_VALIDATION else (few, False)


def parameters() -> int:
    """Return the number of the model's parameters; head and embedding are one matrix."""
    h, f, layers = MODEL["hidden-size"], MODEL["ffn-hidden-size"], MODEL["num-layers"]
    groups = MODEL["num-query-groups"] / MODEL["num-attention-heads"]
    return int(layers * (2 * h * h * (1 + groups) + 3 * h * f + 2 * h) + h + VOCABULARY * h)


def records(log: Path) -> list[dict[str, Any]]:
    """Return the records of a --log-json file, without an incomplete one of a killed run.

    A value that was not finite is left out of its record. Raises OSError, ValueError.
    """
    if not log.exists():
        return []
    found = []
    for number, line in enumerate(read_plain(log, LARGEST).split(b"\n")[:-1], 1):
        record = parse_json(line, where := f"{log}, line {number}")
        if isinstance(record, dict):
            record = {key: value for key, value in record.items() if value is not None}
        if (
            not isinstance(record, dict)
            or "iteration" not in record
            or any(type(record.get(key, 0)) not in (int, float) for key in NUMBERS)
        ):
            raise ValueError(f"{where}: not a line of a --log-json file")
        found.append(record)
    return found


def launch(flags: dict[str, Any], tp: int, pp: int) -> None:
    """Pretrain by torchrun with tp x pp ranks, or in one plain process with all the cores."""
    switches, threads = list(SWITCHES), max(1, CORES // (tp * pp))
    if (heldout := flags.get("valid-data-path")) and evaluated(Path(heldout))[1]:
        switches.append("full-validation")
    command = [PYTHON, "pretrain_llama.py"]
    if tp * pp > 1:
        torchrun = Path(PYTHON).with_name("torchrun")  # absent if torch is the interpreter's
        command = [str(torchrun)] if torchrun.exists() else [PYTHON, "-m", "torch.distributed.run"]
        command += ["--standalone", "--nproc-per-node", str(tp * pp), "pretrain_llama.py"]
    if tp > 1:
        flags = {"tensor-model-parallel-size": tp, **flags}
        switches.insert(0, "sequence-parallel")
    if pp > 1:  # one micro-batch per sample: the more, the smaller the bubble
        flags = {"pipeline-model-parallel-size": pp, **flags, "micro-batch-size": 1}
    command += command_line({**flags, "device": "cpu"}, switches)
    show(command, threads)
    run(command, threads)


def continues(folder: Path, done: int, target: int) -> str:
    """Return a line on a run's checkpoint and its learning rate, which more steps raise again."""
    most, least, warm = MODEL["lr"], MODEL["min-lr"], min(40, (target - done) // 10)
    share = (done + 1 - warm) / (target - warm)  # of the cosine that has passed at the next step
    rate = least + (most - least) * (1 + math.cos(math.pi * share)) / 2
    seen = [r["lr"] for r in records(folder / "log.jsonl") if "lr" in r]
    before = f", after {seen[-1]:.2g}: the cosine now ends at {target}" if seen else ""
    return (
        f"continuing with {folder / 'checkpoints'} after iteration {done}, at a learning rate of "
        f"{rate:.2g}{before}"
    )


def train(out: Path, tp: int, pp: int, iterations: int) -> Path:
    """Train until the next multiple of `iterations`, resuming; return the run's folder."""
    folder = out / (f"tp{tp}pp{pp}" if pp > 1 else f"tp{tp}")
    about = folder / "run.json"
    if about.exists() and not json_with("key")(about):
        raise SystemExit(f"make train: {about} is not of make train: give OUT=another/folder")
    expected = digest(text_of(out / "corpus"), MODEL, SWITCHES)
    if about.exists() and read_json(about)["key"] != expected:
        raise SystemExit(
            f"make train: {folder} holds a run of another model or other text;"
            f" rm -r {folder} to start anew, or give OUT=another/folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(about, json.dumps({"key": expected}), json_with("key"))
    manifests = (folder / "checkpoints").glob("step_" + 8 * "[0-9]" + "/manifest.json")
    done = max((int(file.parent.name.removeprefix("step_")) for file in manifests), default=0)
    target = (done // iterations + 1) * iterations
    start = continues(folder, done, target) if done else "starting"
    size = f"{parameters() / 1e6:.1f} M parameters"
    print(f"\n{start}: a Llama of {size}, to iteration {target}, on the CPU (even with a GPU)")
    launch(flags_of(out, folder, iterations, target), tp, pp)
    return folder


def flags_of(out: Path, folder: Path, iterations: int, target: int) -> dict[str, Any]:
    """Return the flags of a run in `folder` that ends at iteration `target`."""
    return {
        **MODEL,
        "train-iters": target,
        "lr-warmup-iters": min(40, iterations // 10),
        "train-data-path": out / "tokens" / "train" / TOKENS,
        "valid-data-path": out / "tokens" / "heldout" / TOKENS,
        "tokenizer-type": "SentencePieceTokenizer",
        "tokenizer-model": out / "tokenizer" / "weft.model",
        "eval-interval": max(1, iterations // 8),
        "save-interval": max(1, iterations // 2),
        "save": folder / "checkpoints",
        "load": folder / "checkpoints",
        "log-json": folder / "log.jsonl",
        "tensorboard-dir": folder / "tensorboard",
    }


def digest(*things: object) -> str:
    """Return a short hash of the things that a run depends on."""
    return hashlib.sha256(json.dumps(things).encode()).hexdigest()[:16]


def bits_line(evaluation: dict[str, Any]) -> str:
    """Return the line with bits per byte, comparable across tokenizers, "" if not known."""
    bits = evaluation.get("validation_bits_per_byte")
    if bits is None:
        return ""
    nats = bits * math.log(2)
    return (
        f"bits a byte      {bits:.3f} bits a byte of held-out text ({nats:.3f} nats), comparable\n"
        "                 with other models of this text, whatever their tokenizer\n"
    )


def lowest(evaluations: list[dict[str, Any]]) -> str:
    """Return a line if an earlier evaluation was clearly better, which is overfitting; else ""."""
    best = min(evaluations, key=lambda r: r["validation_loss"])
    if evaluations[-1]["validation_loss"] < 1.01 * best["validation_loss"]:
        return ""
    return (
        f"lowest           {best['validation_loss']:.3f} nats a token, after iteration "
        f"{best['iteration']}: the text is\n                 small, and the model has begun to "
        "overfit it. More text helps,\n                 or fewer iterations: ITERS="
        f"{best['iteration']} with another OUT\n"
    )


def sample(folder: Path, heldout: Path) -> None:
    """Print how the run's model continues a prompt: "def ", or words of the user's own text."""
    with open_plain(heldout) as file:
        record = parse_json(file.readline(LARGEST), f"{heldout}, line 1")
    if not isinstance(record, dict) or not all(type(record.get(k)) is str for k in TEXT):
        raise ValueError(f"{heldout}, line 1 was not written by tools/build_corpus.py")
    prompt = "def " if record["path"].endswith(".py") else " ".join(record["text"].split()[:3])
    command = [PYTHON, "tools/generate.py", "--load", str(folder / "checkpoints")]
    command += ["--prompt", prompt[:60], "--max-new-tokens", "200", "--temperature", "0.6"]
    show(command)
    run(command, threads=None)  # it takes one thread for a small model, which is far faster


def finish(out: Path, folder: Path, tp: int, pp: int) -> None:
    """Print the results: loss, unigram entropy, bits a byte, speed, a sample; draw the loss."""
    lines = records(folder / "log.jsonl")
    evaluations = [r for r in lines if "validation_loss" in r]
    steps = [r for r in lines if "tokens_per_second" in r]
    if not evaluations or not steps:
        raise SystemExit(
            "make train: stopped before the first evaluation; call it again to continue"
        )
    loss = evaluations[-1]["validation_loss"]
    perplexity = math.exp(loss) if loss < 700 else math.inf
    entropy = unigram_entropy(out / "tokens" / "heldout" / TOKENS)
    picture = folder / "loss.png"
    layout, world = f"TP {tp}" + f" x PP {pp}" * (pp > 1), tp * pp
    title = f"A Llama of {parameters() / 1e6:.1f} M parameters, {layout} on {world} CPU rank(s)"
    command = [PYTHON, "tools/plot_loss.py", str(folder / "log.jsonl"), "--title", title]
    run([*command, "--output", str(picture), "--reference", str(entropy), "unigram entropy"])
    speed = statistics.median(r["tokens_per_second"] for r in steps[-20:])
    layout += " with sequence parallelism" * (tp > 1)
    tokens, every = evaluated(out / "tokens" / "heldout" / TOKENS)
    over = f"all {tokens:,}" if every else f"the first {tokens:,}"
    print(
        f"\nvalidation loss  {loss:.3f} nats a token (perplexity {perplexity:.1f}), over "
        f"{over} held-out tokens\n"
        f"unigram entropy  {entropy:.3f} nats a token: the best loss of a model that ignores "
        "context\n"
        f"{bits_line(evaluations[-1])}{lowest(evaluations)}"
        f"speed            {speed:,.0f} tokens/s, {layout} on {world} rank(s), {CORES} cores"
    )
    sample(folder, out / "corpus" / "heldout.jsonl")
    print(
        f"\npicture          {picture}\n"
        f"TensorBoard      .venv/bin/tensorboard --logdir {folder}\n"
        f"checkpoint       {folder / 'checkpoints'}\n"
        "the same command continues from here",
        flush=True,
    )


def main() -> None:
    """Train, and print the results."""
    parser = Parser(__doc__)
    parser.add_argument("--tp", type=int, choices=TP, help="TP ranks: 2, or 1 with --pp")
    parser.add_argument("--pp", type=int, choices=PP, default=1, help="pipeline stages")
    parser.add_argument("--iters", type=int, default=ITERATIONS, help="iterations per call")
    parser.add_argument("--out", type=Path, required=True, help="folder of corpus and tokens")
    args = parser.parse_args()
    tp = args.tp if args.tp is not None else 1 if args.pp > 1 else 2
    out = args.out.resolve()
    out = out.relative_to(ROOT) if out.is_relative_to(ROOT) else out
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        folder = train(out, tp, args.pp, args.iters)
        finish(out, folder, tp, args.pp)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from here", flush=True)
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(error_line("make train", error))


if __name__ == "__main__":
    main()
