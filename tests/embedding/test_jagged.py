"""JaggedTensor, KeyedJaggedTensor and KeyedTensor beside lists of tensors."""

import copy
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from shardwise._layout import Mesh, Shard
from shardwise._tensor import DTensor
from shardwise.embedding import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shardwise.errors import ArgumentError, JaggedError

BAGS_OF = {"user": [[7, 9], []], "item": [[7], [0]]}


def make(bags_of: dict[str, list[list[int]]], weighted: bool = False, offsets: bool = False) -> KeyedJaggedTensor:
    bags = [bag for of_feature in bags_of.values() for bag in of_feature]
    values = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return KeyedJaggedTensor(
        list(bags_of),
        values,
        values.float() / 2 if weighted else None,
        None if offsets else lengths,
        starts if offsets else None,
        stride_per_key=[len(of_feature) for of_feature in bags_of.values()],
    )


def lists(kjt: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [bag.tolist() for bag in jt.to_dense()] for key, jt in kjt.to_dict().items()}


class WithInverse(KeyedJaggedTensor):
    """What TorchRec's class has beyond this one's."""

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        return ["user"], torch.tensor([[0, 1, 0]])


def test_inverse_indices_of_torchrec_are_not_dropped() -> None:
    with pytest.raises(JaggedError, match="has inverse_indices, which would be lost"):
        KeyedJaggedTensor.from_torchrec(WithInverse(["user"], torch.tensor([7]), lengths=torch.tensor([1, 0])))


features = st.dictionaries(
    st.sampled_from("abcde"), st.lists(st.lists(st.integers(0, 2**63 - 1), max_size=4), max_size=4), min_size=1
)


@given(features, st.booleans(), st.randoms())
def test_bags_stay_what_they_are(bags_of: dict[str, list[list[int]]], offsets: bool, random: st.DataObject) -> None:
    kjt = make(bags_of, offsets=offsets)
    assert lists(kjt) == bags_of
    assert kjt.length_per_key() == [sum(map(len, bags)) for bags in bags_of.values()]
    order = list(range(len(bags_of)))
    random.shuffle(order)  # type: ignore[attr-defined]
    permuted = kjt.permute(order)
    assert list(lists(permuted).items()) == [list(bags_of.items())[i] for i in order]
    first, rest = kjt.split([1, len(bags_of) - 1])
    assert lists(first) | lists(rest) == bags_of
    assert lists(KeyedJaggedTensor.concat([rest, first])) == bags_of
    assert lists(KeyedJaggedTensor.from_jt_dict(kjt.to_dict())) == bags_of
    assert lists(KeyedJaggedTensor.from_torchrec(kjt)) == bags_of
    assert kjt.offsets().tolist() == [0, *kjt.lengths().cumsum(0).tolist()]


def test_weights_go_with_their_ids() -> None:
    kjt = make(BAGS_OF, weighted=True)
    swapped = kjt.permute([1, 0])
    assert torch.equal(swapped.weights(), swapped.values() / 2)
    assert [w.tolist() for w in kjt["user"].to_dense_weights()] == [[3.5, 4.5], []]
    assert repr(kjt) == "KeyedJaggedTensor(user: [[7, 9] × [3.5, 4.5], [] × []], item: [[7] × [3.5], [0] × [0]])"
    assert repr(kjt["item"]) == "JaggedTensor([[7] × [3.5], [0] × [0]])"
    assert kjt.stride() == 2
    assert kjt.stride_per_key() == [2, 2]


def test_long_bags_are_shown_in_part() -> None:
    assert repr(JaggedTensor(torch.arange(20), lengths=torch.tensor([0] * 7 + [20]))).endswith(", … 8 bags])")
    assert "6, 7, … 20]" in repr(JaggedTensor(torch.arange(20), lengths=torch.tensor([20])))
    assert repr(JaggedTensor(torch.ones(3, 4), lengths=torch.tensor([1, 2]))) == (
        "JaggedTensor([[1 of shape (4,)], [2 of shape (4,)]])"
    )


@pytest.mark.parametrize("length", [None, 0, 2, 5])
@pytest.mark.parametrize("columns", [(), (3,)])
def test_padded(length: int | None, columns: tuple[int, ...]) -> None:
    bags = [torch.randn(n, *columns) for n in (3, 0, 1)]
    padded = JaggedTensor.from_dense(bags).to_padded_dense(length, padding_value=-1.0)
    width = 3 if length is None else length
    for row, bag in zip(padded, bags, strict=True):
        kept = bag[:width]
        assert torch.equal(row, torch.cat([kept, torch.full((width - len(kept), *columns), -1.0)]))


def test_padding_has_gradients() -> None:
    values = torch.ones(3, requires_grad=True)
    JaggedTensor(values, lengths=torch.tensor([2, 1])).to_padded_dense(1).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 1.0]


def test_nested_tensors_without_a_copy() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(0), torch.ones(1)], layout=torch.jagged)
    jt = JaggedTensor.from_nested(nested)
    assert jt.lengths().tolist() == [2, 0, 1]
    again = jt.to_nested()
    assert again.values().data_ptr() == jt.values().data_ptr() == nested.values().data_ptr()
    assert [x.tolist() for x in again.unbind()] == [[1.0, 1.0], [], [1.0]]
    with pytest.raises(JaggedError, match=r"layout torch.jagged, got Tensor"):
        JaggedTensor.from_nested(torch.ones(3))


def test_a_loader_collates_them() -> None:
    loader: DataLoader[KeyedJaggedTensor] = DataLoader([make(BAGS_OF)] * 3, batch_size=None, num_workers=1)  # type: ignore[arg-type]
    assert [lists(batch) for batch in loader] == [BAGS_OF] * 3


def one(values: Sequence[int] = (1, 2), **other: Tensor | Sequence[int]) -> Callable[[], object]:
    return lambda: KeyedJaggedTensor(["a"], torch.tensor(values), **other)  # type: ignore[arg-type]


LENGTHS = torch.tensor([1, 1])
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "sum": (one(lengths=torch.tensor([1, 2])), "lengths of 2 bags sum to 3, but there are 2 values"),
    "negative": (one(lengths=torch.tensor([3, -1])), "bag 1 has length -1"),
    "none": (one(), "needs lengths or offsets"),
    "floats": (one(lengths=LENGTHS.float()), "lengths are 1-D and int32 or int64, got 1-D torch.float32"),
    "two dims": (one(lengths=LENGTHS[None]), "got 2-D torch.int64"),
    "offsets": (one(offsets=torch.tensor([1, 2])), "offsets start with 0, got 1"),
    "no offsets": (one(offsets=LENGTHS[:0]), "offsets start with 0, got none"),
    "falling": (one(offsets=torch.tensor([0, 3, 2])), "bag 1 has length -1"),
    "both": (one(lengths=LENGTHS, offsets=torch.tensor([0, 2, 2])), "lengths are not the differences of offsets"),
    "weights": (one(lengths=LENGTHS, weights=torch.ones(3)), "2 values need as many weights"),
    "strides": (one(lengths=LENGTHS, stride_per_key=[3]), "expected length 1 and sum 2"),
    "uneven": (
        lambda: KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.ones(3).long()),
        "3 bags cannot be divided evenly among 2 features",
    ),
    "twice": (lambda: KeyedJaggedTensor(["a", "a"], torch.tensor([1, 2]), lengths=LENGTHS), "the key 'a' twice"),
    "matrix": (lambda: KeyedJaggedTensor(["a"], torch.ones(2, 2), lengths=LENGTHS), "values are 1-D"),
    "scalar": (lambda: JaggedTensor(torch.tensor(3), lengths=LENGTHS), "got the scalar 3"),
    "segments": (lambda: make(BAGS_OF).split([1]), "do not sum to 2 keys"),
    "permute": (lambda: make(BAGS_OF).permute([0, 0]), "not distinct indices of 2 keys"),
    "stride": (lambda: make({"a": [[1]], "b": []}).stride(), "different numbers of bags"),
    "no weights": (lambda: make(BAGS_OF).weights(), "no weights"),
    "no weights of a key": (make(BAGS_OF)["item"].weights, "no weights"),
    "concat": (lambda: KeyedJaggedTensor.concat([make({"a": [[1]]}), make({"b": [[1]]}, True)]), "others have none"),
    "no concat": (lambda: KeyedJaggedTensor.concat([]), "the list is empty"),
    "keyed twice": (lambda: KeyedTensor(["a", "a"], [1, 1], torch.ones(1, 2)), "key 'a' twice"),
    "keyed shape": (lambda: KeyedTensor(["a"], [3], torch.ones(2, 2)), r"shape \(2, 2\), expected \(bags, 3\)"),
    "keyed flat": (lambda: KeyedTensor(["a"], [3], torch.ones(4), [2]), r"shape \(4,\), expected \(6,\)"),
    "keyed counts": (lambda: KeyedTensor(["a"], [3, 1], torch.ones(2, 4)), "1 keys, 2 lengths"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(JaggedError, match=text):
        call()


def test_other_types_are_refused() -> None:
    ids = DTensor.from_local(torch.tensor([1]), Mesh((1,)), [Shard(0)])
    with pytest.raises(JaggedError, match=r"values are this rank's own, got a DTensor. Fix: values.to_local\(\)"):
        KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([1]))
    with pytest.raises(ArgumentError, match="keys must be"):
        KeyedJaggedTensor("a", torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(KeyError, match="no key 'x'; it has 'user', 'item'"):
        make(BAGS_OF)["x"]


def test_keyed_tensor() -> None:
    values = torch.arange(12.0).view(2, 6)
    pooled = KeyedTensor(["a", "b"], [2, 4], values)
    assert torch.equal(pooled["b"], values[:, 2:])
    assert pooled.offset_per_key() == [0, 2, 6]
    assert pooled.stride_per_key() == [2, 2]
    assert repr(pooled) == "KeyedTensor(a: (2, 2), b: (2, 4))"
    other = KeyedTensor(["c"], [1], -torch.ones(2, 1))
    grouped = KeyedTensor.regroup([pooled, other], [["c", "a"], ["b"]])
    assert torch.equal(grouped[0], torch.cat([other["c"], pooled["a"]], 1))
    assert torch.equal(grouped[1], pooled["b"])
    with pytest.raises(JaggedError, match="key 'a' is in two"):
        KeyedTensor.regroup([pooled, pooled], [["a"]])
    with pytest.raises(JaggedError, match="no key 'z'"):
        KeyedTensor.regroup([pooled], [["z"]])
    with pytest.raises(KeyError, match="no key 'z'"):
        pooled["z"]


def test_keyed_tensor_of_different_numbers_of_bags() -> None:
    flat = KeyedTensor(["a", "b"], [2, 3], torch.arange(10.0), stride_per_key=[2, 2])
    assert flat["a"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert flat["b"].tolist() == [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    assert repr(KeyedTensor(["a", "b"], [2, 3], torch.ones(7), [2, 1])) == "KeyedTensor(a: (2, 2), b: (1, 3))"


def test_devices() -> None:
    moved = make(BAGS_OF, weighted=True).to("meta")
    assert {moved.values().device.type, moved.weights().device.type, moved.lengths().device.type} == {"meta"}
    assert repr(moved) == "KeyedJaggedTensor(user, item; 4 values on meta)"
    assert repr(make(BAGS_OF)["user"].to("meta")) == "JaggedTensor(2 values of 2 bags on meta)"
    assert KeyedTensor(["a"], [1], torch.ones(1, 1)).to("meta").values().is_meta


# ---- lengths that are changed in place ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use", [KeyedJaggedTensor.offsets, KeyedJaggedTensor.length_per_key, KeyedJaggedTensor.to_dict, "lookup", "view"]
)
def test_lengths_that_were_changed_in_place_are_refused(use: Callable[[KeyedJaggedTensor], object] | str) -> None:
    kjt = make(BAGS_OF)
    view, lengths = kjt.split([1, 1])[0], kjt.lengths()
    kjt.length_per_key()
    lengths[0] -= 1
    lengths[1] += 1
    table = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["user"])])
    with pytest.raises(JaggedError, match="KeyedJaggedTensor were changed in place after it was made"):
        table(kjt) if use == "lookup" else view.to_dict() if use == "view" else use(kjt)  # type: ignore[operator]


def pickled(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    found: KeyedJaggedTensor = pickle.loads(pickle.dumps(kjt))  # noqa: S301 - as a DataLoader does
    return found


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_counts_its_own_changes(copied: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> None:
    lengths = torch.zeros(4, dtype=torch.int64)
    lengths += 1
    kjt = copied(KeyedJaggedTensor(["user", "item"], torch.arange(4), lengths=lengths))
    assert lists(kjt) == {"user": [[0], [1]], "item": [[2], [3]]}
    assert lists(copied(kjt)) == lists(kjt)
