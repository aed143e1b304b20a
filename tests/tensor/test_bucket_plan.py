"""Which gradients share a bucket, and when a plan sends its buckets during backward."""

import pytest
import torch

from shardwise import Mesh
from shardwise.tensor.autograd.buckets import BucketOptions, BucketPlan, Gradient, SendTime, split_into_buckets

FLOAT = Mesh((2,)), (0,), torch.float32, torch.device("cpu")
DOUBLE = Mesh((2,)), (0,), torch.float64, torch.device("cpu")


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([(4, FLOAT, 4), (3, FLOAT, 4), (2, FLOAT, 4), (1, FLOAT, 12)], ((4, 3), (2,), (1,))),
        ([(4, FLOAT, 4), (3, DOUBLE, 4), (2, FLOAT, 4), (1, DOUBLE, 4)], ((4, 2), (3, 1))),
        ([(3, FLOAT, 4), (2, None, 4), (1, FLOAT, 4)], ((2,), (3, 1))),  # the other one is complete later
        ([(2, None, 1), (1, None, 1)], ((2,), (1,))),
        ([], ()),
    ],
)
def test_gradients_of_a_kind_share_a_bucket_while_there_is_room(
    gradients: list[tuple[int, None, int]], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert split_into_buckets([Gradient(*g) for g in gradients], max_bytes=10) == expected


def test_buckets_are_sent_in_backward_after_one_read_per_backward_unless_other_code_changed_gradients() -> None:
    plan = BucketPlan((), BucketOptions())
    seen = []
    for read_once, unchanged in [(True, True), (False, False), (True, True), (True, False), (True, True)]:
        plan.update_send_time(read_once, unchanged)
        seen.append(plan.send_time)
    on_read, early, never = SendTime.ON_READ, SendTime.IN_BACKWARD, SendTime.ALWAYS_ON_READ
    assert seen == [early, on_read, early, never, never]
