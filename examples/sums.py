# SPDX-License-Identifier: Apache-2.0
"""Write the inputs of docs/continuing.md without a network: a text, questions and a model.

    my_text/               200 texts of sums in words, "twenty plus eleven is thirty-one."
    data/questions_*.jsonl questions about small sums, each with its answer; some are held out
    runs/base              a Llama of 135,488 random parameters and its tokenizer, as transformers
                           writes them, in place of a downloaded model

Everything is drawn from fixed seeds.
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BELOW_20 = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen""".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def words(n: int) -> str:
    """Return a number from 0 to 99 in words: 31 is thirty-one."""
    if n < 20:
        return BELOW_20[n]
    return TENS[n // 10 - 2] + (f"-{BELOW_20[n % 10]}" if n % 10 else "")


def sums(draw: random.Random, count: int, below: int) -> list[tuple[str, str, str]]:
    """Return `count` sums of two numbers less than `below`, each as three words: a, b, a + b."""
    pairs = [(draw.randrange(below), draw.randrange(below)) for _ in range(count)]
    return [(words(a), words(b), words(a + b)) for a, b in pairs]


def main() -> None:
    draw = random.Random(1)
    text, data, base = Path("my_text"), Path("data"), Path("runs/base")
    for folder in (text, data, base):
        folder.mkdir(parents=True, exist_ok=True)
    for i in range(200):
        lines = [f"{a} plus {b} is {c}." for a, b, c in sums(draw, 40, below=50)]
        (text / f"{i:03}.txt").write_text("\n".join(lines))
    for part, count in (("train", 1000), ("heldout", 50)):
        rows = [
            {"prompt": f"What is {a} plus {b}?", "answer": f" It is {c}."}
            for a, b, c in sums(draw, count, below=10)
        ]
        lines = [json.dumps(row) + "\n" for row in rows]
        (data / f"questions_{part}.jsonl").write_text("".join(lines))

    bpe = ByteLevelBPETokenizer()
    bpe.train(sorted(map(str, text.iterdir())), 384, special_tokens=["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>"
    )
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(base)
    tokenizer.save_pretrained(base)


if __name__ == "__main__":
    main()
