#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold HuggingFaceTokenizer against transformers.AutoTokenizer, over many forms of its files.

    python -m tests.training.data.tokenizer_forms             all forms; 1 where one is wrong
    python -m tests.training.data.tokenizer_forms --every 10  each tenth

A form is a tokenizer.json (`bases`), what other files say of its tokens (PLACES, one or two), a
tokenizer_class and fields that it reads (CLASSES), and sometimes a config.json. Right are the ids
of transformers for each of TEXTS, its decoding, eos and bos, whether a document begins with bos,
and the largest id. A refused form raises ValueError; one that transformers refuses is counted
apart.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from training.data.tokenizer import HuggingFaceTokenizer

NEW = "<|im_end|>"
CORPUS = ["the lowest newest widest hello world", "def f(x):\n    return x + 1 12345"] * 5
TEXTS = (
    *("hello world", " hello", "  two  spaces ", "", "\n\n\thello", "naïve e\u0301 №12 字🙂"),
    *(f"hello {NEW} world", f"{NEW}hello", f"low{NEW}", f"{NEW.upper()} {NEW} <|up|> <|UP|>"),
    *("the <|new|> the", "a </s> b</s>", "<s>a<unk>", "end<|endoftext|> of"),
    *("<pad><|img|>[PAD]", "est lowest ▁ it's"),
)
Files = dict[str, dict[str, Any]]


def byte_level(**more: Any) -> dict[str, Any]:
    """Return a tokenizer.json as GPT-2's, with <|endoftext|>. more: parts in place of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return {**json.loads(tokenizer.to_str()), **more}


def sentencepiece(metaspace: bool = False, **more: Any) -> dict[str, Any]:
    """Return a tokenizer.json as Llama 2's: spaces are put in by the normalizer, or Metaspace."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += sorted(set("▁" + "".join(CORPUS)) - {" ", "\n"})
    merges = [("▁", "▁"), ("e", "l"), ("▁", "h"), ("▁h", "el"), ("l", "o"), ("e", "s"), ("es", "t")]
    vocabulary = {word: i for i, word in enumerate([*words, *map("".join, merges)])}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    if metaspace:
        cut = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        tokenizer.pre_tokenizer = cut
    else:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    special = [AddedToken(word, normalized=False) for word in words[:3]]
    tokenizer.add_special_tokens(special)
    line = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = line
    return {**json.loads(tokenizer.to_str()), **more}


def added(index: int, text: str, **flags: bool) -> dict[str, Any]:
    """Return a token as tokenizer.json has it under "added_tokens"."""
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text, **usual, "special": True, **flags}


def token(text: str = NEW, **flags: bool) -> dict[str, Any]:
    """Return a token as added_tokens_decoder has it."""
    return {key: value for key, value in added(0, text, **flags).items() if key != "id"}


def typed(text: str = NEW, **flags: bool) -> dict[str, Any]:
    """Return a token as tokenizer_config.json has it under a name."""
    return {"__type": "AddedToken", **token(text, **flags)}


def bases() -> dict[str, dict[str, Any]]:
    """Return the files tokenizer.json by their names."""
    pad = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    padding = {**pad, "strategy": {"Fixed": 40}, "pad_token": "[PAD]"}
    cut = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    plain, nfkc = byte_level(), {"type": "NFKC"}
    learnt = byte_level()
    learnt["model"]["vocab"]["</s>"] = len(learnt["model"]["vocab"])
    more = [*plain["added_tokens"], added(310, "<|new|>", lstrip=True), added(311, "<pad>")]
    lower = [*plain["added_tokens"], added(300, "<|UP|>", normalized=True, special=False)]
    words = {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "</s>": 2}}
    words["unk_token"] = "[UNK]"
    split = {"type": "WhitespaceSplit"}
    few = sentencepiece()  # no byte has a piece
    pieces = [word for word in few["model"]["vocab"] if not word.startswith("<0x")]
    few["model"]["vocab"] = {word: i for i, word in enumerate([*pieces, "[UNK]"])}
    scores = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], *([c, -9.0] for c in "▁delohrw")]
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [*scores, ["▁hello", -2.0], ["▁wor", -3.0]]}
    return {
        "bytes": plain,
        "spm": sentencepiece(),
        "metaspace": sentencepiece(metaspace=True),
        "padded": byte_level(padding=padding, truncation=cut),
        "learnt </s>": learnt,
        "holes": byte_level(added_tokens=more),
        "lower": byte_level(added_tokens=lower, normalizer={"type": "Lowercase"}),
        "nfkc": byte_level(normalizer=nfkc),
        "no merges": byte_level(model={**plain["model"], "ignore_merges": True}),
        "words": byte_level(model=words, added_tokens=[], pre_tokenizer=split, decoder=None),
        "unigram": sentencepiece(metaspace=True, model=unigram),
        "few": few,
        "dropout": byte_level(model={**plain["model"], "dropout": 0.5}),
    }


def config(**fields: Any) -> Files:
    """Return tokenizer_config.json alone."""
    return {"tokenizer_config.json": fields}


PLACES: dict[str, Files] = {
    "nowhere": {},
    "eos": config(eos_token=NEW),
    "eos in an object": config(eos_token=typed(lstrip=True)),
    "eos is a piece": config(eos_token="est"),
    "eos is null": config(eos_token=None, bos_token=None),
    "bos and pad": config(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"),
    "decoder": config(added_tokens_decoder={"900": token()}, eos_token=NEW),
    "decoder, of a piece": config(added_tokens_decoder={"5": token("hello")}),
    "decoder, two of one": config(added_tokens_decoder={"400": token(), "401": token(rstrip=True)}),
    "decoder, flags": config(
        added_tokens_decoder={
            "501": token("<|new|>", single_word=True, special=False, normalized=True),
            "500": token(rstrip=True),
            "0": token("<|endoftext|>", lstrip=True),
        },
        eos_token="<|endoftext|>",
    ),
    "decoder and the older files": {
        **config(added_tokens_decoder={"400": token("<|new|>")}),
        "added_tokens.json": {NEW: 401},
        "special_tokens_map.json": {"eos_token": NEW},
    },
    "additional": config(additional_special_tokens=[NEW, "<|new|>"], eos_token=NEW),
    "additional, objects": config(additional_special_tokens=[typed(rstrip=True)]),
    "extra": config(extra_special_tokens=["<|new|>", NEW], additional_special_tokens=["<pad>"]),
    "extra, by name": config(extra_special_tokens={"image_token": "<|img|>", "x": NEW}),
    "a name of its own": config(image_token=NEW, video_token=typed("<|new|>")),
    "added": {**config(eos_token=NEW), "added_tokens.json": {NEW: 500, "<|new|>": 300}},
    "added alone": {"added_tokens.json": {"<|new|>": 300, NEW: 301, "hello": 5}},
    "map": {"special_tokens_map.json": {"eos_token": NEW, "pad_token": "<pad>"}},
    "map, unknown": {"special_tokens_map.json": {"unk_token": "[UNK]"}},
    "map, objects": {
        **config(eos_token="<|endoftext|>"),
        "special_tokens_map.json": {"eos_token": token(lstrip=True), "bos_token": token("<s>")},
    },
    "map, additional": {
        **config(image_token="<|new|>"),
        "special_tokens_map.json": {"additional_special_tokens": [NEW], "img_token": "<|img|>"},
    },
    "map, extra": {
        **config(extra_special_tokens=["<|new|>"]),
        "special_tokens_map.json": {"extra_special_tokens": [NEW, "<pad>"]},
    },
    "all": {
        **config(eos_token=NEW, mask_token="<mask>", additional_special_tokens=["<|new|>"]),
        "added_tokens.json": {"<|new|>": 700, "<mask>": 701},
        "special_tokens_map.json": {"eos_token": "<|endoftext|>", "cls_token": token("<cls>")},
    },
    "text": config(split_special_tokens=True, eos_token=NEW),
    "fields": config(add_bos_token=True, add_eos_token=True, bos_token="<s>", eos_token="</s>"),
}
CLASSES: dict[str, dict[str, Any]] = {
    "none": {},
    "fast": {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True},
    "backend": {"tokenizer_class": "TokenizersBackend", "add_prefix_space": True},
    "unknown": {"tokenizer_class": "MyOwnTokenizerFast"},
    "llama": {"tokenizer_class": "LlamaTokenizerFast"},
    "llama, legacy": {"tokenizer_class": "LlamaTokenizer", "legacy": True},
    "llama, no space": {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
    "code llama": {"tokenizer_class": "CodeLlamaTokenizer"},
    "gemma": {"tokenizer_class": "GemmaTokenizerFast"},
    "gpt2": {"tokenizer_class": "GPT2Tokenizer"},
    "gpt2, space": {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
    "codegen": {"tokenizer_class": "CodeGenTokenizer"},
    "neox": {"tokenizer_class": "GPTNeoXTokenizerFast"},
    "qwen2": {"tokenizer_class": "Qwen2TokenizerFast"},
    "qwen3.5": {"tokenizer_class": "Qwen3_5Tokenizer"},
    "cohere": {"tokenizer_class": "CohereTokenizerFast"},
    "roberta": {"tokenizer_class": "RobertaTokenizerFast"},
    "bert": {"tokenizer_class": "BertTokenizerFast"},
    "t5": {"tokenizer_class": "T5TokenizerFast"},
}
MODELS = (None, "llama", "mistral", "qwen2", "qwen3", "granite", "gemma2", "olmo", "phi3", "cohere")


class Form(NamedTuple):
    """A form: names of bases, places (one or two) and classes, and config.json's model_type."""

    base: str
    places: tuple[str, ...]
    kind: str
    model: str | None


def forms(every: int = 1) -> Iterator[Form]:
    """Yield each `every`th form: all of one place, and as many of two that are drawn."""
    drawn = Random(51)
    names = list(bases())
    for i, (base, place, kind) in enumerate(product(names, PLACES, CLASSES)):
        model = drawn.choice(MODELS)
        other = (drawn.choice(names), tuple(drawn.sample(list(PLACES), 2)))
        if i % every == 0:
            yield Form(base, (place,), kind, model)
            yield Form(*other, kind, model)


def write(folder: Path, form: Form, files: dict[str, dict[str, Any]]) -> None:
    """Write a form's files in place of those in `folder`. files: by the names of `bases`."""
    found: Files = {"tokenizer_config.json": dict(CLASSES[form.kind])}
    for place in form.places:
        for name, fields in PLACES[place].items():
            found[name] = {**fields, **found.get(name, {})}
    found["tokenizer.json"] = files[form.base]
    found["config.json"] = {"model_type": form.model} if form.model else {}
    for old in folder.iterdir():
        old.unlink()
    for name, content in found.items():
        if content:
            (folder / name).write_text(json.dumps(content))


def difference(ours: Any, theirs: Any) -> str:
    """Return where a tokenizer is not transformers', "" where it is."""
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        if ours.encode(text) != ids:
            return f"{text!r} is {ours.encode(text)}, not {ids}"
        if ours.decode(ids) != theirs.decode(ids, clean_up_tokenization_spaces=False):
            return f"{ids} is {ours.decode(ids)!r}, not {theirs.decode(ids)!r}"
    for mine, other in ((ours.eod, theirs.eos_token_id), (ours.bos, theirs.bos_token_id)):
        special = {i for i, t in theirs.added_tokens_decoder.items() if t.special}
        if mine != other and not (other is None and mine in special):
            return f"eos, bos: {ours.eod}, {ours.bos}; {theirs.eos_token_id}, {theirs.bos_token_id}"
    begins = ours.bos is not None and theirs("")["input_ids"][:1] == [ours.bos]
    largest = max(theirs.get_vocab().values()) + 1
    if (ours.starts_with_bos, ours.vocab_size) != (begins, largest):
        return f"{ours.starts_with_bos}, {ours.vocab_size} are not {begins}, {largest}"
    return ""


def play(folder: Path, every: int = 1) -> tuple[Counter[str], Counter[str], list[str]]:
    """Return how many forms were right, refused and so on, how many are refused in which words
    that transformers reads, and a line for each wrong one.
    """
    import transformers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    transformers.logging.set_verbosity_error()
    files, counts, why, wrong = bases(), Counter[str](), Counter[str](), []
    for form in forms(every):
        write(folder, form, files)
        try:
            theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            theirs(TEXTS[0])
        except Exception:
            theirs = None
        try:
            ours = HuggingFaceTokenizer(str(folder))
        except ValueError as error:
            counts["refused by both" if theirs is None else "refused"] += 1
            assert "\n" not in str(error)
            if theirs is not None:
                why[re.sub(r"^.*/", "", str(error))] += 1
            continue
        if theirs is None:
            counts["read here alone"] += 1
        elif found := difference(ours, theirs):
            counts["wrong"] += 1
            wrong.append(f"{form}: {found}")
        else:
            counts["right"] += 1
    return counts, why, wrong


def main() -> int:
    """Play the forms and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=1)
    with tempfile.TemporaryDirectory() as folder:
        counts, why, wrong = play(Path(folder), parser.parse_args().every)
    print(f"{counts.total()} forms played: ", end="")
    print(", ".join(f"{counts[k]} {k}" for k in (*sorted({*counts} - {"wrong"}), "wrong")))
    print("\n".join([*(f"refused, {n}: {words}" for words, n in why.items()), *wrong[:30]]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
