"""A run's tokenizer in the form that transformers reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from latte.data.tokenizer import SEPARATOR, ByteTokenizer, SentencePieceTokenizer, Tokenizer
from latte.errors import UserError

_PROBES = (
    "The cat sat on the mat.",
    "  two  spaces \t\r\n\n and\u00a0\ufb01\uff21e\u0301\u200d\ufeff<s> end ",
    "né 😀 \u2581 <0x41> <unk> <|doc|> \x00",
    "def f(x):\n    return {x: [1, 2.5e-3]}\n",
)
"""Texts that both forms must encode alike: spaces, controls, accents, words of the vocabulary."""
_SPACE = "\u2581"

# How the vocabulary of transformers' byte-level models writes bytes: printable ones as themselves.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and its config; what the run itself needs is written too.

    Every text begins with the separator, as documents do in training. The characters of the
    separator in a text are text.

    Raises:
        UserError: it is a sentencepiece model that transformers would read otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, ByteTokenizer):
        model, separator = _bytes(), SEPARATOR
    elif isinstance(tokenizer, SentencePieceTokenizer):
        model, separator = _pieces(tokenizer)
    else:
        raise UserError(f"a {type(tokenizer).__name__} has no form in transformers")
    template = [{"SpecialToken": {"id": separator, "type_id": 0}}]
    special = {"id": separator, "ids": [tokenizer.separator], "tokens": [separator]}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(tokenizer.separator, separator)],
        **model,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*template, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                *template,
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {separator: special},
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": separator,
        "eos_token": separator,
        "pad_token": separator,
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    _write_json(folder / "tokenizer.json", whole)
    _write_json(folder / "tokenizer_config.json", config)
    tokenizer.save(folder)
    _compare(tokenizer, folder)


def _added(number: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def _bytes() -> dict[str, Any]:
    """The 256 bytes under their own numbers; nothing is merged."""
    letters = {byte: chr(byte) for byte in _PRINTABLE}
    others = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    vocabulary = {letters[byte]: byte for byte in range(256)}
    return {
        "normalizer": None,
        "pre_tokenizer": level,
        "decoder": level,
        "model": _bpe(vocabulary | {SEPARATOR: 256}, [], unknown=None, byte_fallback=False),
    }


def _pieces(tokenizer: SentencePieceTokenizer) -> tuple[dict[str, Any], str]:
    """A sentencepiece model of byte-pair encoding, and how its separator is written.

    Pieces hold plain spaces here, so that no text has to be rewritten before it is cut, and U+2581
    in a text stays what it is.
    """
    pieces = sentencepiece.SentencePieceProcessor()
    pieces.LoadFromSerializedProto(tokenizer.serialized)
    size, vocabulary, ranked = pieces.get_piece_size(), {}, []
    for i in range(size):
        piece = pieces.id_to_piece(i)
        plain = not (pieces.is_control(i) or pieces.is_unknown(i) or pieces.is_byte(i))
        text = piece.replace(_SPACE, " ") if plain else piece
        vocabulary[text] = i
        if plain:
            ranked.append((-pieces.get_score(i), i, text))
    separator = pieces.id_to_piece(tokenizer.separator) if tokenizer.separator < size else SEPARATOR
    vocabulary[separator] = tokenizer.separator
    unknown = pieces.id_to_piece(pieces.unk_id())
    model = _bpe(vocabulary, _merges(ranked), unknown=unknown, byte_fallback=True)
    parts = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    return {
        "normalizer": None,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": parts},
        "model": model,
    }, separator


def _merges(ranked: list[tuple[float, int, str]]) -> list[list[str]]:
    """Every way to make each piece of two, those of likelier pieces first."""
    known = {text for _, _, text in ranked}
    merges = []
    for _, _, text in sorted(ranked):
        splits = ([text[:at], text[at:]] for at in range(1, len(text)))
        merges += [pair for pair in splits if pair[0] in known and pair[1] in known]
    return merges


def _bpe(
    vocabulary: dict[str, int],
    merges: list[list[str]],
    *,
    unknown: str | None,
    byte_fallback: bool,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _compare(tokenizer: Tokenizer, folder: Path) -> None:
    """Refuses a form that reads or writes text otherwise than the run's tokenizer."""
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    for probe in _PROBES:
        own = [tokenizer.separator, *tokenizer.encode(probe).tolist()]
        same = other(probe)["input_ids"] == own
        decoded = other.decode(own, skip_special_tokens=True)
        if not same or decoded != tokenizer.decode(np.asarray(own)):
            raise UserError(
                "transformers would read this tokenizer otherwise than the run does (it is no "
                "sentencepiece model of byte-pair encoding with byte fallback and no "
                "normalisation): train with one of --data.tokenizer sentencepiece or bytes"
            )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
