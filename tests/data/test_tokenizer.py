"""Tokenizers: nothing is lost, nothing is left to chance."""

import io
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from latte.data.tokenizer import (
    SEPARATOR,
    ByteTokenizer,
    HubTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    open_tokenizer,
    train_sentencepiece,
)
from latte.errors import UserError

TEXT = Path(string.__file__).read_text() * 2
TRAINED = train_sentencepiece([TEXT], len(TEXT), 400)


def train_like_gpt2() -> bytes:
    """A tokenizer.json of byte-level pairs, as GPT-2's is."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    return made.to_str().encode()


LIKE_GPT2 = HubTokenizer(train_like_gpt2())
UNIGRAM = train_sentencepiece([TEXT], len(TEXT), 400, "unigram")
ALL = pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), TRAINED, UNIGRAM, LIKE_GPT2],
    ids=["bytes", "sentencepiece", "unigram", "hub"],
)
BOTH = pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), TRAINED, UNIGRAM], ids=["bytes", "sentencepiece", "unigram"]
)


@ALL
@given(text=st.text() | st.text(" \n\t\r\0a\u2581é😀"))
@example("  a\n\n\tb  \r\n")
@example(" \u2581 \u2581\u2581")
@example(f"<s>{SEPARATOR}<0x41><unk><|endoftext|>")
@example("a\0b\ufeff\u2047")
@example("x" * 70_000 + "\n y\u2581" * 20_000)
@settings(max_examples=200, deadline=None)
def test_decoding_gives_back_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.exact
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.separator not in ids
    assert all((ids >= 0) & (ids < tokenizer.vocab_size))


@BOTH
def test_tokens_may_be_cut_anywhere(tokenizer):
    text = "é\u2581 def f():\n\treturn '😀'\n"
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        parts = tokenizer.decode_bytes(ids[:cut]), tokenizer.decode_bytes(ids[cut:])
        assert b"".join(parts) == text.encode()


@ALL
def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    np.testing.assert_array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))


@ALL
def test_separator_stands_for_no_bytes(tokenizer):
    ids = [tokenizer.separator, *tokenizer.encode("a b").tolist(), tokenizer.separator]
    assert tokenizer.decode(ids) == "a b"


def test_trained_has_the_size_that_was_asked_for_and_is_shorter_than_bytes():
    assert TRAINED.vocab_size == 400
    assert len(TRAINED.encode(TEXT)) < len(TEXT) / 1.5


def test_training_gives_the_same_model_in_another_process():
    program = (
        "import string, pathlib; from latte.data.tokenizer import train_sentencepiece as train;"
        "text = pathlib.Path(string.__file__).read_text() * 2;"
        "print(train([text], len(text), 400).fingerprint)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == TRAINED.fingerprint
    assert printed.stderr == ""


def test_a_model_with_other_settings_is_read_as_its_author_meant():

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=model, vocab_size=300, minloglevel=2
    )
    tokenizer = SentencePieceTokenizer(model.getvalue())
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = tokenizer.encode("import the string")
    assert not tokenizer.exact
    assert ids.tolist() == theirs.encode("import the string")
    assert tokenizer.decode([tokenizer.separator, *ids.tolist()]) == "import the string"


def test_what_cannot_be_trained_or_read_says_how_to_mend_it():
    with pytest.raises(UserError, match=r"--data.tokenizer_vocab \d+ or less"):
        train_sentencepiece(["a b c"], 5, 4096)
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + 2000)))
    with pytest.raises(UserError, match=r"need \d+; raise --data.tokenizer_vocab"):
        train_sentencepiece([letters], 2000, 1000)
    with pytest.raises(UserError, match="not a sentencepiece model"):
        SentencePieceTokenizer(b"nonsense")


def test_a_tokenizer_is_opened_by_its_file_or_folder(tmp_path):
    (tmp_path / "mine.json").write_bytes(LIKE_GPT2.files()["tokenizer.json"])
    (tmp_path / "mine.model").write_bytes(TRAINED.files()["tokenizer.model"])
    (tmp_path / "folder").mkdir()
    LIKE_GPT2.save(tmp_path / "folder")
    for name, tokenizer in (
        ("mine.json", LIKE_GPT2),
        ("mine.model", TRAINED),
        ("folder", LIKE_GPT2),
    ):
        assert open_tokenizer(str(tmp_path / name)).fingerprint == tokenizer.fingerprint
    assert LIKE_GPT2.separator == 0
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a tokenizer\.json"):
        open_tokenizer(str(tmp_path / "bad.json"))
    with pytest.raises(UserError, match="no tokenizer 'gpt3': give bytes, sentencepiece"):
        open_tokenizer("gpt3")
