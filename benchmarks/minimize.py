"""How often `soak repro minimize` finds what it should, and what it costs: searches in made-up worlds.

    .venv/bin/python benchmarks/minimize.py [--seeds 300]

No engine is launched: the hazard of a load is a function, faults are drawn (simulated), the search is the real one.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

from soakrig.bisect.minimize.decision import Demand, Seen
from soakrig.bisect.minimize.search import Path, Search
from soakrig.bisect.minimize.shape import Shape

WHOLE = Shape(conversations=1, requests=12, stream=1, max_tokens=64, tools=50, context=13000)
Hazard = Callable[[Shape], float]


def enough(shape: Shape) -> bool:
    """The floor of all these worlds: 8 tools, 6000 tokens, answers of 17."""
    return shape.tools >= 8 and shape.context >= 6000 and shape.max_tokens >= 17


WORLDS: dict[str, Hazard] = {
    "floor, 1/6 a turn": lambda shape: 1 / 6 if enough(shape) else 0.0,
    "floor, 1/33 a turn": lambda shape: 1 / 33 if enough(shape) else 0.0,
    "no floor": lambda shape: 1 / 6,
    "an eighth below the floor": lambda shape: 1 / 6 if enough(shape) else 1 / 48,
    "in proportion to the context": lambda shape: shape.context / 13000 / 6,
}


def play(hazard: Hazard, seed: int) -> tuple[Path, int, int]:
    """A search to its end: how far it came, launches, turns."""
    rng, known = random.Random(seed), dict[Shape, Seen]()
    launches = turns = 0
    while launches < 1000:
        path = Search(WHOLE, 8, lambda tools: 200 + 20 * tools, Demand(), known).walk()
        if path.next is None:
            break
        struck = next((n for n in range(1, path.turns + 1) if rng.random() < hazard(path.next)), None)
        before, length = known.get(path.next, Seen()), struck or path.turns
        known[path.next] = Seen(before.faults + (struck is not None), before.exposure + length)
        launches, turns = launches + 1, turns + length
    return path, launches, turns


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=300)
    seeds = parser.parse_args().seeds
    print(f"{'world':30} {'within 25 %':>12} {'>= 1/2':>8} {'>= 1/4':>8} {'launches':>9} {'turns':>7}   (simulated)")
    for name, hazard in WORLDS.items():
        found = [play(hazard, seed) for seed in range(seeds)]
        shapes = [path.best for path, _, _ in found]
        near = sum(
            path.what == "minimal" and enough(path.best) and path.best.tools <= 10 and path.best.context <= 7500
            and path.best.max_tokens <= 21 and path.best.requests == 1 and not path.best.stream
            for path, _, _ in found
        )  # fmt: skip
        keep = [sum(hazard(shape) >= share * hazard(WHOLE) for shape in shapes) / seeds for share in (0.5, 0.25)]
        launches, turns = (sum(row[n] for row in found) / seeds for n in (1, 2))
        close = f"{near / seeds:12.1%}" if "no floor" not in name and "proportion" not in name else f"{'-':>12}"
        print(f"{name:30} {close} {keep[0]:8.1%} {keep[1]:8.1%} {launches:9.0f} {turns:7.0f}")


if __name__ == "__main__":
    main()
