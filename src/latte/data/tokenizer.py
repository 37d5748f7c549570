"""Text to token ids and back: plain bytes, sentencepiece, and what the Hugging Face hub has."""

import hashlib
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import sentencepiece
from jaxtyping import Int32, Integer

from latte.errors import UserError

SEPARATOR = "<|doc|>"
"""How the separator is written; no text encodes to it, not even these characters."""

_SEPARATORS = ("<|endoftext|>", "<bos>", "<s>", "<|begin_of_text|>", "</s>", "<eos>")
"""What tokenizers of the hub call the token between documents."""
_SPACE = "\u2581"
"""What sentencepiece writes for a space inside its pieces."""
_BLOCK = 1 << 16
"""Characters encoded at a time: sentencepiece takes 45 bytes of memory for each."""
_SENTENCE = 1 << 12
"""Characters of a training sentence; newlines stay inside, to learn pieces such as ":\\n"."""
SAMPLE = 64_000_000
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
    def files(self) -> dict[str, bytes]:
        """The files, by name, from which `read_tokenizer` makes it again."""

    def save(self, folder: Path) -> None:
        """Writes its files into a folder."""
        for name, content in self.files().items():
            (folder / name).write_bytes(content)

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

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.txt": b"bytes\n"}


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

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.model": self.serialized}


class HubTokenizer(Tokenizer):
    """A tokenizer.json of the Hugging Face hub, such as GPT-2's or Gemma's.

    The separator is the first that it has of `_SEPARATORS`, else one id more than it has.
    """

    def __init__(self, definition: bytes):
        """Takes the content of a tokenizer.json.

        Raises:
          UserError: it is none, or the package that reads it is missing.
        """
        try:
            import tokenizers
        except ImportError as error:
            raise UserError(
                "this tokenizer needs a package: pip install 'latte-lm[prepare]'"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition.decode())
        except Exception as error:  # The library raises no class of its own.
            raise UserError(
                f"not a tokenizer.json ({error}): give the file that the hub has"
            ) from error
        # Names of special tokens in a text are text, and no row is cut or padded.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._definition = definition
        size = self._tokenizer.get_vocab_size()
        known = map(self._tokenizer.token_to_id, _SEPARATORS)
        self.separator = next((token for token in known if token is not None), size)
        self.vocab_size = max(size, self.separator + 1)
        self.fingerprint = hashlib.sha256(b"latte hub 1" + definition).hexdigest()
        self.exact = self.decode_bytes(self.encode(_PROBE)) == _PROBE.encode()

    def encode(self, text: str) -> Int32[np.ndarray, " n"]:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode_bytes(self, ids: Sequence[int] | Integer[np.ndarray, " n"]) -> bytes:
        numbers = [token for token in np.asarray(ids).tolist() if token != self.separator]
        return self._tokenizer.decode(numbers, skip_special_tokens=False).encode()

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self._definition}


_KINDS = {
    "tokenizer.model": SentencePieceTokenizer,
    "tokenizer.txt": lambda content: ByteTokenizer(),
    "tokenizer.json": HubTokenizer,
}
"""What makes a tokenizer of the content of each file; exported folders have a tokenizer.json too,
which is transformers' form of the other."""


def read_tokenizer(read: Callable[[str], bytes | None], where: object) -> Tokenizer:
    """The tokenizer whose file is in a place.

    Args:
      read: gives the content of a file of the place, or None.
      where: what the place is called.

    Raises:
      UserError: the place holds no tokenizer.
    """
    for name, make in _KINDS.items():
        content = read(name)
        if content is not None:
            return make(content)
    raise UserError(f"{where} holds no tokenizer: delete the folder and prepare the corpus again")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote into a folder.

    Raises:
      UserError: the folder holds no tokenizer.
    """

    def read(name: str) -> bytes | None:
        return (folder / name).read_bytes() if (folder / name).exists() else None

    return read_tokenizer(read, folder)


def open_tokenizer(name: str) -> Tokenizer:
    """A tokenizer that is there already: bytes, the path of a .model or .json file, of a folder
    with one, or its name on the Hugging Face hub.

    Raises:
      UserError: there is none of that name.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        return load_tokenizer(path)
    try:
        if path.suffix == ".model":
            return SentencePieceTokenizer(path.read_bytes())
        if path.suffix == ".json":
            return HubTokenizer(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot read the tokenizer {name} ({error.strerror}): correct --data.tokenizer"
        ) from error
    return HubTokenizer(_download(name))


def _download(name: str) -> bytes:
    """The tokenizer.json of a model on the hub."""
    mend = (
        "give bytes, sentencepiece, the path of a .model or tokenizer.json file, or "
        "ORGANISATION/NAME on the Hugging Face hub"
    )
    if "/" not in name:
        raise UserError(f"no tokenizer {name!r}: {mend}")
    try:
        import huggingface_hub

        return Path(huggingface_hub.hf_hub_download(name, "tokenizer.json")).read_bytes()
    except ImportError as error:
        raise UserError(
            f"a tokenizer by its name ({name}) needs a package: pip install 'latte-lm[prepare]'"
        ) from error
    except Exception as error:  # Of many kinds: no such name, no permission, no network.
        words = " ".join(str(error).split())[:200]
        raise UserError(f"no tokenizer {name!r} ({words}): {mend}") from error


def train_sentencepiece(
    documents: Iterable[str],
    characters: int,
    vocab_size: int,
    kind: Literal["bpe", "unigram"] = "bpe",
) -> SentencePieceTokenizer:
    """Trains a vocabulary with byte fallback and no normalisation, deterministically.

    Args:
      documents: the texts to learn from.
      characters: about how many characters they have, from which it follows how they are sampled.
      vocab_size: pieces, the 256 bytes and the separator included.
      kind: byte-pair encoding, or a unigram language model.

    Raises:
      UserError: the text does not give so many pieces, or has more letters than that.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=_sentences(documents, 1 + characters // SAMPLE),
            model_writer=model,
            model_type=kind,
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
