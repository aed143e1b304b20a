"""The page docs/reference/torch-patches.md, made from the list in the code: `python -m tools.torch_patches_page`."""

from pathlib import Path

from shardwise._torch_bridge.torch_patches import PATCHES, TESTED, USES_LOCAL_SHARD, Patch

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "torch-patches.md"

HEADER = f"""# What shardwise changes in torch

shardwise replaces the attributes of torch below before a process makes its first DTensor. `import shardwise` replaces
nothing; it registers containers such as `KeyedTensor` with `torch.utils._pytree`. A test compares all attributes of
torch before and after a training step.

* Tensors that are not DTensors behave as before.
* A name that you bound earlier, as by `from torch import tensor`, is not replaced.
* `shardwise._torch_bridge.torch_patches.uninstall()` undoes all replacements.
* The tested versions are torch {" and ".join(TESTED)}. Another version warns once. A version that lacks one of the
  attributes is refused.

`python -m tools.torch_patches_page` makes this page.
"""

SAME = """## Functions that take the local shard

torch asks no subclass in these functions. Without the replacement, each silently uses the local shard.
"""

OTHERS = """## Other attributes
"""

FOOTER = """## Official hooks

| hook | what it does | installed before |
| --- | --- | --- |
| `register_optimizer_step_pre_hook` of `torch.optim.optimizer` | Elementwise optimizers run on local tensors. \
`ZeroRedundancyOptimizer` is refused if the shards of its ranks differ. | the first DTensor |
| `sys.meta_path` | Replaces the attributes of torch modules that you import later. | the first DTensor |
| `sys.excepthook` | Reports an uncaught exception to the other ranks, then calls the previous hook. | the first world \
of processes |
| `threading.excepthook` | Records an uncaught exception of a thread, then calls the previous hook. | the first world \
of processes |
"""


def _entry(patch: Patch) -> str:
    names = ", ".join(f"`{name}`" for name in ([patch.listed] if patch.listed else patch.targets))
    without = "" if patch.without == USES_LOCAL_SHARD else f" Without it, {patch.without}."
    return f"* {names}: {patch.what}{without}"


def page() -> str:
    """The text of the page."""
    same = [_entry(patch) for patch in PATCHES if patch.without == USES_LOCAL_SHARD]
    others = [_entry(patch) for patch in PATCHES if patch.without != USES_LOCAL_SHARD]
    return "\n".join([HEADER, SAME, *same, "", OTHERS, *others, "", FOOTER])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
