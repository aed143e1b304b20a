"""The tool that runs PyTorch's own tests, on a small file of our own, and the record of what does not pass."""

from pathlib import Path

import pytest

from shardwise.errors import MeshError
from shardwise.testing import world
from tools.torch_tests import running
from tools.torch_tests.__main__ import RECORD
from tools.torch_tests.loading import NotHereError
from tools.torch_tests.record import Judged, Record, lists, table
from tools.torch_tests.running import Outcome, TestId, run_here

TOY = """
import torch
import torch.distributed._tensor as imported
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed._tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms


@OpSchema.decorates
class Base(DTensorTestBase):
    pass


class Toy(DTensorTestBase):
    @property
    def world_size(self):
        return 2

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_values(self):
        mesh = self.build_device_mesh()
        x = distribute_tensor(torch.arange(5), mesh, [Shard(0)])
        self.assertIs(type(x).__module__.split(".")[0] == "shardwise", True)
        self.assertEqual(x._local_tensor, torch.tensor([[0, 1, 2], [3, 4]][self.rank]))
        self.assertEqual(x._spec.placements, (Shard(0),))
        self.assertEqual(torch.distributed._tensor.ones(3, device_mesh=mesh).full_tensor(), torch.ones(3))
        self.assertIs(imported.DTensor, DTensor)

    def test_specs(self):
        spec = ChunkShardingSpec(0, ["rank:0/cuda:0", f"rank:1/cuda:{1}"])
        x = sharded_tensor.ones(spec, 3, 2)
        self.assertEqual(x.local_shards()[0].tensor, torch.ones(2 - self.rank, 2).cuda(self.rank))

    def test_counts(self):
        x = distribute_tensor(torch.arange(5), self.build_device_mesh(), [Shard(0)])
        with CommDebugMode() as mode:
            x.full_tensor()
        self.assertEqual(mode.get_total_counts(), 17)
        self.assertTrue(mode.get_comm_counts() == {"a collective of torch": 17})

    def test_texts(self):
        with self.assertRaisesRegex(ValueError, "as torch says it"):
            distribute_tensor(torch.arange(5), self.build_device_mesh(), [Shard(7)])

    def test_no_error(self):
        with self.assertRaisesRegex(ValueError, "as torch says it"):
            pass

    def test_missing(self):
        OpSchema("mm")

    def test_wrong(self):
        self.assertEqual(torch.ones(2), torch.zeros(2))

    def test_skipped(self):
        self.skipTest("not today")


class Plain(TestCase):
    def test_alone(self):
        pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    file = tmp_path / "_shard" / "test_toy.py"
    file.parent.mkdir()
    file.write_text(TOY, encoding="utf-8")
    return str(tmp_path)


def outcome_of(folder: str, method: str) -> Outcome:
    test = TestId(folder, "_shard/test_toy.py", "Toy", method)
    (outcome,) = {outcome for outcome, _ in world(2).run(run_here, test)}
    return outcome


def test_the_tests_of_a_file_are_found(folder: str) -> None:
    found = [f"{test.case}.{test.method}" for test in running.tests_in(folder, "_shard/test_toy.py", torchs=False)]
    assert len(found) == 9
    assert {"Toy.test_values", "Plain.test_alone"} < set(found)


@pytest.mark.parametrize(
    ("method", "outcome"),
    [
        ("test_values", Outcome("passed")),
        ("test_specs", Outcome("passed")),
        ("test_counts", Outcome("passed", "", ("counts",))),
        ("test_texts", Outcome("passed", "", ("error texts",))),
        ("test_skipped", Outcome("skipped", "not today")),
    ],
)
def test_a_test_runs_with_the_classes_of_shardwise(folder: str, method: str, outcome: Outcome) -> None:
    assert outcome_of(folder, method) == outcome


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        ("test_missing", NotHereError, r"not here: torch.distributed.tensor._op_schema.OpSchema"),
        ("test_wrong", AssertionError, "Tensor-likes are not close"),
        ("test_no_error", AssertionError, "ValueError not raised"),
    ],
)
def test_what_differs_fails(folder: str, method: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        outcome_of(folder, method)


def test_every_reason_of_the_record_is_described_and_used(tmp_path: Path) -> None:
    record = Record.read(RECORD)
    assert {reason for reason, _ in record.tests.values()} == set(record.reasons)
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"pytorch": "2.6.0", "reasons": {}, "tests": {"a": ["rpc", ""]}}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"no text for the reasons \['rpc'\]"):
        Record.read(wrong)


def test_tables_count_tests_and_list_what_does_not_pass() -> None:
    tests = {"a.py::*::test_r*": ["rpc", "remote shards"], "a.py::*::test_o*": ["choice", "copies"]}
    record = Record("2.6.0", {"rpc": "RPC", "choice": "Otherwise"}, tests)
    judged = []
    outcomes = {
        "test_1": Outcome("passed"),
        "test_2": Outcome("passed", "", ("counts",)),
        **dict.fromkeys(("test_remote", "test_4", "test_other"), Outcome("failed", "x")),
    }
    for method, outcome in outcomes.items():
        test = TestId("", "a.py", "Case", method)
        judged.append(Judged(test, outcome, *record.of(str(test))))
    assert [each.status for each in judged] == ["passed", "passed", "does not apply", "failed", "failed"]
    assert table(judged).splitlines()[2] == "| `a.py` | 5 | 2 | 1 | 1 | 2 |"
    assert lists(judged, record).splitlines() == [
        "#### RPC", "", "| tests | why |", "| --- | --- |", "| a.py: `test_remote` | remote shards |", "",
        "#### Otherwise", "", "| tests | why |", "| --- | --- |", "| a.py: `test_other` | copies |",
    ]  # fmt: skip


def test_errors_of_meshes_are_those_of_torch() -> None:
    assert issubclass(MeshError, ValueError)
    assert issubclass(MeshError, RuntimeError)
