"""`shardwise plan` prints what `plan_tables` and `plan_module` find, and refuses the rest in one line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import OnRanks, Shard
from shardwise import _cli as cli
from shardwise._cli.calibration import write_costs
from shardwise._cli.hugging_face import read_model
from shardwise._cli.table_files import read_tables
from shardwise._collectives.cost_tables import COLLECTIVES, Measured
from shardwise.embedding import Adagrad, EmbeddingBagConfig, PoolingType, RowWiseAdagrad
from shardwise.plan import BatchShape, ModulePlan, TablePlan, Topology, plan_module, plan_tables
from tools.model_zoo import FAMILIES

Captured = pytest.CaptureFixture[str]
TOML = """
[tables]
users = { num_embeddings = 4_000, embedding_dim = 16, ids_per_bag = 20, allowed = ["table", "replicated"] }
[tables.items]
num_embeddings = 700
embedding_dim = 32
feature_names = ["bought", "seen"]
ids_per_bag = [1, 5.5]
data_type = "bfloat16"
pooling = "mean"
[tables.shops]
num_embeddings = 90
embedding_dim = 8
pinned = "OnRanks(1)"
"""
CSV = """\ufeffname, num_embeddings,embedding_dim,feature_names,ids_per_bag,data_type,pooling,allowed,pinned
users,4000,16,,20,,,table replicated,
items,700,32,bought seen,1 5.5,bfloat16,MEAN

shops,90,8,,,,,,OnRanks(1)
"""
CONFIGS = [
    EmbeddingBagConfig(4000, 16, "users", feature_names=["users"]),
    EmbeddingBagConfig(
        700, 32, "items", torch.bfloat16, feature_names=["bought", "seen"], pooling=PoolingType.MEAN
    ),
    EmbeddingBagConfig(90, 8, "shops", feature_names=["shops"]),
]  # fmt: skip
IDS = {"users": 20.0, "bought": 1.0, "seen": 5.5, "shops": 1.0}
ALLOWED, PINNED = {"users": ("table", "replicated")}, {"shops": OnRanks(1)}
CPU = ["--gpus", "2", "--preset", "cpu"]
CPUS = Topology.preset("cpu", ranks_per_host=2)
FUNCTIONS = """
import torch
from shardwise.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from shardwise.plan import BatchShape

number = 3
TABLES = [EmbeddingBagConfig(4000, 16, "users", feature_names=["users"])]

def tables():
    return TABLES

def collection():
    return EmbeddingBagCollection(TABLES, device="meta"), BatchShape(32, 2.0)

def module():
    with torch.device("meta"):
        return torch.nn.Linear(64, 32), (torch.empty(8, 64),), lambda model, x: model(x).sum()

def none():
    return []

def fails():
    return 1 / 0
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {"tables.toml": TOML, "tables.csv": CSV, "my_plans.py": FUNCTIONS}.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "unknown.json").write_text('{"model_type": "lama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "wrong.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": "many"}'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.delitem(sys.modules, "my_plans", raising=False)


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["tables.toml", "tables.csv"])
def test_tables_of_a_file_are_planned(file: str, capsys: Captured) -> None:
    assert read_tables(file) == (CONFIGS, IDS, ALLOWED, PINNED)
    options = ["--batch-size", "99", "--memory", "4MiB", "--head-room", "0.5", "--output", "plan.toml"]
    options += ["--optimizer", "Adagrad", "--objective", "memory"]
    assert cli.main(["plan", file, *CPU, *options]) == 0
    found = plan_tables(
        CONFIGS, Topology.preset("cpu", ranks_per_host=2, memory=4 << 20), BatchShape(50, IDS),
        optimizer=Adagrad(lr=0.1), allowed=ALLOWED, pinned=PINNED, head_room=0.5, objective="memory",
    )  # fmt: skip
    assert capsys.readouterr() == (f"{found}\nWrote plan.toml.\n", "")
    assert dict(TablePlan.load("plan.toml", CONFIGS)) == dict(found)


def test_a_page_is_written(capsys: Captured) -> None:
    assert cli.main(["plan", "my_plans:collection", *CPU, "--html", "plan.html"]) == 0
    assert capsys.readouterr().out.endswith("\nWrote plan.html.\n")
    found = plan_tables(CONFIGS[:1], CPUS, BatchShape(32, 2.0), optimizer=RowWiseAdagrad(lr=0.1))
    assert Path("plan.html").read_text(encoding="utf-8") == found.to_html()


def test_what_does_not_fit_is_the_first_line_and_exits_with_3(capsys: Captured) -> None:
    assert cli.main(["plan", "tables.toml", *CPU, "--memory", "150KiB"]) == 3
    out, err = capsys.readouterr()
    assert out.startswith("Does not fit on 2 ranks: a rank has 135 KiB for tables and needs ")
    assert "users (" in out
    assert out.count("\n") == 1
    fix = out.partition("Fix: ranks with ")[2].partition(" MiB")[0]
    assert err == ""
    assert cli.main(["plan", "tables.toml", *CPU, "--memory", f"{fix}MiB"]) == 0


def test_measured_costs_of_the_environment_are_used(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    write_costs(Path("costs.json"), "cpu", "here", {name: Measured(1e6, 0, 500) for name in COLLECTIVES}, None)
    monkeypatch.setenv("SHARDWISE_COSTS", "costs.json")
    assert cli.main(["plan", "tables.toml", *CPU]) == 0
    found = float(capsys.readouterr().out.partition(" ms a step")[0].split()[-1].replace(",", ""))
    assert found > 1000  # each collective takes a second
    assert cli.main(["plan", "tables.toml", "--gpus", "2"]) == 0  # of CUDA devices


def test_a_thousand_tables_are_a_screen_that_fits_a_terminal() -> None:
    names = [f"table_with_a_name_of_some_length_{i}" for i in range(1000)]
    tables = [EmbeddingBagConfig(1000 + i, 16, name, feature_names=["f"]) for i, name in enumerate(names)]
    pinned = {name: OnRanks(0) if i % 3 else Shard(0) for i, name in enumerate(names)}
    plan = plan_tables(tables, Topology.preset("cpu"), BatchShape(8), pinned=pinned)
    lines = plan.text(80).splitlines()
    assert max(map(len, lines[3:])) <= 80
    assert names[999] in plan.text()
    assert len(plan.text().splitlines()) < 50
    assert lines[-1] == f"and 960 more of {sum(1000 + i for i in range(960)) * 64 / 2**20:.1f} MiB: 960 pinned"


# ---- functions -------------------------------------------------------------------------------------------------------


def test_what_a_function_returns_is_planned(capsys: Captured) -> None:
    users, rows = CONFIGS[:1], RowWiseAdagrad(lr=0.1)
    with torch.device("meta"):
        module, x = torch.nn.Linear(64, 32), torch.empty(8, 64)
    expected = {
        "tables": plan_tables(users, CPUS, BatchShape(1024), optimizer=rows),
        "collection": plan_tables(users, CPUS, BatchShape(32, 2.0), optimizer=rows),
        "module": plan_module(module, CPUS, (x,), forward=lambda model, x: model(x).sum()),
    }
    for name, plan in expected.items():
        assert cli.main(["plan", f"my_plans:{name}", *CPU]) == 0
        out = capsys.readouterr().out
        assert out == f"{plan}\n"
        assert out.startswith("Fits: ")


# ---- configs of Hugging Face -----------------------------------------------------------------------------------------


def config_of(family: str, folder: Path) -> str:
    """The path of the config of a small model."""
    import transformers

    one = FAMILIES[family]
    cls: Any = getattr(transformers, one.model)
    config = cls.config_class(**one.config, architectures=[one.model], dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return str(folder / "config.json")


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Mixtral", "BERT", "T5", "ViT"])
def test_a_config_is_a_model_on_meta_with_its_loss(family: str, tmp_path: Path) -> None:
    module, inputs, forward = read_model(config_of(family, tmp_path), 6, 9)
    assert type(module).__name__ == FAMILIES[family].model
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    assert inputs.keys() == {"pixel_values" if family == "ViT" else "input_ids", "labels"}
    assert {len(x) for x in inputs.values()} == {6}
    for x in (*module.to_empty(device="cpu").parameters(), *module.buffers()):
        x.data.zero_()
    loss: Any = forward(module, **{name: torch.zeros_like(x, device="cpu") for name, x in inputs.items()})
    assert loss.shape == ()


def test_a_config_is_planned(tmp_path: Path, capsys: Captured) -> None:
    config_of("Llama", tmp_path)
    assert cli.main(["plan", str(tmp_path), *CPU, "--batch-size", "4", "--context", "8", "--output", "plan.toml"]) == 0
    model = read_model(str(tmp_path), 4, 8)
    plan = plan_module(model.module, CPUS, model.inputs, forward=model.forward)
    assert capsys.readouterr().out == f"{plan}\nWrote plan.toml.\n"
    assert ModulePlan.load("plan.toml").styles == plan.styles
    assert max(map(len, plan.text(80).splitlines()[2:])) <= 80


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["tables.txt", "--gpus", "2"], "'tables.txt' cannot be planned. Fix: "),
        (["missing.toml", "--gpus", "2"], "missing.toml: cannot be read: No such file or directory. Fix: "),
        (["missing.csv", "--gpus", "2"], "missing.csv cannot be read: No such file or directory. Fix: "),
        (["missing.json", "--gpus", "2"], "ConfigError: missing.json cannot be read: No such file or directory. Fix: "),
        (["unknown.json", "--gpus", "2"], "transformers has no model_type 'lama'. Did you mean 'llama'? Fix: "),
        (["wrong.json", "--gpus", "2"], "wrong.json: transformers cannot make LlamaForCausalLM: "),
        (["tables.toml", "--gpus", "0"], "argument --gpus: '0' is not an integer of 1 or more"),
        (["tables.toml", "--gpus", "two"], "argument --gpus: 'two' is not an integer of 1 or more"),
        (["tables.toml", "--gpus", "2", "--gpus-per-host", "4"], "Fix: --gpus-per-host 2, or other --gpus."),
        (["my_plans:fails", "--gpus", "2"], "my_plans:fails failed at my_plans.py:23 in fails: ZeroDivisionError: "),
        (["tables.toml", "--gpus", "12"], "--gpus is 12, expected a multiple of the 8 GPUs of a host. Fix: "),
        (["tables.toml", "--gpus", "8", "--gpus-per-host", "3"], "--gpus is 8, expected a multiple of the 3 GPUs "),
        (["tables.toml", "--gpus", "8", "--preset", "B100"], "There is no preset 'B100'. Did you mean "),
        (["tables.toml", "--gpus", "8", "--memory", "80XB"], "'80XB' is not a size, "),
        (["tables.toml", "--gpus", "8", "--memory", "0"], "'0' is not a size, "),
        (["tables.toml", "--gpus", "8", "--head-room", "1"], "head_room is 1.0, expected 0 to below 1. Fix: "),
        (["my_plans:module", "--gpus", "8", "--head-room", "1"], "head_room is 1.0, expected 0 to below 1. Fix: "),
        (["tables.toml", "--gpus", "8", "--optimizer", "adam"], "argument --optimizer: invalid choice: 'adam'"),
        (["tables.toml", "--gpus", "8", "--context", "3"], "--context does not go with tables.toml. Fix: "),
        (["unknown.json", "--gpus", "8", "--objective", "time"], "--objective does not go with unknown.json. Fix: "),
        (["my_plans:module", "--gpus", "8", "--batch-size", "3"], "--batch-size does not go with my_plans:module. "),
        (["my_plans:none", "--gpus", "8"], "my_plans:none returned []. Fix: a function that returns tables, "),
        (["my_plans:number", "--gpus", "8"], "'my_plans:number' is not a function. Fix: name one that takes no "),
        (["os:listdir", "--gpus", "8"], "os:listdir returned"),
        (["os:rename", "--gpus", "8"], "'os:rename' has other arguments: missing a required argument: 'src'. Fix: "),
        (["tables.toml", "--gpus", "1"], "Table shops: it is pinned where it cannot be: OnRanks(1) on axis 0 "),
        (["missing.toml", "--gpus", "2", "--output", "no/plan.toml"], "no/plan.toml cannot be written. Fix: "),
        (["missing.toml", "--gpus", "2", "--html", "."], ". cannot be written. Fix: "),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exits_with_2(argv: list[str], why: str, capsys: Captured) -> None:
    assert cli.main(["plan", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert why in err.splitlines()[-1]


HEADER = "name,num_embeddings,embedding_dim"


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("a.csv", "", "a.csv: its first line has no column name. Fix: "),
        ("a.csv", "\n", "a.csv: its first line has no column name. Fix: "),
        ("a.csv", HEADER, "a.csv has no tables. Fix: "),
        ("a.csv", f"{HEADER}\nt,5,4,3", "a.csv, line 2: 4 cells under 3 columns. Fix: "),
        ("a.csv", f"{HEADER}\nt,5,4\nu,many,4", "a.csv, line 3: num_embeddings is 'many', expected an integer. Fix: "),
        ("a.csv", f"{HEADER}\nt,-5,4", "a.csv, line 2: Table 't': -5 rows of 4 columns, expected 1 or more of each. "),
        ("a.csv", f"{HEADER}\n\nt,5", "a.csv, line 3: embedding_dim is missing. Fix: "),
        ("a.csv", f"{HEADER}\nt,5,4\nt,6,4", "a.csv, line 3: there is another table 't'. Fix: "),
        (
            "a.csv",
            f"{HEADER}\n,5,4",
            "no dot, because it is part of the parameter's name. Fix: 'table'.",
        ),
        ("a.csv", f"{HEADER},dtype\nt,5,4,f", "a.csv, line 2: unknown 'dtype'. Did you mean 'data_type'? Fix: "),
        ("a.csv", f"{HEADER},data_type\nt,5,4,nn", "data_type is 'nn', expected a dtype such as bfloat16. Fix: "),
        ("a.csv", f"{HEADER},allowed\nt,5,4,row rows", "allowed is ['row', 'rows'], expected shardings of table, "),
        ("a.csv", f"{HEADER},pinned\nt,5,4,Shared(0)", "pinned is 'Shared(0)', expected a placement such as "),
        ("a.csv", f"{HEADER},ids_per_bag\nt,5,4,1 2", "line 2: ids_per_bag has 2 numbers for 1 features. Fix: "),
        ("a.csv", f"{HEADER},ids_per_bag\nt,5,4,-1", "line 2: ids_per_bag is ['-1'], expected a number of 0 or more, "),
        ("a.csv", f"{HEADER},ids_per_bag\nt,5,4,nan", "line 2: ids_per_bag is ['nan'], expected a number of 0 or more"),
        ("a.csv", f"{HEADER},num_embeddings\nt,5,4,6", "a.csv: its first line has num_embeddings more than once. Fix"),
        (
            "a.csv",
            f"{HEADER},feature_names,ids_per_bag\nt,5,4,f,1\nu,5,4,f,2",
            "a.csv, line 3: another table has other ids_per_bag of 'f'. Fix: ",
        ),
        ("a.toml", "", "a.toml has no tables. Fix: "),
        ("a.toml", "[tables]\n", "a.toml has no tables. Fix: "),
        ("a.toml", "[table]\n", "a.toml: expected [tables] and nothing else. Fix: "),
        ("a.toml", "[[tables]]\n", "a.toml: expected [tables] and nothing else. Fix: "),
        ("a.toml", "[tables]\nt = 5", "a.toml: table t is 5. Fix: "),
        ("a.toml", "[tables.t]\n[tables.t]", "a.toml: is not TOML: "),
        ("a.toml", "[tables.t]\nnum_embeddings = 1e6", "table t: num_embeddings is 1000000.0, expected an integer. "),
        ("a.toml", "[tables.t]\nfeature_names = {a = 1}", "table t: feature_names is {'a': 1}, expected names. Fix: "),
        ("a.toml", "[tables.t]\nnum_embedings = 1", "table t: unknown 'num_embedings'. Did you mean 'num_embeddings'"),
        ("a.toml", "[tables.t]\nname = 1", "table t: unknown 'name'. Fix: one of num_embeddings, "),
        ("config.json", "{", "config.json is not JSON: "),
        ("config.json", "[]", "config.json has no model_type or no architectures. Fix: "),
        ("config.json", '{"model_type": "llama", "architectures": []}', "transformers has no architecture ''. Fix: "),
    ],
)
def test_a_wrong_file_is_one_line_that_says_where(file: str, content: str, why: str, capsys: Captured) -> None:
    Path(file).write_text(content, encoding="utf-8")
    assert cli.main(["plan", file, "--gpus", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert why in err


def test_without_transformers_the_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["plan", "unknown.json", "--gpus", "2"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: Models of Hugging Face need transformers, which is not installed. "
        "Fix: pip install transformers.\n"
    )
