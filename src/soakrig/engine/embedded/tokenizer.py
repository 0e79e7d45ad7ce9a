"""The shipped byte-level BPE tokenizer: text to ids, ids to text, and which pieces are clean text."""

from __future__ import annotations

import codecs
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources

import tokenizers
from tokenizers import pre_tokenizers

from soakrig.errors import EngineStartError

from .config import VOCABULARY

SPECIAL_TOKENS = {
    "pad": "<|pad|>",
    "begin": "<|begin|>",
    "end": "<|end|>",
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "tool": "<|tool|>",
    "think": "<think>",
    "end_think": "</think>",
    "tool_call": "<tool_call>",
    "end_tool_call": "</tool_call>",
}
"""Name in the chat template -> the token's spelling."""

# Free text is made of pieces that begin a word: no white space or punctuation alone, nothing that reads as markup.
_TEXT = re.compile(r" [A-Za-z0-9][A-Za-z0-9_'-]*")
# What may stand in a JSON string as it is and in a path, a command or a name.
_STRING = re.compile(r"[ /_.-]?[A-Za-z0-9][A-Za-z0-9_./-]*")
_CACHED_CHARACTERS = 16_000_000


class Tokenizer:
    """4096 pieces. Text never becomes a special token, whatever it spells; those have their own ids (``special``)."""

    def __init__(self) -> None:
        raw = resources.files("soakrig.engine.embedded").joinpath("tokenizer.json").read_text(encoding="utf-8")
        self._tokenizer = tokenizers.Tokenizer.from_str(raw)
        # Without this a user's "<|end|>" would end his message.
        self._tokenizer.encode_special_tokens = True
        if self._tokenizer.get_vocab_size() != VOCABULARY:
            raise EngineStartError(
                f"tokenizer.json holds {self._tokenizer.get_vocab_size()} pieces, {VOCABULARY} were expected",
                remedy="reinstall soakrig, or train the tokenizer again with scripts/train_tokenizer.py",
            )
        vocabulary = self._tokenizer.get_vocab()
        self.special: dict[str, int] = {name: vocabulary[spelling] for name, spelling in SPECIAL_TOKENS.items()}
        to_byte = _byte_alphabet()
        special_ids = set(self.special.values())
        pieces = sorted(vocabulary, key=vocabulary.__getitem__)
        self.bytes_of: list[bytes] = [
            piece.encode() if number in special_ids else bytes(to_byte[character] for character in piece)
            for number, piece in enumerate(pieces)
        ]
        self.text_of: list[str] = [raw_piece.decode("utf-8", errors="replace") for raw_piece in self.bytes_of]
        """Each piece alone, as logprobs show it; a part of a character shows as U+FFFD."""
        self.text_ids: list[int] = self._clean(_TEXT, special_ids)
        self.string_ids: list[int] = self._clean(_STRING, special_ids)
        self._cached: OrderedDict[str, list[int]] = OrderedDict()
        self._cached_characters = 0

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_part(self, text: str) -> list[int]:
        """As ``encode``, remembering the answer: a conversation re-sends its parts every turn."""
        ids = self._cached.get(text)
        if ids is None:
            ids = self.encode(text)
            self._cached[text] = ids
            self._cached_characters += len(text)
            while self._cached_characters > _CACHED_CHARACTERS and len(self._cached) > 1:
                oldest, _ = self._cached.popitem(last=False)
                self._cached_characters -= len(oldest)
        else:
            self._cached.move_to_end(text)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Special tokens are left out, bytes that are no whole character are dropped."""
        special = set(self.special.values())
        return b"".join(self.bytes_of[i] for i in ids if i not in special).decode("utf-8", errors="ignore")

    def split_text(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds: a character spread over several tokens belongs to the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        return [decoder.decode(self.bytes_of[i]) for i in ids]

    def _clean(self, pattern: re.Pattern[str], special: set[int]) -> list[int]:
        return [
            number
            for number, text in enumerate(self.text_of)
            if number not in special and text.isascii() and pattern.fullmatch(text)
        ]


@cache
def _byte_alphabet() -> dict[str, int]:
    """Character of the byte-level alphabet -> byte: printable bytes stand for themselves, the rest from U+0100 on.

    The order is GPT-2's ``bytes_to_unicode``; the library's own alphabet confirms the characters.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    table = {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
    if set(table) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise EngineStartError("the tokenizers library has another byte alphabet than GPT-2's, which was expected")
    return table
