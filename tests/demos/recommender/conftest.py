"""A small data set of the shape of the real one."""

import pytest
import torch

from shardwise.demos.data import Bags, PyIdent

NUM_IDS, NUM_FUNCTIONS = 23, 30


@pytest.fixture(scope="session")
def tiny() -> PyIdent:
    """30 functions of 3 to 6 identifiers, small ids more often; every fifth is held out and alone in its module."""
    generator = torch.Generator().manual_seed(7)
    weights = 1 / torch.arange(1, NUM_IDS + 1)
    lengths = torch.randint(3, 7, (NUM_FUNCTIONS,), generator=generator).tolist()
    bags = [torch.multinomial(weights, n, generator=generator).sort().values for n in lengths]
    values = torch.cat(bags)
    is_test = torch.arange(NUM_FUNCTIONS) % 5 == 0
    kept = ~is_test.repeat_interleave(torch.tensor(lengths))
    return PyIdent(
        vocab=(*(f"w{i}" for i in range(NUM_IDS - 2)), "path", "re"),
        modules=tuple(f"m{i}" for i in range(NUM_FUNCTIONS)),
        packages=("m",),
        bags=Bags(values, torch.tensor([0, *lengths]).cumsum(0)),
        module_of=torch.arange(NUM_FUNCTIONS),
        package_of=torch.zeros(NUM_FUNCTIONS, dtype=torch.int64),
        num_args=torch.arange(NUM_FUNCTIONS) % 20,  # more than the model distinguishes
        is_test=is_test,
        train_counts=values[kept].bincount(minlength=NUM_IDS),
        python="3.11.7",
        fingerprint="tiny",
    )
