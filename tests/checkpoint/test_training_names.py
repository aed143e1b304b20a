"""Training states of other programs go on bitwise on any number of ranks, or are refused by name."""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import shardwise as sw
from shardwise.checkpoint import read_manifest, restore, save, state_of
from shardwise.checkpoint.offline import diff, export_torch, import_torch
from shardwise.checkpoint.offline.training_names import TrainingNames, check_shapes, renamed
from shardwise.errors import CheckpointError
from shardwise.testing import world
from tests.checkpoint.states import bits, failed, full

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Parameters = list[tuple[str, nn.Parameter]]


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 7))


def in_order(model: nn.Module) -> Parameters:
    return list(model.named_parameters())


def biases_first(model: nn.Module) -> Parameters:
    return sorted(model.named_parameters(), key=lambda entry: entry[1].ndim)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Biases are not decayed; `parameters` has them first."""
    given = list(parameters)
    halves = [{"params": given[:4], "weight_decay": 0.0}, {"params": given[4:], "lr": torch.tensor(0.03)}]
    return torch.optim.AdamW(halves, lr=0.1, capturable=False, foreach=False)


# How an optimizer is made, and the order in which it gets the parameters.
OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[nn.Module], Parameters]]] = {
    "Adam": (lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True), in_order),
    "SGD": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), in_order),
    "AdamW": (two_groups, biases_first),
}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in made().named_parameters()}


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for name, p in model.named_parameters():
        g = gradients(step)[name]
        p.grad = sw.distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, sw.DTensor) else g
    optimizer.step()


def trained(kind: str, named: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = made()
    make, order = OPTIMIZERS[kind]
    optimizer = make(order(model) if named else [p for _, p in order(model)])
    for step in range(2):
        take_step(model, optimizer, step)
    for buffer in model.buffers():
        buffer.fill_(2)
    return model, optimizer


def of_torch_save(kind: str, folder: Path) -> dict[str, Any]:
    model, optimizer = trained(kind)
    state = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}
    torch.save(state, folder / "state.pt")
    torch_save_to_dcp(folder / "state.pt", folder / "dcp")
    return {"parameters": [name for name, _ in OPTIMIZERS[kind][1](model)]}


def of_named_parameters(kind: str, folder: Path) -> dict[str, Any]:
    model, optimizer = trained(kind, named=True)
    torch.save({"net": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 3}, folder / "state.pt")
    torch_save_to_dcp(folder / "state.pt", folder / "dcp")
    return {}


def of_lightning(kind: str, folder: Path) -> dict[str, Any]:
    model, optimizer = trained(kind)
    state = {
        "epoch": 3,
        "state_dict": {f"backbone.{name}": x for name, x in model.state_dict().items()},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "callbacks": {"ModelCheckpoint": {"best": torch.tensor(1.0), "worst": float("inf")}},
    }
    torch.save(state, folder / "state.ckpt")
    torch_save_to_dcp(folder / "state.ckpt", folder / "dcp")
    names = [name for name, _ in OPTIMIZERS[kind][1](model)]
    return {"parameters": names, "model": "state_dict.backbone", "skip": ["callbacks", "lr_schedulers"]}


def of_dcp(kind: str, folder: Path) -> dict[str, Any]:
    model, optimizer = trained(kind)
    parameters, states = get_state_dict(model, optimizer)
    dcp_save({"app": {"model": parameters, "optim": states}, "epoch": 3}, checkpoint_id=folder / "dcp")
    return {}


def of_torchtitan(kind: str, folder: Path) -> dict[str, Any]:
    model, optimizer = trained(kind)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    parameters, states = get_state_dict(model, optimizer, options=options)
    dcp_save({**parameters, "optimizer": states, "epoch": 3}, checkpoint_id=folder / "dcp")
    return {"model": ""}


def sharded(rank_count: int) -> nn.Module:
    """Uneven shards, with a rank that holds nothing of some."""
    mesh = sw.init_device_mesh("cpu", (rank_count,))
    rows = sw.Shard(0, sizes=(6, 1, 0)[:rank_count]) if rank_count > 1 else sw.Shard(0)
    plan = {"0.*": [sw.Shard(0)], "1.weight": [rows if rank_count != 2 else sw.Shard(0, sizes=(5, 2))]}
    return sw.shard_module(made(), plan | {"2.weight": [sw.Shard(1)]}, mesh=mesh)


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[int]]:
    found = {name: bits(full(x)) for name, x in model.state_dict().items()}
    for name, p in model.named_parameters():
        found |= {f"{name} {key}": bits(full(x)) for key, x in optimizer.state[p].items()}
    return found


WRITERS = [of_torch_save, of_named_parameters, of_lightning, of_dcp, of_torchtitan]


@pytest.mark.parametrize(
    ("write", "kind"), [*((write, "AdamW") for write in WRITERS), (of_torch_save, "SGD"), (of_dcp, "Adam")]
)
def test_training_goes_on_bitwise_as_in_one_process(
    write: Callable[[str, Path], dict[str, Any]], kind: str, tmp_path: Path
) -> None:
    arguments = write(kind, tmp_path)
    run = import_torch(tmp_path / "dcp", tmp_path / "run", allow_pickle_metadata=True, step=3, **arguments)
    model, optimizer = trained(kind)
    before, groups = values_of(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    take_step(model, optimizer, 2)
    after = values_of(model, optimizer)
    make, order = OPTIMIZERS[kind]

    def go_on(rank_count: int) -> None:
        other, extra = sharded(rank_count), {"epoch": 0}
        fresh = make([p for _, p in order(other)])
        restore(run, other, fresh, extra=extra)
        assert (values_of(other, fresh), extra) == (before, {"epoch": 3})
        assert fresh.state_dict()["param_groups"] == groups
        take_step(other, fresh, 2)
        assert values_of(other, fresh) == after

    for rank_count in (1, 2, 3):
        world(rank_count).run(go_on, rank_count)


def test_nothing_but_names_changes(tmp_path: Path) -> None:
    arguments = of_lightning("Adam", tmp_path) | {"skip": ["callbacks.ModelCheckpoint.worst"]}
    run = import_torch(tmp_path / "dcp", tmp_path / "run", allow_pickle_metadata=True, **arguments)
    model, optimizer = trained("Adam")
    expected = state_of(model, optimizer)
    manifest = read_manifest(run)
    tensors = {name for name, value in expected.items() if isinstance(value, Tensor)}
    assert manifest.tensors.keys() == tensors | {"callbacks.ModelCheckpoint.best"}
    assert manifest.values.keys() == {"optimizer.param_groups", "epoch", "lr_schedulers"}


def test_a_checkpoint_goes_to_a_file_of_torch_and_back(tmp_path: Path) -> None:
    model, optimizer = trained("AdamW")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    extra = {"epoch": 3, "seen": [[1, 2], []]}
    save(tmp_path / "run", state_of(model, optimizer, scheduler) | extra, step=1)
    export_torch(tmp_path / "run", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"state.pt: is a file, not a folder .*torch_save_to_dcp\(file, folder\)"):
        import_torch(tmp_path / "state.pt", tmp_path / "back", allow_pickle_metadata=True)
    torch_save_to_dcp(tmp_path / "state.pt", tmp_path / "again")
    for folder in ("dcp", "again"):
        back = import_torch(tmp_path / folder, tmp_path / f"of {folder}", allow_pickle_metadata=True, step=1)
        assert diff(tmp_path / "run", back) == []
    other = made()
    fresh = OPTIMIZERS["AdamW"][0]([p for _, p in biases_first(other)])
    restore(back, other, fresh, torch.optim.lr_scheduler.StepLR(fresh, 2), extra={"epoch": 0, "seen": None})
    assert values_of(other, fresh) == values_of(model, optimizer)
    export_torch(tmp_path / "run", tmp_path / "module", prefix="model.")
    dcp_to_torch_save(tmp_path / "module", tmp_path / "module.pt")
    plain = made()
    plain.load_state_dict(torch.load(tmp_path / "module.pt"))
    assert all(bits(a) == bits(b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


NUMBERED = [{"params": [0, 1], "lr": 0.1}]
NAMED = [{"params": ["a", "b"], "lr": 0.1}]


def at(*names: str) -> dict[str, tuple[str | int, ...]]:
    """Paths of tensors of a module, `key.name` each."""
    return {name: tuple(name.rsplit(".", 1)) for name in names}


@pytest.mark.parametrize(
    ("tensors", "values", "given", "text"),
    [
        (["model_state_dict.a", "net.a"], {}, {}, r"several modules: 'model_state_dict', 'net'. Fix: model='model_st"),
        (["net.a"], {}, {"model": "nte"}, r"under 'nte', which model names. Did you mean 'net'\? Fix: .*'net.a'"),
        ([], {"d.param_groups": NAMED, "g.param_groups": NAMED}, {}, r"Fix: optimizers=\['d'\] .*=\['d', 'g'\] all"),
        ([], {"opt.param_groups": NAMED}, {"optimizers": ["opr"]}, r"'opr'. Did you mean 'opt'\? Fix: .*: 'opt'"),
        ([], {}, {"optimizers": ["opt"]}, r"called 'opt'. Fix: .*there is none"),
        (["net.a", "net.b"], {"opt.param_groups": NUMBERED}, {}, r"the module has 'a', 'b'. Fix: parameters=\["),
        (["net.a"], {"opt.param_groups": NUMBERED}, {"parameters": ["a"]}, r"has 1 names, and 2 parameters have num"),
        (["net.a"], {"opt.param_groups": NUMBERED}, {"parameters": ["a", "a"]}, r"'a' is the name of several param"),
        (["net.a"], {"opt.param_groups": NUMBERED}, {"parameters": ["a", "c"]}, r"the module has no 'c', which"),
        (["net.a"], {"opt.param_groups": NAMED}, {"parameters": ["a", "b"]}, r"Fix: leave parameters out"),
        (["net.a"], {"opt.param_groups": NAMED}, {}, r"the module has no 'b', which is a parameter of an optimizer"),
        ([], {"opt.param_groups": [{"params": [1, 0]}]}, {"parameters": ["a", "b"]}, r"numbers its parameters 1, 0"),
        (["opt.state.7.m"], {"opt.param_groups": NUMBERED}, {"parameters": ["a", "b"]}, r"'opt.state.7.m' is a stat"),
        (["opt.state.a.m.0"], {"opt.param_groups": NAMED}, {}, r"'opt.state.a.m.0' is a state, but its param"),
        (["net.a", "model.a"], {}, {"model": "net"}, r"'net.a' and 'model.a' would both be called 'model.a'"),
    ],
)  # fmt: skip
def test_what_may_mean_several_things_is_refused_with_them(
    tensors: list[str], values: dict[str, Any], given: dict[str, Any], text: str
) -> None:
    with pytest.raises(CheckpointError, match=text):
        renamed(tensors, values, at(*tensors), TrainingNames(**given))


def test_several_optimizers_are_imported_in_the_order_that_is_given() -> None:
    tensors = ["net.a", "net.b", "net.c", "d.state.0.m", "g.state.0.m", "g.state.1.m", "old.state.0.m"]
    values = {
        "d.param_groups": [{"params": [0], "lr": 1}],
        "g.param_groups": [{"params": [0], "lr": 2}, {"params": [1], "lr": 3}],
        "old.param_groups": NUMBERED,
    }
    given = TrainingNames(optimizers=["g", "d"], parameters=["b", "c", "a"])
    names, found = renamed(tensors, values, at(*tensors), given)
    assert {new: old for new, old in names.items() if new.startswith("optimizer.")} == {
        "optimizer.a.m": "d.state.0.m", "optimizer.b.m": "g.state.0.m", "optimizer.c.m": "g.state.1.m"
    }  # fmt: skip
    assert names["old.state.0.m"] == "old.state.0.m"
    assert found.pop("old.param_groups") == NUMBERED
    assert found == {
        "optimizer.param_groups": [
            {"params": ["b"], "optimizer": "g", "lr": 2},
            {"params": ["c"], "optimizer": "g", "lr": 3},
            {"params": ["a"], "optimizer": "d", "lr": 1},
        ]
    }


def test_names_of_a_module_alone_stay_as_they_are() -> None:
    tensors = ["net.0.weight", "state_dict.weight"]  # submodules: the path of each is its name
    names, _ = renamed(tensors, {}, {name: (name,) for name in tensors}, TrainingNames())
    assert names == {name: name for name in tensors}


class Shapes(nn.Module):
    """Two parameters of one shape, one of the transposed shape, one without dims and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"a": (4, 7), "b": (7, 4), "c": (4, 7), "d": (7,), "e": (), "f": (0, 4)}.items():
            setattr(self, name, nn.Parameter(torch.ones(shape)))


def check_order(model: Shapes, states: dict[str, tuple[int, ...]], order: Sequence[str]) -> None:
    tensors = {f"net.{name}": tuple(p.shape) for name, p in model.named_parameters()} | states
    groups = {"opt.param_groups": [{"params": [*range(6)]}]}
    found, _ = renamed(tensors, groups, at(*tensors), TrainingNames(parameters=order))
    check_shapes(found, tensors, order)


def test_every_order_is_refused_in_which_shapes_do_not_fit() -> None:
    """Of all 720 two parameters of one shape can be exchanged, and two with less than two elements."""
    makes: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Rprop,
    ]
    for make in makes:
        model = Shapes()
        optimizer = make(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        states = {
            f"opt.state.{number}.{key}": tuple(x.shape)
            for number, of in optimizer.state_dict()["state"].items()
            for key, x in of.items()
            if isinstance(x, Tensor)
        }
        accepted = []
        for order in permutations("abcdef"):
            with suppress(CheckpointError):
                check_order(model, states, order)
                accepted.append("".join(order))
        assert accepted == ["abcdef", "abcdfe", "cbadef", "cbadfe"]
    # Numbers of rows and columns, and one for all, are smaller than their parameter.
    states = {"opt.state.0.row": (4,), "opt.state.0.rows": (4, 1), "opt.state.0.column": (7,), "opt.state.0.step": ()}
    check_order(Shapes(), states | {"opt.state.4.one": (1,), "opt.state.5.step": ()}, "abcdef")


def test_an_order_that_does_not_fit_is_refused_with_both_shapes(tmp_path: Path) -> None:
    of_torch_save("AdamW", tmp_path)  # whose optimizer got the biases first
    names = [name for name, _ in made().named_parameters()]

    def body() -> None:
        import_torch(tmp_path / "dcp", tmp_path / "run", allow_pickle_metadata=True, parameters=names)

    assert failed(body, size=1).startswith(
        "'optimizer_state_dict.state.5.exp_avg' has shape (7, 7), and '2.bias', which is parameters[5], (7,). "
        "Of that shape: '2.weight'. Fix: parameters=[name for name, _ in model.named_parameters()] if "
    )
    assert not (tmp_path / "run").exists()


def test_groups_that_are_equal_in_a_flattened_state_are_not_guessed(tmp_path: Path) -> None:
    model = made()
    halves = [{"params": list(model[0].parameters())}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
    optimizer = torch.optim.SGD(halves, lr=0.1, momentum=0.9)
    take_step(model, optimizer, 0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    parameters, states = get_state_dict(model, optimizer, options=options)
    dcp_save({"model": parameters, "optimizer": states}, checkpoint_id=tmp_path / "dcp")
    run = import_torch(tmp_path / "dcp", tmp_path / "run", allow_pickle_metadata=True)
    with pytest.raises(CheckpointError, match=r"parameters 0.weight, 0.bias: in groups of .* in one group here"):
        restore(run, model, optimizer)


def test_what_is_skipped_has_to_be_there_and_what_is_no_json_says_how_to_skip_it(tmp_path: Path) -> None:
    arguments = of_lightning("SGD", tmp_path)
    for skip, text in {
        ("epoc",): r"no such name. Did you mean 'epoch'\?",
        (): r"Fix: skip=\['callbacks.ModelCheckpoint.worst'\] \(--skip\) imports all",
    }.items():
        with pytest.raises(CheckpointError, match=text):
            import_torch(tmp_path / "dcp", tmp_path / "run", allow_pickle_metadata=True, **(arguments | {"skip": skip}))
