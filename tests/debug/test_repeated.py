"""What `explain` says of work that ranks repeat, beside FLOPs that torch counts on each rank and in one process."""

import re
from collections.abc import Callable, Mapping
from html import unescape
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardwise import Mesh, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh, shard_module
from shardwise.debug import Explanation, explain
from shardwise.models import MixtureOfExperts
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)
from shardwise.testing import world

S0, S1, R = Shard(0), Shard(1), Replicate()
WIDTH, WORDS = 16, 24
Step = Callable[[], object]
Plan = Mapping[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(9, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))


class Routed(nn.Module):
    """A linear layer before experts."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.experts = nn.Linear(WIDTH, WIDTH), MixtureOfExperts(WIDTH, 2 * WIDTH, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.before(x))  # type: ignore[no-any-return]


def ids(rows: int) -> Tensor:
    return torch.arange(rows * 7).view(rows, 7) % WORDS


MLP = {"blocks.*.up.*": {"tp": S0}, "blocks.*.down.weight": {"tp": S1}}
ALL = MLP | {f"blocks.*.{x}.*": {"tp": S0} for x in "qkv"} | {"blocks.*.o.weight": {"tp": S1}}
STYLES = {f"blocks.*.{x}": ColwiseParallel() for x in ("q", "k", "v", "up")} | {
    f"blocks.*.{x}": RowwiseParallel() for x in ("o", "down")
}


def sharded(model: Callable[[], nn.Module], x: Tensor, mesh: Mesh, plan: Plan, batch: Any) -> Step:
    torch.manual_seed(0)
    module = shard_module(model(), plan, mesh=mesh)
    distributed = distribute_tensor(x, mesh, batch)
    return lambda: module(distributed)


def repeated(ranks: int, make: Callable[[], Step]) -> str:
    """That part of the report; empty if there is none. The same on every rank."""
    found = world(ranks).run(lambda: str(explain(make())).partition("Repeated: ")[2].partition("\n\n")[0])
    (text,) = set(found)
    return text


def flops(ranks: int, make: Callable[[], Step]) -> list[int]:
    """Those of each rank."""

    def body() -> int:
        step = make()
        with (
            FlopCounterMode(display=False) as counter,
            sdpa_kernel(SDPBackend.MATH),
        ):  # of others torch counts none here
            step()
        return int(counter.get_total_flops())

    return world(ranks).run(body)


def share(text: str) -> str:
    """That of the first entry."""
    found = re.search(r"^ +(\d+%)", text, re.MULTILINE)
    return found[1] if found else ""


TP, DP = Mesh((4,), names=("tp",)), Mesh((2, 2), names=("dp", "tp"))


@pytest.mark.parametrize(
    ("model", "x", "plan"),
    [
        (LanguageModel, ids(8), {}),
        (LanguageModel, ids(8), MLP),
        (Images, torch.ones(8, 3, 8, 8), {}),
        (Images, torch.ones(8, 3, 8, 8), {"4.*": {"tp": S0}}),
        (Routed, torch.ones(12, WIDTH), {"experts.w1": {"tp": S0}, "experts.w2": {"tp": S0}}),
    ],
)
def test_the_share_is_that_of_the_flops_of_ranks(model: Callable[[], nn.Module], x: Tensor, plan: Plan) -> None:
    """Of n ranks each does `here`, of which it repeats what all of them do beyond one process."""
    text = repeated(4, lambda: sharded(model, x, TP, plan, [R]))
    counted = flops(4, lambda: sharded(model, x, TP, plan, [R]))
    (alone,) = flops(1, lambda: sharded(model, x, Mesh((1,), names=("tp",)), {}, [R]))
    assert share(text) == f"{(sum(counted) - alone) / 3 / (sum(counted) / 4):.0%}"


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(
    ("mesh", "plan", "batch", "advised", "part"),
    [
        (TP, {}, [R], [S0], 4),
        (DP, {}, [S0, R], [S0, S0], 2),
        (DP, {}, [R, R], [S0, S0], 4),
        (DP, ALL, [R, R], [S0, R], 2),
    ],
)
def test_a_batch_that_was_not_sharded_is_found_and_the_advice_divides_the_work(
    mesh: Mesh, plan: Plan, batch: list[Placement], advised: list[Placement], part: int, backward: bool
) -> None:
    def make(placements: list[Placement]) -> Step:
        step = sharded(LanguageModel, ids(8), mesh, plan, placements)
        return (lambda: step().sum().backward()) if backward else step  # type: ignore[attr-defined]

    text = repeated(4, lambda: make(batch))
    assert share(text) == "100%"
    assert text.count("%") == 1
    assert "parameters: blocks.*.q.weight, " in text
    where = rf"{re.escape(str(advised))} where operand 0 of embedding \(\S*test_repeated.py:\d+ in forward\) is made"
    assert re.search(f"avoid: {where}: each rank then does 1/{part} of that", text)
    assert [part * n for n in flops(4, lambda: make(advised))] == flops(4, lambda: make(batch))
    assert repeated(4, lambda: make(advised)) == ""


@pytest.mark.parametrize("rows", [3, 4, 5, 9])
def test_a_batch_is_named_if_there_is_a_row_for_each_rank(rows: int) -> None:
    text = repeated(4, lambda: sharded(lambda: nn.Linear(6, 5), torch.ones(rows, 6), TP, {}, [R]))
    assert (text == "") == (rows < 4)
    assert ("avoid: [Shard(0)] where operand 0 is made: each rank then does 1/4 of that" in text) == (rows >= 4)
    assert (f"({rows}, 6) on Mesh(tp=4): [Replicate()], in full on each of the 4 ranks of tp" in text) == (rows >= 4)


def test_only_as_many_axes_are_advised_as_there_are_rows() -> None:
    text = repeated(4, lambda: sharded(lambda: nn.Linear(6, 5), torch.ones(3, 6), DP, {}, [R, R]))
    assert "in full on each of the 4 ranks of dp and tp" in text
    assert "avoid: [Shard(0), Replicate()] where operand 0 is made: each rank then does 1/2 of that" in text
    assert repeated(4, lambda: sharded(lambda: nn.Linear(6, 5), torch.ones(3, 6), DP, {}, [S0, R])) == ""


def test_a_plain_batch_beside_replicated_parameters_is_the_same_batch_on_all_ranks() -> None:
    def make() -> Step:
        model = shard_module(nn.Linear(6, 5), {}, mesh=TP)
        return lambda: model(torch.ones(8, 6))

    assert "avoid: [Shard(0)] where operand 0 is made: each rank then does 1/4 of that" in repeated(4, make)


def test_a_batch_of_more_than_one_step_is_one_entry() -> None:
    def make() -> Step:
        model = shard_module(nn.Linear(6, 5), {}, mesh=TP)
        return lambda: [model(distribute_tensor(torch.ones(8, 6), TP, [R])) for _ in range(3)]

    text = repeated(4, make)
    assert re.search(r"100% +3  \S*torch|100% +3  ", text)
    assert text.count("%") == 1


def test_what_was_gathered_on_the_way_is_named_with_its_line() -> None:
    def make() -> Step:
        first, second = (shard_module(nn.Linear(6, n), {}, mesh=TP) for n in (6, 60))
        x = distribute_tensor(torch.ones(8, 6), TP, [S0])
        return lambda: second(first(x).redistribute(placements=[R]))

    text = repeated(4, make)
    assert share(text) == f"{60 / (60 + 6 / 4):.0%}"
    assert re.search(
        r"avoid: have redistribute \(\S*test_repeated.py:\d+ in <lambda>\) give \[Shard\(0\)\]: each", text
    )


def test_what_an_op_made_of_all_rows_is_named_with_its_line() -> None:
    def make() -> Step:
        model = shard_module(nn.Linear(6, 60), {}, mesh=TP)
        x = distribute_tensor(torch.ones(8, 5, 6), TP, [S0])
        return lambda: model(x.sum(0))

    found = r"avoid: have sum \(\S*test_repeated.py:\d+ in <lambda>\) give \[Shard\(0\)\]: each rank then does 1/4"
    assert re.search(found, repeated(4, make))


def test_beside_sharded_experts_the_batch_is_to_be_sharded() -> None:
    plan = {"experts.w1": {"tp": S0}, "experts.w2": {"tp": S0}}
    text = repeated(4, lambda: sharded(Routed, torch.ones(12, WIDTH), TP, plan, [R]))
    assert "avoid: [Shard(0)] where operand 0 is made" in text
    counted = [flops(4, lambda p=p: sharded(Routed, torch.ones(12, WIDTH), TP, plan, [p])) for p in (R, S0)]  # type: ignore[misc]
    (alone,) = flops(1, lambda: sharded(Routed, torch.ones(12, WIDTH), Mesh((1,)), {}, [R]))
    assert sum(counted[0]) > sum(counted[1]) == alone


def test_partial_sums_are_in_full_on_each_rank() -> None:
    make: Callable[[Placement], Callable[[], Step]] = lambda p: (  # noqa: E731
        lambda: sharded(lambda: nn.Linear(6, 8), torch.ones(8, 6), TP, {}, [p])
    )
    assert flops(4, make(Partial())) == flops(4, make(R)) == [4 * n for n in flops(4, make(S0))]
    assert "[Partial('sum')], in full on each of the 4 ranks of tp" in repeated(4, make(Partial()))


def test_layers_that_stayed_replicated_beside_sharded_ones_are_named() -> None:
    text = repeated(4, lambda: sharded(LanguageModel, ids(8), DP, MLP, [S0, R]))
    assert "parameters: blocks.*.q.weight, blocks.*.q.bias, blocks.*.k.weight" in text
    assert "up.weight" not in text
    assert "avoid: shard these parameters on tp, as others are" in text


def fully(x: Tensor | None) -> Step:
    model = LanguageModel()
    for block in model.blocks:
        fully_shard(block, mesh=TP)
    fully_shard(model, mesh=TP)
    batch = ids(2) if x is None else distribute_tensor(x, TP, [S0])
    return lambda: model(batch)


def styles(on_data: bool = False) -> Step:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(LanguageModel(), mesh["tp"], STYLES)
    if on_data:
        fully_shard(model, mesh=mesh["dp"])
    return lambda: model(ids(2))


def experts() -> Step:
    return sharded(Routed, torch.ones(12, WIDTH), TP, {"experts.w1": {"tp": S0}, "experts.w2": {"tp": S0}}, [S0])


def muon() -> Step:
    model = shard_module(nn.Linear(6, 40), {}, mesh=TP)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.Muon([model.weight])
    x = distribute_tensor(torch.ones(8, 6), TP, [S0])

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    return step


def merged() -> Step:
    """The two factors of a low-rank weight, multiplied by all ranks."""
    a, b = (distribute_tensor(torch.ones(60, 60), TP, [R]).requires_grad_() for _ in range(2))
    x = distribute_tensor(torch.ones(4, 60), TP, [S0])
    return lambda: x @ (a @ b)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sharded(LanguageModel, ids(8), DP, ALL, [S0, R]),  # with a replicated head and embeddings
        lambda: sharded(LanguageModel, ids(1), Mesh((4,), names=("tp",)), ALL, [R]),
        lambda: sharded(LanguageModel, ids(1), DP, ALL, [R, R]),  # one row, as in a generation
        lambda: sharded(LanguageModel, ids(9), TP, {}, [S0]),
        lambda: sharded(lambda: nn.Sequential(nn.LayerNorm(6), nn.ReLU()), torch.ones(8, 6), TP, {}, [R]),
        lambda: sharded(lambda: nn.Linear(6, 8), torch.ones(0, 6), TP, {}, [R]),
        lambda: sharded(lambda: nn.Linear(6, 8), torch.ones(8, 6), Mesh((4, 1)), {}, [S0, R]),
        lambda: fully(ids(8)),
        lambda: fully(None),
        styles,
        lambda: styles(on_data=True),
        lambda: sharded(LanguageModel, ids(8), DP, ALL, [S0, S1]),
        experts,
        muon,
        merged,
    ],
)
def test_nothing_is_said_of_right_programs(make: Callable[[], Step]) -> None:
    assert repeated(4, make) == ""


@pytest.mark.parametrize("width", [4, 200])
def test_a_head_is_named_if_it_is_much_of_the_work(width: int) -> None:
    """A fifth of the work of a rank, and two thirds."""

    def make() -> Step:
        model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 8), nn.LayerNorm(8), nn.Linear(8, width))
        plan = {"0.*": {"tp": S0}, "2.weight": {"tp": S1}}
        return sharded(lambda: model, torch.ones(8, 8), TP, plan, [R])

    text = repeated(4, make)
    assert share(text) == ("" if width == 4 else f"{8 * width / (8 * width + 2 * 320 / 4):.0%}")
    assert ("parameters: *.weight, *.bias" in text) == (width == 200)


def test_a_notebook_has_what_the_text_has() -> None:
    def body() -> tuple[str, str]:
        report: Explanation[Any] = explain(sharded(LanguageModel, ids(8), DP, ALL, [R, R]))
        return str(report), report._repr_html_()

    text, html = world(4).run(body)[0]
    title, _, *lines = text.partition("Repeated: ")[2].partition("\n\n")[0].splitlines()
    plain = unescape(re.sub("<[^>]*>", "\n", html.partition("Repeated: ")[2]))
    assert title in plain
    part, ops, what = lines[0].split(maxsplit=2)
    assert {part, ops, what} <= set(plain.splitlines())
    for line in lines[1:]:
        assert line.strip().removeprefix("avoid: ") in plain
    assert len(lines) == 4
