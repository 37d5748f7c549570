"""Text to token ids and back: plain bytes, and sentencepiece."""

import hashlib
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece
from jaxtyping import Int32, Integer

from latte.errors import UserError

SEPARATOR = "<|doc|>"
"""How the separator is written; no text encodes to it, not even these characters."""

_SPACE = "\u2581"
"""What sentencepiece writes for a space inside its pieces."""
_BLOCK = 1 << 16
"""Characters encoded at a time: sentencepiece takes 45 bytes of memory for each."""
_SENTENCE = 1 << 12
"""Characters of a training sentence; newlines stay inside, to learn pieces such as ":\\n"."""
_SAMPLE = 64_000_000
"""Most characters that a tokenizer is trained on; sentencepiece holds them all in memory."""
_PROBE = "  two  spaces \t\r\n\n\0\u00a0\ufb01\uff21e\u0301\u200d\ufeff<s> end "
"""What a normalisation would change: spaces, controls, a ligature, a wide letter, accents."""


class Tokenizer(ABC):
    """Text to token ids and back.

    vocab_size: ids are in [0, vocab_size).
    separator: the id that begins every document; encoding yields it for no text.
    exact: decode(encode(text)) == text for every text.
    fingerprint: hex SHA-256 of all that decides how text is encoded.
    """

    vocab_size: int
    separator: int
    exact: bool
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> Int32[np.ndarray, " n"]:
        """The ids of a text, without a separator."""

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int] | Integer[np.ndarray, " n"]) -> bytes:
        """The bytes that ids stand for; separators stand for none."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes what `load` needs into a folder."""

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " n"]) -> str:
        """The text that ids stand for; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and the separator."""

    vocab_size = 257
    separator = 256
    exact = True
    fingerprint = hashlib.sha256(b"latte bytes 1").hexdigest()

    def encode(self, text: str) -> Int32[np.ndarray, " n"]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode_bytes(self, ids: Sequence[int] | Integer[np.ndarray, " n"]) -> bytes:
        return bytes(token for token in np.asarray(ids).tolist() if token != self.separator)

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.txt").write_text("bytes\n")


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model.

    It is exact if the model has byte fallback and normalises nothing, as those trained here do. The
    separator is the model's <s>, else its </s>, else one id more than the model has.

    serialized: the model itself, as sentencepiece stores it.
    """

    def __init__(self, model: bytes):
        """Takes a serialised model.

        Raises:
          UserError: `model` is not a sentencepiece model.
        """
        self.serialized = model
        self._pieces = sentencepiece.SentencePieceProcessor()
        try:
            self._pieces.LoadFromSerializedProto(model)
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"not a sentencepiece model ({error}): give the .model file that its trainer wrote"
            ) from error
        size = self._pieces.get_piece_size()
        known = [i for i in (self._pieces.bos_id(), self._pieces.eos_id()) if i >= 0]
        self.separator = known[0] if known else size
        self.vocab_size = max(size, self.separator + 1)
        self.fingerprint = hashlib.sha256(b"latte sentencepiece 1" + model).hexdigest()
        self._bytes_of = [_piece_bytes(self._pieces, i) for i in range(size)] + [b""]
        # How U+2581 itself is written, which sentencepiece would give back as a space.
        self._space_ids = [self._pieces.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        self.exact = all(map(self._pieces.is_byte, self._space_ids)) and (
            b"".join(map(self._bytes_of.__getitem__, self._pieces.encode(_PROBE)))
            == _PROBE.encode()
        )

    def encode(self, text: str) -> Int32[np.ndarray, " n"]:
        if not self.exact:
            return np.asarray(self._pieces.encode(text), np.int32)
        blocks = [np.empty(0, np.int32)]
        for block in _blocks(text, _BLOCK):
            ids: list[int] = []
            for i, part in enumerate(block.split(_SPACE)):
                if i:
                    ids += self._space_ids
                ids += self._pieces.encode(part)
            blocks.append(np.asarray(ids, np.int32))
        return np.concatenate(blocks)

    def decode_bytes(self, ids: Sequence[int] | Integer[np.ndarray, " n"]) -> bytes:
        numbers = np.asarray(ids).tolist()
        if self.exact:
            return b"".join([self._bytes_of[token] for token in numbers])
        return self._pieces.decode([token for token in numbers if token != self.separator]).encode()

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.model").write_bytes(self.serialized)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote into a folder.

    Raises:
      UserError: the folder holds no tokenizer.
    """
    if (folder / "tokenizer.model").exists():
        return SentencePieceTokenizer((folder / "tokenizer.model").read_bytes())
    if (folder / "tokenizer.txt").exists():
        return ByteTokenizer()
    raise UserError(f"{folder} holds no tokenizer: delete the folder and prepare the corpus again")


def train_sentencepiece(
    documents: Iterable[str], characters: int, vocab_size: int
) -> SentencePieceTokenizer:
    """Trains byte-pair encoding with byte fallback and no normalisation, deterministically.

    Args:
      documents: the texts to learn from.
      characters: about how many characters they have, from which it follows how they are sampled.
      vocab_size: pieces, the 256 bytes and the separator included.

    Raises:
      UserError: the text does not give so many pieces, or has more letters than that.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=_sentences(documents, 1 + characters // _SAMPLE),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=8 * _SENTENCE,  # in bytes; longer ones would be left out
            num_threads=2,
            unk_id=0,
            bos_id=1,
            bos_piece=SEPARATOR,
            eos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(_vocabulary_mend(str(error), vocab_size)) from error
    return SentencePieceTokenizer(model.getvalue())


def _vocabulary_mend(message: str, vocab_size: int) -> str:
    """Puts sentencepiece's complaint into words that name the setting."""
    start = f"cannot train a sentencepiece vocabulary of {vocab_size}"
    if most := re.search(r"too high .*value <= (\d+)", message):
        return f"{start}: the text gives {most[1]}; give --data.tokenizer_vocab {most[1]} or less"
    if least := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return f"{start}: the text's letters alone need {least[1]}; raise --data.tokenizer_vocab"
    return f"{start} ({message}): give another --data.tokenizer_vocab or --data.tokenizer bytes"


def _sentences(documents: Iterable[str], stride: int) -> Iterator[str]:
    """Every `stride`-th block of the documents."""
    blocks = (block for text in documents for block in _blocks(text, _SENTENCE))
    return (block for i, block in enumerate(blocks) if i % stride == 0)


def _blocks(text: str, size: int) -> Iterator[str]:
    """Cuts a text into at most `size` characters each, after a newline where there is one."""
    start = 0
    while len(text) - start > size:
        stop = text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def _piece_bytes(pieces: sentencepiece.SentencePieceProcessor, i: int) -> bytes:
    piece = pieces.id_to_piece(i)
    if pieces.is_byte(i):
        return bytes([int(piece[3:-1], 16)])  # "<0x1F>"
    if pieces.is_control(i) or pieces.is_unknown(i):
        return b""
    return piece.replace(_SPACE, " ").encode()
