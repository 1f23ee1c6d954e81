"""Construction of a fast tokenizer from the vocabulary in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from llmsched.engine.errors import ModelError
from llmsched.engine.model.gguf_file import GGUFFile

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{suffix}}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{suffix}}",
)
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Rules for splitting a text into words, before BPE splits the words into tokens."""

    pattern: str | None = None  # splits the text; None is GPT-2's pattern
    first: tuple[str, ...] = ()  # patterns that split the text before `pattern`, one after the other
    digits: bool = False  # splits off every digit before the pattern applies
    nfc: bool = False  # normalises the text to Unicode NFC first of all
    ignore_merges: bool = False  # a word in the vocabulary becomes one token without merges
    add_bos: bool = False  # default for adding BOS


_QWEN2 = PreTokenizer(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}", nfc=True)
_LLAMA3 = PreTokenizer(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}", ignore_merges=True, add_bos=True)
_TEKKEN = PreTokenizer(
    "|".join((*(part.replace("{suffix}", "") for part in _CASED), r"\p{N}", _CASED_TAIL)),
    ignore_merges=True,
    add_bos=True,
)
_GPT4O = PreTokenizer(
    "|".join((*(part.replace("{suffix}", f"{_CONTRACTIONS}?") for part in _CASED), r"\p{N}{1,3}", _CASED_TAIL))
)
_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATION = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK = PreTokenizer(r"\p{N}+", (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", _PUNCTUATION, r"\s+$", _CJK))
_DEEPSEEK_CODER = PreTokenizer(r"\p{N}", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK))
_DEEPSEEK_V3 = PreTokenizer(
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    (r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u30ff]+"),
)

#: Rules for each value of tokenizer.ggml.pre.
SPLITS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(),
    "olmo": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "starcoder": PreTokenizer(digits=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "dbrx": PreTokenizer(_LLAMA3.pattern),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}

#: Qwen's added tokens that are text. Converters mark some of them as control tokens, which decoding would drop.
_QWEN_TEXT_TOKENS = frozenset(
    {
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    }
)
_SPACE = "\u2581"


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """Build a GGUF file's tokenizer with its chat template. Raises ModelError for an unsupported kind of tokenizer."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        backend, add_bos = _byte_level(file)
    elif model == "llama":
        backend, add_bos = _sentencepiece(file)
    else:
        raise ModelError(
            f"{file.path}: tokenizer {model!r} is not supported; supported: gpt2 (BPE), llama (SentencePiece)"
        )
    qwen = SPLITS.get(str(file.metadata.get("tokenizer.ggml.pre"))) is _QWEN2
    added = []  # control tokens are special; user-defined tokens are text that always becomes one token
    for token, kind in zip(_tokens(file), file.metadata["tokenizer.ggml.token_type"], strict=True):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN):
            special = kind != TokenType.USER_DEFINED and not (qwen and token in _QWEN_TEXT_TOKENS)
            added.append(AddedToken(token, special=special, normalized=False))
    backend.add_tokens(added)
    _surround(file, backend, add_bos)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{role}_token": _token(file, f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{role: token for role, token in named.items() if token is not None},
    )
    fast.chat_template = file.metadata.get("tokenizer.chat_template")
    return fast


def _byte_level(file: GGUFFile) -> tuple[Tokenizer, bool]:
    name = file.metadata.get("tokenizer.ggml.pre")
    split = SPLITS.get(str(name))
    if split is None:
        raise ModelError(
            f"{file.path}: pre-tokenizer {name!r} is not supported; supported: {', '.join(SPLITS)}; "
            "use the model's Hugging Face directory"
        )
    vocabulary = {token: index for index, token in enumerate(_tokens(file))}
    # a merge is written as two tokens with a space between them; byte-level tokens contain no space
    pairs = (pair.partition(" ") for pair in file.metadata.get("tokenizer.ggml.merges", ()))
    merges = [(left, right) for left, _, right in pairs]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    patterns = (*split.first, split.pattern)
    steps += [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns if each is not None]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece(file: GGUFFile) -> tuple[Tokenizer, bool]:
    """Return a SentencePiece BPE tokenizer, and True because the tokenizer adds BOS by default."""
    tokens, scores = _tokens(file), file.metadata["tokenizer.ggml.scores"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _merges_by_score(tokens, scores, file.metadata["tokenizer.ggml.token_type"], vocabulary)
    unknown = _token(file, "tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges_by_score(
    tokens: list[str], scores: list[float], types: list[int], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return the pairs of tokens whose concatenation is a token, by descending score of the concatenation."""
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED)
    found: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind not in mergeable:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _surround(file: GGUFFile, backend: Tokenizer, add_bos: bool) -> None:
    """Make the tokenizer add BOS and EOS if the file's metadata asks for it."""
    template = "$A"
    specials: list[tuple[str, int]] = []
    for role, default, form in (("bos", add_bos, "{0} $A"), ("eos", False, "$A {0}")):
        if not file.metadata.get(f"tokenizer.ggml.add_{role}_token", default):
            continue
        token_id = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            token = _tokens(file)[token_id]
            template = template.replace("$A", form.format(token))
            specials.append((token, token_id))
    if specials:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)


def _tokens(file: GGUFFile) -> list[str]:
    tokens: list[str] | None = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{file.path}: has no vocabulary (tokenizer.ggml.tokens)")
    return tokens


def _token(file: GGUFFile, key: str) -> str | None:
    token_id = file.metadata.get(key)
    return None if token_id is None else _tokens(file)[token_id]
