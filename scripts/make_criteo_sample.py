"""Make the bundled sample of Criteo's format: invented lines, whose labels depend on their features.

    python scripts/make_criteo_sample.py               # into the package
    python scripts/make_criteo_sample.py --out FILE

Nothing in it is from Criteo. The click probability of a line is the sigmoid of a bias, the effects of five
categories and one of a dense feature, so a model with embeddings finds what a constant cannot.
"""

import argparse
import hashlib
import math
import random
from pathlib import Path

from shardwise.demos.data.criteo import DENSE_NAMES, KEYS, SAMPLE

NUM_LINES = 300
SEED = 14
SIZES = (12, 40, 6, 150, 25, 4, 80, 10)  # how many values a category has; the first keys', then again from the front
CLICKED_BY = range(5)  # the categories that have an effect
BIAS, EFFECT, SLOPE = -1.6, 1.4, 0.5
MISSING = 0.06


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=SAMPLE, help="the file to write")
    args = parser.parse_args()
    args.out.write_text("".join(lines(NUM_LINES, SEED)), encoding="ascii")
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


def lines(count: int, seed: int) -> list[str]:
    """Lines with their newlines; the same for the same numbers."""
    return [line(random.Random(f"{seed} {i}")) for i in range(count)]


def line(draw: random.Random) -> str:
    counts = [int(draw.expovariate(0.3 / (1 + i))) - (i == 1) for i in range(len(DENSE_NAMES))]
    values = [int(SIZES[i % len(SIZES)] * draw.random() ** 2) for i in range(len(KEYS))]  # small ones are frequent
    logit = BIAS + SLOPE * math.log1p(counts[0]) + sum(effect(i, values[i]) for i in CLICKED_BY)
    clicked = draw.random() < 1 / (1 + math.exp(-logit))
    fields = [str(count) for count in counts] + [digest(i, value)[:8] for i, value in enumerate(values)]
    present = (field if draw.random() >= MISSING else "" for field in fields)
    return "\t".join([str(int(clicked)), *present]) + "\n"


def effect(category: int, value: int) -> float:
    return EFFECT * (int(digest(category, value)[8:16], 16) / 2**31 - 1)


def digest(category: int, value: int) -> str:
    return hashlib.sha256(f"{category} {value}".encode()).hexdigest()


if __name__ == "__main__":
    main()
