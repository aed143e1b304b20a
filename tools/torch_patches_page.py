"""The page docs/reference/torch-patches.md, made from the list in the code: `python -m tools.torch_patches_page`."""

from pathlib import Path

from shardwise._torch_bridge.torch_patches import PATCHES, TESTED

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "torch-patches.md"

HEADER = f"""# What shardwise changes in torch

Made by `python -m tools.torch_patches_page` from `shardwise/_torch_bridge/torch_patches.py`.

`import shardwise` changes nothing; containers such as `KeyedTensor` are registered with `torch.utils._pytree`. Before
the first DTensor of a process is made, the attributes below are replaced;
`shardwise._torch_bridge.torch_patches.uninstall()` undoes it. Tensors that are no DTensors behave as before.
`tests/torch_bridge/test_torch_patches.py` compares all attributes of torch before and after a training step: nothing
else changes. A name that was bound earlier, as by `from torch import tensor`, is not replaced. All patches apply to
torch {" and ".join(TESTED)}, the tested versions. Another version warns once; a version without one of the attributes
is refused.

## Replaced attributes
"""


FOOTER = """## Official hooks in use

| hook | what it does | installed before |
|---|---|---|
| `torch.optim.optimizer.register_optimizer_step_pre_hook` | Elementwise optimizers take a step on the local tensors \
where parameters, gradients and states share layouts. `ZeroRedundancyOptimizer` is refused where the ranks of its \
group hold different shards. | the first DTensor |
| `sys.meta_path` | Replaces the attributes of modules that are imported later, which shardwise does not do. | the \
first DTensor |
| `sys.excepthook` | Reports the uncaught exception of this rank to the other ranks, then calls the hook that was \
there. | the first world of several processes |
| `threading.excepthook` | Notes the uncaught exception of a thread for the error that other ranks may raise, then \
calls the hook that was there. | the first world of several processes |
"""


def page() -> str:
    """The text of the page."""
    lines = [HEADER]
    for patch in PATCHES:
        names = [patch.listed] if patch.listed else patch.targets
        lines += ["### " + ", ".join(f"`{name}`" for name in names), "", patch.what, ""]
        lines += [f"* Why no official hook: {patch.why}", f"* Without it: {patch.without}.", ""]
    return "\n".join([*lines, FOOTER])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
