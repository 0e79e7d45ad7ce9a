"""Reproduce and pin down rare faults of LLM serving, and prove stability in numbers.

The rooms: ``record`` (what a run leaves on disk), ``soak`` (load, outcomes, watchers, one run), ``engine`` (the
bundled serving stack), ``reproducers`` (named load shapes), ``reports`` and ``cli``. Imports run one way; see
``docs/whats-here.md``.
"""

__version__ = "0.1.0"
