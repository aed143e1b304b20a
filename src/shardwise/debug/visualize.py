"""`visualize_sharding`, as in `torch.distributed.tensor.debug`."""

import sys

from shardwise import _collectives as collectives
from shardwise._layout import checked
from shardwise._pictures import picture
from shardwise._tensor import DTensor
from shardwise._tensor.torch_objects import TorchDTensor, is_torch_dtensor


@checked
def visualize_sharding(dtensor: DTensor | TorchDTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which rank holds which shard of `dtensor`, on the first rank of its mesh.

    Prints nothing for a tensor without elements. `shardwise.picture` returns the picture, also as SVG.

    Args:
        header: a line above the picture.
        use_rich: let `rich` choose colours, which knows notebooks and FORCE_COLOR. Otherwise a terminal gets
            colours unless NO_COLOR is set.
    """
    if is_torch_dtensor(dtensor):
        dtensor = DTensor.from_torch_dtensor(dtensor.detach())
    assert isinstance(dtensor, DTensor)
    if not dtensor.numel() or collectives.rank() != dtensor.layout_.mesh.ranks[0]:
        return
    drawn = picture(dtensor, header)
    if not use_rich:
        drawn.show()
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    console.print(Text.from_ansi(drawn.text(console.width, colour=True)))
