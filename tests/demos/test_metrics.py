"""AUC and normalised entropy beside their definitions."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.demos.metrics import auc, normalised_entropy

EXAMPLES = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=12)


@given(EXAMPLES)
def test_auc_is_the_share_of_pairs_in_order(examples: list[tuple[int, bool]]) -> None:
    ones = [score for score, label in examples if label]
    zeros = [score for score, label in examples if not label]
    pairs = [(a > b) + 0.5 * (a == b) for a in ones for b in zeros]
    found = auc(torch.tensor([float(s) for s, _ in examples]), torch.tensor([float(x) for _, x in examples]))
    assert math.isnan(found) if not pairs else math.isclose(found, sum(pairs) / len(pairs))


@given(EXAMPLES)
def test_entropy_is_relative_to_the_mean_of_the_labels(examples: list[tuple[int, bool]]) -> None:
    logits, labels = torch.tensor([float(s) for s, _ in examples]), torch.tensor([float(x) for _, x in examples])
    found = normalised_entropy(logits, labels)
    mean = sum(label for _, label in examples) / len(examples)
    if mean in {0, 1}:
        assert math.isnan(found)
        return
    chance = [1 / (1 + math.exp(-score)) for score, _ in examples]
    loss = -sum(math.log(p if label else 1 - p) for p, (_, label) in zip(chance, examples, strict=True))
    of_mean = -sum(math.log(mean if label else 1 - mean) for _, label in examples)
    assert math.isclose(found, loss / of_mean, rel_tol=1e-6)
    constant = torch.full_like(logits, math.log(mean / (1 - mean)))
    assert math.isclose(normalised_entropy(constant, labels), 1, rel_tol=1e-6)


def test_no_examples_have_no_quality() -> None:
    nothing = torch.zeros(0)
    assert math.isnan(auc(nothing, nothing))
    assert math.isnan(normalised_entropy(nothing, nothing))
