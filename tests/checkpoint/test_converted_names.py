"""Names that `from_pretrained` converts: published files into sharded models, equal to `from_pretrained`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise import Mesh, Shard, shard_module
from shardwise.checkpoint import converted_names, load_safetensors, sources
from shardwise.parallel import fully_shard, parallelize_module, plan_from_transformers
from shardwise.testing import world
from tests.checkpoint.states import counted_reads, failed, full
from tools.model_zoo import FAMILIES
from tools.models import tensor_plan

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.slow

S0, S1 = Shard(0), Shard(1)
EXPERTS = "**.experts.*"


def published(model: Any, folder: Path, max_shard_size: str = "20KB") -> dict[str, Tensor]:
    """Save random values as `save_pretrained` writes them; what `from_pretrained` loads from there."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.normal_(std=0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if "Qwen3VLMoe" in type(model).__name__:  # published transposed, which save_pretrained does not restore
        rewritten(folder, {n: x.mT if ".experts." in n else x for n, x in stored(folder).items()})
    found: dict[str, Tensor] = type(model).from_pretrained(folder).state_dict()
    return found


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def rewritten(folder: Path, tensors: dict[str, Tensor]) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")


def mixtral(**options: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=3, num_local_experts=5, num_experts_per_tok=2, **options,
        )
    ).eval()  # fmt: skip


def qwen_with_images() -> Any:
    """Its experts are stored transposed."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {
        "vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "moe_intermediate_size": 10,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4, "num_experts": 5,
        "num_experts_per_tok": 2, "mlp_only_layers": [], "decoder_sparse_step": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 12, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24, "patch_size": 2,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [],
    }  # fmt: skip
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))


def dino() -> Any:
    """One stored weight is two here."""
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(
        Dinov2Config(hidden_size=12, num_hidden_layers=2, num_attention_heads=2, use_swiglu_ffn=True, image_size=8,
                     patch_size=4)
    )  # fmt: skip


OWN: dict[str, Callable[[], Any]] = {"Mixtral": mixtral, "Qwen3-VL-MoE": qwen_with_images, "DINOv2": dino}
CONVERTED = [*OWN, "Qwen2-MoE", "Qwen3-MoE", "DeepSeek-V3", "Jamba", "LLaVA", "Swin", "GPT-NeoX"]


@pytest.mark.parametrize("name", CONVERTED)
def test_published_files_load_into_a_sharded_model_as_by_from_pretrained(name: str, tmp_path: Path) -> None:
    model = OWN[name]() if name in OWN else FAMILIES[name].build()
    want = published(model, tmp_path)
    given = {(name, x.shape) for name, x in stored(tmp_path).items()}
    assert given - {(name, x.shape) for name, x in want.items()}  # there is something to convert
    other = type(model)(model.config)

    def body() -> None:
        sharded = shard_module(deepcopy(other), tensor_plan(other))
        assert load_safetensors(tmp_path, sharded) == ([], [])
        for key, x in sharded.state_dict().items():
            assert full(x).equal(want[key]), key

    for ranks in (1, 2, 3, 4):
        world(ranks).run(body)


@pytest.mark.parametrize(
    "plan", [{EXPERTS: S0}, {EXPERTS: S1}, {EXPERTS: Shard(2)}, {EXPERTS: Shard(0, (0, 5, 0))}], ids=str
)
def test_shards_of_stacked_experts_are_read_in_parts_of_a_few_bytes(
    plan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Parts that begin and end within an expert, and go over several."""
    want = published(mixtral(), tmp_path)
    other = mixtral()

    def body() -> None:
        sharded = shard_module(deepcopy(other), plan)
        load_safetensors(tmp_path, sharded)
        assert all(full(x).equal(want[key]) for key, x in sharded.state_dict().items())

    for size in (100, 5000):
        monkeypatch.setattr(sources, "WINDOW_BYTES", size)
        world(3).run(body)


def test_a_rank_reads_its_own_experts_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    published(mixtral(), tmp_path, "10GB")
    read, other = counted_reads(monkeypatch), mixtral()

    def body() -> int:
        sharded = shard_module(deepcopy(other), {EXPERTS: S0})
        load_safetensors(tmp_path, sharded)
        return sum(p.to_local().nbytes for p in sharded.parameters())

    held = world(3).run(body)
    header = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert [read[rank] - header for rank in range(3)] == held
    assert max(held) < 0.6 * sum(p.nbytes for p in other.parameters())


def test_one_conversion_of_transformers_at_a_time_is_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And each is done once on a rank, although it is read in parts."""
    want = published(qwen_with_images(), tmp_path)
    monkeypatch.setattr(sources, "WINDOW_BYTES", 100)
    done: list[str] = []
    plain = converted_names._Names._convert

    def counting(self: Any, converter: Any, group: Any, read: Any) -> dict[str, Tensor]:
        found = plain(self, converter, group, read)
        if not next(iter(found.values())).is_meta:
            assert self._last == (None, {})
            done.append(group.name)
        return found

    monkeypatch.setattr(converted_names._Names, "_convert", counting)
    model = qwen_with_images()
    load_safetensors(tmp_path, model)
    assert all(x.equal(want[key]) for key, x in model.state_dict().items())
    assert sorted(done) == sorted(name for name in want if ".experts." in name)


@pytest.mark.parametrize("way", ["experts", "tp", "dp", "dp and tp"])
def test_a_mixtral_of_the_meta_device_is_loaded_from_published_files(way: str, tmp_path: Path) -> None:
    """Its norms, routers and stacked experts have no reset_parameters()."""
    from accelerate import init_empty_weights

    plain = mixtral()
    published(plain, tmp_path)
    ids = torch.randint(37, (3, 7))
    expected = plain(ids).logits
    mesh = Mesh((2, 2), names=("dp", "tp"))

    def body() -> None:
        with init_empty_weights():
            model = mixtral()
        if way == "experts":
            shard_module(model, {EXPERTS: S0})
        if "tp" in way:
            parallelize_module(model, mesh["tp"], plan_from_transformers(model))
        for unit in (*model.model.layers, model) if "dp" in way else ():
            fully_shard(unit, mesh=mesh["dp"])
        load_safetensors(tmp_path, model)
        torch.testing.assert_close(full(model(ids).logits), expected)

    world(4).run(body)


def test_a_fully_sharded_model_has_the_names_of_its_class(tmp_path: Path) -> None:
    """Some are known for the class of a submodel only, and `fully_shard` changes the class."""
    model = FAMILIES["LLaVA"].build()
    want = published(model, tmp_path)
    other = type(model)(model.config)

    def body() -> None:
        sharded = deepcopy(other)
        for unit in (sharded.model.language_model, sharded.model, sharded):
            fully_shard(unit)
        load_safetensors(tmp_path, sharded)
        assert all(full(x).equal(want[key]) for key, x in sharded.state_dict().items())

    world(2).run(body)


def test_files_of_a_model_load_into_the_model_inside_it_and_the_other_way_round(tmp_path: Path) -> None:
    model = mixtral()
    want = published(model, tmp_path)

    def inner() -> None:
        sharded = shard_module(mixtral().model, {EXPERTS: S0})
        assert load_safetensors(tmp_path, sharded, strict=False) == ([], ["lm_head.weight"])
        assert all(full(x).equal(want[f"model.{key}"]) for key, x in sharded.state_dict().items())

    def outer() -> None:
        sharded = shard_module(mixtral(), {EXPERTS: S0})
        assert load_safetensors(tmp_path, sharded, strict=False) == (["lm_head.weight"], [])
        assert all(full(x).equal(want[key]) for key, x in sharded.state_dict().items() if key != "lm_head.weight")

    world(2).run(inner)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    model.model.save_pretrained(tmp_path)
    world(2).run(outer)


def test_names_that_a_model_passes_over_are_no_error(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=6
    )
    model = LlamaForCausalLM(config)
    want = published(model, tmp_path)
    rewritten(tmp_path, stored(tmp_path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})
    other = LlamaForCausalLM(config)
    assert load_safetensors(tmp_path, other) == ([], [])
    assert all(x.equal(want[key]) for key, x in other.state_dict().items())


@contextmanager
def changed(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a Mixtral as they are published, to be changed."""
    published(mixtral(), folder)
    tensors = stored(folder)
    yield tensors
    rewritten(folder, tensors)


def refused(folder: Path, **options: Any) -> str:
    """The error on both ranks; nothing changes."""
    other = mixtral()

    def body() -> None:
        sharded = shard_module(deepcopy(other), {EXPERTS: S0})
        try:
            load_safetensors(folder, sharded, **options)
        finally:
            assert all(full(x).equal(other.state_dict()[key]) for key, x in sharded.state_dict().items())

    return failed(body)


EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"
STACK = "model.layers.1.mlp.experts.gate_up_proj"


def test_experts_that_are_missing_fewer_or_numbered_otherwise_are_refused_by_both_names(tmp_path: Path) -> None:
    of_the_first = f"(of {EXPERT.format(0, 'w1')!r} and {{}} more in the files): "
    with changed(tmp_path / "missing") as tensors:
        del tensors[EXPERT.format(4, "w1")]
    for strict in (True, False):
        text = refused(tmp_path / "missing", strict=strict)
        assert f"{STACK!r} cannot be made {of_the_first.format(8)}RuntimeError" in text
        assert "Fix: make the module as the files have it" in text
    with changed(tmp_path / "numbered") as tensors:
        for weight in ("w1", "w2", "w3"):
            tensors[EXPERT.format(7, weight)] = tensors.pop(EXPERT.format(2, weight))
    text = refused(tmp_path / "numbered")
    assert f"{STACK!r} cannot be made {of_the_first.format(9)}" in text
    assert "'.experts.*.w1.weight' is there for 0, 1, 3, 4, 7" in text
    with changed(tmp_path / "fewer") as tensors:
        for weight in ("w1", "w2", "w3"):
            del tensors[EXPERT.format(4, weight)]
    shapes = "shape (4, 80, 24) in the files, (5, 80, 24) in the module"
    assert f"{STACK!r} {of_the_first.format(7)}{shapes}" in refused(tmp_path / "fewer")


def test_two_names_of_one_parameter_are_refused(tmp_path: Path) -> None:
    gate = "model.layers.0.{}.gate.weight"
    with changed(tmp_path) as tensors:
        tensors[gate.format("mlp")] = tensors[gate.format("block_sparse_moe")] + 1
    text = refused(tmp_path)
    assert f"{gate.format('mlp')!r} cannot be made (of {gate.format('block_sparse_moe')!r} and 1 more" in text


def test_quantised_files_are_refused(tmp_path: Path) -> None:
    """Their scales are names that only the files have; without these names nothing says that values are scaled."""
    with changed(tmp_path) as tensors:
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    assert f"only in the files: '{name}_scale_inv'" in refused(tmp_path)
    scaled = f"{name!r}: torch.float8_e4m3fn in the files, whose scales nothing applies, torch.float32 in the module"
    assert scaled in refused(tmp_path, strict=False)
