# SPDX-License-Identifier: Apache-2.0
"""Small files of Hugging Face tokenizers, and where a tokenizer is not transformers'."""

import json
from typing import Any

NEW = "<|im_end|>"
CORPUS = ["the lowest newest widest hello world", "def f(x):\n    return x + 1 12345"] * 5
TEXTS = (
    *("hello world", " hello", "  two  spaces ", "", "\n\n\thello", "naïve e\u0301 №12 字🙂"),
    *(f"hello {NEW} world", f"{NEW}hello", f"low{NEW}", f"{NEW.upper()} {NEW} <|up|> <|UP|>"),
    *("the <|new|> the", "a </s> b</s>", "<s>a<unk>", "end<|endoftext|> of"),
    *("<pad><|img|>[PAD]", "est lowest ▁ it's"),
)


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
