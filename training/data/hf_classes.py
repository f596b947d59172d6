# SPDX-License-Identifier: Apache-2.0
"""Build the tokenizer that transformers.AutoTokenizer (version 5) builds, without transformers.

Two things besides tokenizer.json determine its ids. The class that tokenizer_config.json names
(or config.json, by its model_type) may normalize and cut texts in its own way, whatever
tokenizer.json specifies. And tokens that only tokenizer_config.json, special_tokens_map.json or
added_tokens.json has are added, in the order of transformers' TokenizersBackend, which determines
their ids.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.data.token_texts import SPACE

NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # transformers' order
NAMED_TOKENS = tuple(f"{name}_token" for name in NAMED)
EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
DECODER = "added_tokens_decoder"
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Pipeline = tuple[Any, Any, Any]  # normalizer, pre-tokenizer, decoder


def _byte_level(config: Mapping[str, Any], normalizer: Any = None, first: Any = None) -> Pipeline:
    """Return GPT-2's byte-level pipeline. first: a pre-tokenizer before it; a Split replaces its
    own cuts.
    """
    from tokenizers import decoders, pre_tokenizers

    space, cuts = bool(config.get("add_prefix_space")), isinstance(first, pre_tokenizers.Split)
    last = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=not cuts)
    cut = last if first is None else pre_tokenizers.Sequence([first, last])
    return normalizer, cut, decoders.ByteLevel()


def _composed(config: Mapping[str, Any], first: Any = None) -> Pipeline:
    from tokenizers import normalizers

    return _byte_level(config, normalizers.NFC(), first)


def _qwen(config: Mapping[str, Any], pattern: str = QWEN) -> Pipeline:
    from tokenizers import Regex, pre_tokenizers

    return _composed(config, pre_tokenizers.Split(Regex(pattern), "isolated"))


def _cohere(config: Mapping[str, Any]) -> Pipeline:
    from tokenizers import pre_tokenizers

    return _composed(config, pre_tokenizers.Digits(individual_digits=True))


def _llama(config: Mapping[str, Any]) -> Pipeline:
    from tokenizers import decoders, pre_tokenizers

    space = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if space else "never"
    decoder = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder += [decoders.Strip(" ", 1, 0)] * space
    cut = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    return None, cut, decoders.Sequence(decoder)


def _code_llama(config: Mapping[str, Any]) -> Pipeline:
    from tokenizers import decoders

    normalizer, cut, decoder = _llama({**config, "legacy": False})
    space = config.get("add_prefix_space") is not False
    strip = [] if space else [decoders.Strip(" ", 1, 0)]
    return normalizer, cut, decoders.Sequence([decoder, *strip])


def _gemma(config: Mapping[str, Any]) -> Pipeline:
    from tokenizers import decoders, normalizers, pre_tokenizers

    decoder = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    cut = pre_tokenizers.Split(" ", "merged_with_previous")
    return normalizers.Replace(" ", SPACE), cut, decoders.Sequence(decoder)


@dataclass(frozen=True)
class Built:
    """A class of transformers that builds its own BPE around a vocabulary and merges."""

    pipeline: Callable[[Mapping[str, Any]], Pipeline]
    tokens: Mapping[str, str | None]  # tokens that tokenizer_config.json may leave out
    byte_fallback: bool = False  # and fused unknown pieces, as in SentencePiece
    unk: bool = False  # unknown text becomes unk_token; else it is dropped
    starts: str | None = None  # first token of its own post-processor
    again: str | None = None  # adds its special tokens again, as "added" or as "special" ones


END = "<|endoftext|>"
GPT2 = {"bos_token": END, "eos_token": END, "unk_token": END, "pad_token": None}
QWEN2 = {"bos_token": None, "eos_token": END, "unk_token": END, "pad_token": END}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BERT = {"sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>", "mask_token": "<mask>"}
INFILL = {f"{w}_token": f"{SPACE}<{w[:3].upper()}>" for w in "prefix middle suffix".split()}
INFILL |= {"eot_token": f"{SPACE}<EOT>", "fill_token": "<FILL_ME>"}
GEMMA = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")}
COHERE = {f"{name}_token": f"<{name.upper()}>" for name in ("unk", "pad", "cls", "sep")}
COHERE |= {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"}
COHERE |= {"mask_token": "<MASK_TOKEN>"}
BUILT = {
    "LlamaTokenizer": Built(_llama, LLAMA, byte_fallback=True),
    "CodeLlamaTokenizer": Built(
        _code_llama, LLAMA | INFILL, byte_fallback=True, unk=True, starts="bos_token"
    ),
    "GemmaTokenizer": Built(_gemma, GEMMA, byte_fallback=True, unk=True),
    "GPT2Tokenizer": Built(_byte_level, GPT2),
    "CodeGenTokenizer": Built(_byte_level, GPT2),
    "GPTNeoXTokenizer": Built(_composed, {**GPT2, "pad_token": "<|padding|>"}, starts=""),
    "Qwen2Tokenizer": Built(_qwen, QWEN2, again="added"),
    "Qwen3_5Tokenizer": Built(lambda config: _qwen(config, QWEN3_5), QWEN2),
    "CohereTokenizer": Built(_cohere, COHERE, again="special"),
    "RobertaTokenizer": Built(_byte_level, LLAMA | BERT, starts="cls_token"),
}
# classes of transformers that read tokenizer.json in ways of their own, or not at all
OTHERS = """Albert Bart Barthez Bartpho Bert BertGeneration BertJapanese Bertweet BigBird BioGpt
    Blenderbot BlenderbotSmall ByT5 CLIP CTRL Camembert Canine Clvp ConvBert CpmAnt Cpm DPRReader
    DPRContextEncoder DPRQuestionEncoder Deberta DebertaV2 Dia DistilBert Esm Esmc FNet FSMT
    Flaubert Funnel GPTNeoXJapanese GPTSw3 Herbert LED Lasr LayoutLMv2 LayoutLMv3 LayoutXLM
    Luke Lxmert M2M100 MBart MBart50 MLuke MPNet Marian MarkupLM Mgpstr
    MobileBert Mvp MyT5 Nllb Nougat OpenAIGPT PLBart Pegasus Perceiver Phobert Pop2Piano ProphetNet
    Rag Reformer RemBert RoCBert RoFormer SeamlessM4T Siglip Siglip2 Speech2Text SpeechT5 Splinter
    SqueezeBert T5 Tapas Tipsv2 Udop VideoPrism Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper
    XGLM XLM XLMRoberta XLNet""".split()
PLAIN = ("PreTrainedTokenizer", "TokenizersBackend", "BloomTokenizer", "ParakeetTokenizer")
_KINDS = {
    "GPT2": """blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip
        instructblipvideo jais2 opt phi starcoder2""",
    "GPTNeoX": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "Gemma": """diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text
        recurrent_gemma shieldgemma2 t5gemma zaya""",
    "Qwen2": """audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl
        lighton_ocr moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl
        qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe
        qwen3_vl qwen3_vl_moe vibevoice""",
    "Qwen3_5": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "Cohere": "aya_vision cohere cohere2",
    "CodeLlama": "code_llama",
    "Roberta": """bart bridgetower clap data2vec-text ibert lilt longformer mega mra roberta
        roberta-prelayernorm""",
    "Bert": """align bark blip bros chinese_clip convbert distilbert electra ernie flava git
        grounding-dino layoutlm megatron-bert mm-grounding-dino nezha nomic_bert qdqbert realm
        retribert squeezebert tvp vilt visual_bert""",
    "T5": "mt5 musicgen musicgen_melody switch_transformers",
    "XLMRoberta": "gte jina_embeddings_v3 metaclip_2 trocr xmod",
    "Albert": "yoso",
    "Bart": "florence2",
    "CLIP": "aimv2 clipseg groupvit omdet-turbo oneformer owlv2 owlvit sam3 sam3_video xclip",
    "DPRQuestionEncoder": "dpr",
    "Esmc": "esmfold2",
    "Lasr": "lasr_ctc lasr_encoder",
    "Llama": "idefics idefics2",
    "Nllb": "nllb-moe",
    "Nougat": "pp_formulanet",
    "Parakeet": """granite_speech5_ctc nemotron3_5_asr nemotron_asr_streaming omniasr_ctc
        parakeet_ctc parakeet_rnnt parakeet_tdt""",
    "SeamlessM4T": "seamless_m4t_v2",
    "Speech2Text": "speech_to_text",
    "Wav2Vec2CTC": """data2vec-audio hubert unispeech unispeech-sat wav2vec2 wav2vec2-bert
        wav2vec2-conformer""",
    "Wav2Vec2PhonemeCTC": "wav2vec2_phoneme",
    "": """EvollaModel arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr
        ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe
        glm_image glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite granitemoe
        granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm internlm2
        internlm3 iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash
        minicpm3 minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3
        mistral mistral3 mistral_large4 mixtral modernbert modernbert-decoder molmo molmo2
        nemo_speechlm nemotron nvfp4 nystromformer olmo2 olmo3 olmo_hybrid omniasr opencua
        openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral pocket_tts
        smolvlm stablelm step3_vl umt5 vipllava voxtral voxtral_realtime xlm-roberta-xl""",
}
# the class that transformers has for a model_type, "" for a tokenizer.json as it is
MODEL_TYPES = {name.lower(): name for name in OTHERS}
MODEL_TYPES |= {kind: name for name, kinds in _KINDS.items() for kind in kinds.split()}
FORCED = """qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp hyperclovax_vision_v2
    siglip2""".split()  # even if the tokenizer names another class


def class_of(
    config: Mapping[str, Any], model: Mapping[str, Any], byte_level: bool, where: str
) -> str:
    """Return the class that transformers.AutoTokenizer uses, "" for a tokenizer.json as it is.

    config, model: tokenizer_config.json and config.json. byte_level: whether "ByteLevel" is in
    tokenizer.json. Raises ValueError, which begins with `where`, for a class of OTHERS, for code
    that comes with the tokenizer, and for files that replace tokenizer.json.
    """
    stated = config.get("tokenizer_class") or model.get("tokenizer_class") or ""
    kind, name = model.get("model_type"), str(stated).removesuffix("Fast")
    own = None
    if isinstance(kind, str):  # "deberta-v2" is DebertaV2
        own = MODEL_TYPES.get(kind, MODEL_TYPES.get(re.sub("[-_]", "", kind)))
    usual = f"{own}Tokenizer" if own else own
    code = config.get("auto_map")
    code = code.get("AutoTokenizer") if isinstance(code, dict) else code
    known = name in BUILT or name in PLAIN or name.removesuffix("Tokenizer") in OTHERS
    if code and not known and usual is None:
        raise ValueError(
            f"{where}: auto_map {code} is code that comes with the tokenizer, which is never run; "
            "remove auto_map and set tokenizer_class to PreTrainedTokenizerFast to use "
            "tokenizer.json unchanged, in transformers too"
        )
    versions = config.get("fast_tokenizer_files")
    if versions and versions != ["tokenizer.json"]:
        raise ValueError(
            f"{where}: fast_tokenizer_files {versions} lists other files for some versions of "
            "transformers, and only tokenizer.json is read here"
        )
    if not code and name == "LlamaTokenizer" and byte_level and kind not in FORCED:
        name = ""
    elif not code and name and usual is not None and name != usual:
        name = usual if usual == "" or kind in FORCED else name
    elif not name:
        name = usual or ""
    if name.removesuffix("Tokenizer") in OTHERS:
        raise ValueError(
            f"{where}: tokenizer_class {name} makes transformers replace rules of tokenizer.json, "
            f"which is not available here; {_as_it_is(kind)}"
        )
    return name if name in BUILT else ""


def _as_it_is(kind: Any) -> str:
    """Return advice on reading tokenizer.json without a class's rules; kind: the model_type."""
    apart = f", in a folder without this config.json (model_type {kind})," if kind in FORCED else ""
    return (
        f"set it to PreTrainedTokenizerFast{apart} to use tokenizer.json unchanged, in "
        "transformers too"
    )


def built(
    raw: Any, name: str, config: Mapping[str, Any], unk: Any, where: str, kind: Any = None
) -> Any:
    """Return the tokenizers.Tokenizer that a class builds on a file's vocabulary, without added
    tokens.

    raw: the file's tokenizer, whose model is reused. unk: the files' unk_token, "" for the class's.
    kind: the model_type. Raises ValueError, which begins with `where`.
    """
    from tokenizers import Tokenizer, models

    about, bpe = BUILT[name], raw.model
    if not isinstance(bpe, models.BPE) or bpe.continuing_subword_prefix or bpe.end_of_word_suffix:
        other = type(bpe).__name__
        more = " with a prefix or suffix inside words" if isinstance(bpe, models.BPE) else ""
        raise ValueError(
            f"{where}: tokenizer_class {name} needs a plain BPE, and tokenizer.json is a {other}"
            f"{more}; {_as_it_is(kind)}"
        )
    options: dict[str, Any] = {"byte_fallback": about.byte_fallback, "ignore_merges": False}
    if not _has_bytes(bpe, about.byte_fallback):  # some text is unknown
        unk = content(about.tokens["unk_token"] if unk == "" else unk) if about.unk else None
        options |= {"fuse_unk": about.byte_fallback, "unk_token": unk}
    elif not about.byte_fallback:
        del options["byte_fallback"]
    for key, value in {**options, "dropout": None}.items():
        setattr(bpe, key, value)
    made = Tokenizer(bpe)
    normalizer, made.pre_tokenizer, made.decoder = about.pipeline(config)
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def _has_bytes(model: Any, byte_fallback: bool) -> bool:
    """Return whether a BPE has a piece for each byte, so that no text is unknown to it."""
    from tokenizers import pre_tokenizers

    letters: Sequence[str] = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = letters if byte_fallback else pre_tokenizers.ByteLevel.alphabet()
    return all(model.token_to_id(letter) is not None for letter in letters)


UNKNOWN = ("unk_token", "fuse_unk")
OPTIONS = (*UNKNOWN, "byte_fallback", "ignore_merges", "continuing_subword_prefix",
           "end_of_word_suffix", "max_input_chars_per_word")  # fmt: skip


def cuts(model: Any) -> dict[str, Any]:
    """Return the settings of a tokenizers.Tokenizer that determine ids, besides the vocabulary.

    The result does not depend on how files spell them: settings that are off, or only affect
    offsets, are left out. The merges are not part of it either.
    """
    options = {key: getattr(model.model, key, None) for key in OPTIONS}
    parts = {part: getattr(model, part) for part in ("normalizer", "pre_tokenizer")}
    states = {k: json.loads(v.__getstate__()) for k, v in parts.items() if v is not None}
    fallback = bool(options["byte_fallback"])
    if (fallback or "ByteLevel" in str(states)) and _has_bytes(model.model, fallback):
        options |= dict.fromkeys(UNKNOWN)
    tokens, split = model.get_added_tokens_decoder(), model.encode_special_tokens
    flags = FLAGS if split else FLAGS[:-1]  # that determine matches in a text
    added = [[i, *(getattr(tokens[i], flag) for flag in flags)] for i in sorted(tokens)]
    found: dict[str, Any] = stated({**options, **states, "split_special_tokens": split})
    return {**found, "added_tokens": added}


def stated(value: Any) -> Any:
    """Return a JSON value without fields that are off or only affect offsets."""
    if isinstance(value, dict):
        fields = value.items()
        return {k: stated(v) for k, v in fields if v not in ("", None) and v is not False
                and k != "trim_offsets"}  # fmt: skip
    return [stated(v) for v in value] if isinstance(value, list) else value


def content(token: Any) -> str | None:
    """Return the text of a token: itself, an AddedToken's, or an object's content."""
    token = token.get("content") if isinstance(token, dict) else token
    return None if token is None else str(getattr(token, "content", token))


def token_of(value: Any, where: str, **more: bool) -> Any:
    """Return a token as transformers holds it, a str or an AddedToken. Raises ValueError."""
    from tokenizers import AddedToken

    if isinstance(value, dict):
        flags = {key: value.get(key) for key in FLAGS if key in value} | more
        text = flags.pop("content", None)
        if isinstance(text, str) and all(isinstance(flag, bool) for flag in flags.values()):
            return AddedToken(text, **flags)
    elif isinstance(value, str | AddedToken):
        return value
    raise ValueError(
        f'{where} is neither the text of a token nor {{"content": text}}, with true or false for '
        + ", ".join(FLAGS[1:])
    )


@dataclass(frozen=True)
class Notes:
    """The contents of the files next to tokenizer.json, {} for a missing one.

    paths: those of tokenizer_config.json, special_tokens_map.json and added_tokens.json.
    """

    config: Mapping[str, Any]  # tokenizer_config.json
    special: Mapping[str, Any]  # special_tokens_map.json
    added: Mapping[str, Any]  # added_tokens.json: {text: id}
    known: Sequence[Mapping[str, Any]]  # tokenizer.json's own, each with its id
    padding: Mapping[str, Any] | None  # tokenizer.json's
    paths: tuple[str, str, str]

    def tokens(self) -> tuple[dict[str, Any], list[Any], list[Any]]:
        """Return the tokens by their names, the special ones without a name, and those with an id.

        Each is a str or an AddedToken; one with a name is None if the file has null, and those with
        an id are sorted by it. The steps and their order are transformers': DECODER in
        tokenizer_config.json replaces the two older files and tokenizer.json's own tokens, and
        special_tokens_map.json has priority over tokenizer_config.json. Raises ValueError.
        """
        path = self.paths[0]
        init: dict[str, Any] = {}
        for key, value in self.config.items():
            if _is(key, value):
                init[key] = self.config.get(key)
        if not init.get(EXTRA) and ADDITIONAL in init:
            init[EXTRA] = init.pop(ADDITIONAL)
        own = [k for k, value in init.items() if k not in MEMBERS and isinstance(value, str)]
        by_name = {key: init.pop(key) for key in own}
        listed = self.config.get(DECODER)
        found = self._older(init, by_name) if listed is None else self._with_id(listed)
        if isinstance(names := init.get(EXTRA), dict):
            by_name |= names
            del init[EXTRA]
        extra = init.pop(EXTRA) if EXTRA in init else init.get(ADDITIONAL)
        init.pop(ADDITIONAL, None)
        if not isinstance(extra, list | None):
            raise ValueError(f"{path}: {EXTRA} is neither a list nor an object of tokens")
        by_text = {token.content: token for _, token in found}
        added = [token for _, token in sorted(dict(found).items())]
        tokens = dict.fromkeys(key for key in NAMED_TOKENS if key in init) | init | by_name
        for key, value in tokens.items():
            token = None if value is None else token_of(value, f"{path}: {key}")
            same = key in NAMED_TOKENS and by_text.get(content(token) or "")
            tokens[key] = same or token
        return tokens, [token_of(token, f"{path}: {EXTRA}") for token in extra or ()], added

    def _with_id(self, listed: Any) -> list[tuple[int, Any]]:
        """Return the ids and AddedTokens of DECODER."""
        where = f"{self.paths[0]}: {DECODER}"
        if not isinstance(listed, dict) or not all(key.isdecimal() for key in listed):
            raise ValueError(f"{where} is not an object of tokens by their ids")
        if wrong := [key for key in listed if not isinstance(listed.get(key), dict)]:
            raise ValueError(f'{where}: {wrong[0]} is not an object with the "content" of a token')
        return [(int(key), token_of(listed[key], f"{where}: {key}")) for key in listed]

    def _older(self, init: dict[str, Any], by_name: dict[str, Any]) -> list[tuple[int, Any]]:
        """Merge special_tokens_map.json into `init` and `by_name`, and return the ids and
        AddedTokens of added_tokens.json and tokenizer.json. The last one with an id counts.
        """
        from tokenizers import AddedToken

        _, special, added = self.paths
        for key in self.special:
            value, where = self.special.get(key), f"{special}: {key}"
            if isinstance(value, list):
                value = [_special(token, where) for token in value]
            if key == EXTRA and isinstance(value, list):
                if isinstance(init.get(EXTRA), dict):
                    by_name |= init.pop(EXTRA)
                before = init.get(EXTRA) or []
                init[EXTRA] = [*before, *(token for token in value if token not in before)]
            elif _is(key, value):
                init[key] = value if key == EXTRA else _special(value, where)
        lists = init.get(EXTRA) if isinstance(init.get(EXTRA), list) else ()
        names = [*(init.get(key) for key in NAMED_TOKENS), *(lists or ())]
        texts = {content(token) for token in names if not isinstance(token, dict)}
        found: list[tuple[int, Any]] = []
        for text in self.added:
            index = self.added.get(text)
            if not isinstance(index, int):
                raise ValueError(f"{added}: {text!r} has the id {index!r}, which is not a number")
            known = text in texts
            found.append((index, AddedToken(text, normalized=not known, special=known)))
        return found + [(one["id"], token_of(dict(one), "tokenizer.json")) for one in self.known]


MEMBERS = (*NAMED_TOKENS, EXTRA, ADDITIONAL)


def _is(key: str, value: Any) -> bool:
    """Return whether a field of tokenizer_config.json is about special tokens."""
    return key in MEMBERS or key.endswith("_token") and isinstance(value, (str, dict))


def _special(value: Any, where: str) -> Any:
    """Return a token of special_tokens_map.json."""
    return token_of(value, where, special=True) if isinstance(value, dict) else value


def add_tokens(made: Any, name: str, notes: Notes) -> dict[str, str]:
    """Add the tokens of all files to a tokenizers.Tokenizer; return {name: text} of named ones.

    name: its class. The library gives a new token the next id, whatever id a file has for it, so
    tokens are added in the order of transformers.
    """
    from tokenizers import AddedToken

    about = BUILT.get(name)
    tokens, extra, added = notes.tokens()
    tokens = (dict(about.tokens) if about else {}) | tokens
    if notes.padding:
        tokens.setdefault("pad_token", notes.padding["pad_token"])
    order = dict.fromkeys((*NAMED_TOKENS, *tokens))
    named = {key: tokens[key] for key in order if tokens.get(key) is not None}
    there = {token.content for token in [*added, *made.get_added_tokens_decoder().values()]}
    for token in [*named.values(), *extra]:
        if content(token) not in there and token not in added:
            added.append(token)
    texts = {content(token) for token in named.values()}
    for i, token in enumerate(added):
        if isinstance(token, str):
            added[i] = AddedToken(token, special=True)
        elif content(token) in texts:
            token.special = True
    made.add_tokens(added)
    if about and about.again:
        once = [t if isinstance(t, AddedToken) else AddedToken(t, special=True, normalized=False)
                for t in [*named.values(), *extra]]  # fmt: skip
        if about.again == "special":
            made.add_special_tokens(once)
        else:
            made.add_tokens([AddedToken(content(t), special=True) for t in once])
    made.encode_special_tokens = bool(notes.config.get("split_special_tokens"))
    return {key: content(token) or "" for key, token in named.items()}
