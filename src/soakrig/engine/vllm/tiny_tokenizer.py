"""A tiny checkpoint's tokenizer, trained on the spot: byte-level BPE, as Hugging Face tokenizer files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .tiny_corpus import corpus
from .tiny_spec import MAX_POSITIONS

VOCABULARY = 2048
CONTROL_TOKENS = {
    "pad": "<|pad|>",
    "begin": "<|begin|>",
    "end": "<|end|>",
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "tool": "<|tool|>",
}
"""Left out of decoded text."""
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Kept in decoded text, as Qwen and GLM have it: reasoning and tool parsers look for them there."""

# Letters with one leading space, up to three digits, runs of punctuation, runs of space: short pieces that merge well.
_SPLIT = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The spelling of a piece that begins a plain word; 'Ġ' is the space of the byte alphabet.
_WORD = re.compile(r"Ġ[a-z][a-z]+")


@dataclass(frozen=True, slots=True)
class TinyTokenizer:
    """A trained tokenizer and what the model has to know of it.

    ``control``: name -> id of the control tokens. ``special_ids``: those and the markup tokens. ``word_ids``: pieces
    that begin a plain word; free text is made of them.
    """

    tokenizer: Tokenizer
    control: dict[str, int]
    special_ids: tuple[int, ...]
    word_ids: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def to_json(self) -> str:
        """``tokenizer.json``."""
        return self.tokenizer.to_str(pretty=False)

    def config(self) -> dict[str, Any]:
        """``tokenizer_config.json``, the chat template in it."""
        return {
            "add_bos_token": True,
            "bos_token": CONTROL_TOKENS["begin"],
            "chat_template": chat_template(),
            "clean_up_tokenization_spaces": False,
            "eos_token": CONTROL_TOKENS["end"],
            "model_max_length": MAX_POSITIONS,
            "pad_token": CONTROL_TOKENS["pad"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        }


def chat_template() -> str:
    """The Jinja source beside this file: tools, tool calls, tool results and thinking."""
    source = resources.files("soakrig.engine.vllm").joinpath("tiny_chat_template.jinja").read_text("utf-8")
    return source.rstrip("\n")


def train_tokenizer() -> TinyTokenizer:
    """Train on ``tiny_corpus``: the same pieces every time, with the same version of the tokenizers library.

    Text that spells a special token becomes it, as in every checkpoint of these families. ``<|begin|>`` is put before
    a plain prompt; the chat template writes its own.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*CONTROL_TOKENS.values(), *MARKUP_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer = _with_visible_markup(tokenizer)
    vocabulary = tokenizer.get_vocab()
    control = {name: vocabulary[spelling] for name, spelling in CONTROL_TOKENS.items()}
    begin = CONTROL_TOKENS["begin"]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, control["begin"])]
            ),
        ]
    )
    return TinyTokenizer(
        tokenizer=tokenizer,
        control=control,
        special_ids=(*control.values(), *(vocabulary[spelling] for spelling in MARKUP_TOKENS)),
        word_ids=tuple(sorted(number for piece, number in vocabulary.items() if _WORD.fullmatch(piece))),
    )


def _with_visible_markup(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer makes every token that it reserves a special one, which decoding leaves out."""
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] not in MARKUP_TOKENS
    return Tokenizer.from_str(json.dumps(data))
