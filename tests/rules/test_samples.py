"""Every sample written in this folder equals one process: values, shapes, dtypes and gradients, in many layouts."""

from zlib import crc32

import pytest

from shardwise import Mesh
from tools.op_judge import Sample
from tools.rows import written
from tools.rule_checks import assert_equals_one_process

LINES = (Mesh((1,)), Mesh((2,)), Mesh((4,)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # torch's word on a rank without elements
@pytest.mark.filterwarnings("ignore:Using padding='same'")  # about memory
@pytest.mark.parametrize("sample", list(written("test_*.py")), ids=str)
def test_a_sample_equals_one_process(sample: Sample) -> None:
    """On 3 and 5 ranks, on a 2 x 2 mesh, and on one of 1, 2 and 4 ranks, which its text chooses."""
    meshes = Mesh((3,)), Mesh((5,)), Mesh((2, 2)), LINES[crc32(str(sample).encode()) % len(LINES)]
    tally = assert_equals_one_process([sample], meshes, limit=6)
    assert tally.cases > tally.refused
    assert sample.in_place or not tally.refused
