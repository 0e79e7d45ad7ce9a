"""Text that says nothing, of a wanted length in tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random

from soakrig.soak.transcripts.token_counts import TokenCounts

_TEXT = (
    "about above across after again along also among area around back bank base because before behind best better "
    "between block body book both bottom box bring build business call case cause center change check city class "
    "clear close code cold color come common company control corner course cover cross current dark data day deep "
    "different direct door down draw drive early earth east easy edge eight end energy enough even every example "
    "eye face fact fall family far fast few field figure file final fine fire first five floor follow food force "
    "form forward four free friend from front full further game general give glass gold good great green ground "
    "group grow half hand hard head hear heat heavy help here high hold home horse hot hour house idea inside into "
    "just keep kind land large last late law lead leave left less letter level life light like line list little "
    "live local long look low machine main make many mark market matter mean measure middle mind minute money month "
    "moon more morning most mother mountain move much music name near need never new next night north note number "
    "object ocean off often oil old once one only open order other out over own page paper part party pass past "
    "pattern people person picture piece place plan plane plant play point power press problem produce product "
    "public pull put question quick rain range reach read ready real record red rest right river road rock room "
    "round rule run same school sea second section see seem sense serve set seven several shape ship short show "
    "side simple since single six size sleep slow small snow some song sound south space special stand star start "
    "state step still stone stop story street strong study such sun support sure surface system table take talk "
    "teach ten test than that then there these thing think third this those though three through time together top "
    "toward town travel tree true turn two under unit until up use usual value very voice walk wall war warm watch "
    "water wave way weight west wheel where which while white whole wide wind winter with wonder wood word work "
    "world write year yellow young "
)
WORDS = tuple(_TEXT.split())
"""Common words, most of which are one token in most vocabularies."""
ENOUGH = 40
"""Different words that a filler needs, so that a tokenizer or a cache finds nothing to join."""
_TIMES = 8
_TRIES = 6
BLOCKS_KEPT = 4096
Maker = Callable[[int], str]


class Filler:
    """Makes text of so many tokens, the same for the same key and seed.

    Where the counts are the engine's own, only words are used that are one token each there, at a text's start and
    within it; where there are too few of those, lengths are found by trying. ``exact``: whether lengths hold.
    """

    def __init__(self, counts: TokenCounts, seed: int = 0) -> None:
        self.counts, self.seed = counts, seed
        single = [word for word in WORDS if counts.count(" ".join([word] * _TIMES)) == _TIMES] if counts.exact else []
        self.single = len(single) >= ENOUGH
        self.words = single if self.single else list(WORDS)
        self.block = lru_cache(BLOCKS_KEPT)(self._block)

    def make(self, tokens: int, key: str) -> str:
        """A text of ``tokens`` tokens; empty for 0."""
        return self.fitted(lambda words: " ".join(self.pick(words, key)), tokens)

    def pick(self, words: int, key: str) -> list[str]:
        """So many words; a smaller number is the beginning of a larger one."""
        return Random(f"{self.seed}/{key}").choices(self.words, k=max(words, 0))  # noqa: S311 - no secret

    def fitted(self, text_of: Maker, tokens: int) -> str:
        """``text_of(words)`` for the number of words that comes nearest to ``tokens`` tokens."""
        if tokens <= 0:
            return ""
        if not self.counts.exact or self.single:
            return text_of(tokens)
        words, best, least = tokens, "", 1 << 62
        for _ in range(_TRIES):
            text = text_of(words)
            got = self.counts.count(text)
            if abs(got - tokens) < least:
                best, least = text, abs(got - tokens)
            step = round((got - tokens) * words / got)
            if step == 0:
                break
            words = max(1, words - step)
        return best

    def _block(self, number: int, tokens: int) -> list[str]:
        """The words of a trace's block, which is the same in every prompt that has its id."""
        return self.pick(tokens, f"block {number}")
