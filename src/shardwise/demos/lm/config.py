"""What can be set for a run of the language model. Imports no torch, so that it can be read and printed at once."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from shardwise.demos.config import RunConfig
from shardwise.errors import ConfigError
from shardwise.layout import Mesh, parse_mesh

TENSOR_AXIS = "tp"  # shards the model; every other axis of the mesh shards the batch


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(RunConfig):
    """The defaults were tuned on the validation text in runs of a few minutes on two cores."""

    SAME_RUN: ClassVar[tuple[str, ...]] = (
        "batch_size", "context", "layers", "dim", "heads", "dropout", "learning_rate", "warmup_steps", "weight_decay",
        "clip_norm", "steps", "seed",
    )  # fmt: skip
    POSITIVE: ClassVar[tuple[str, ...]] = (
        *RunConfig.POSITIVE, "nproc", "steps", "stop_after", "context", "layers", "dim", "heads",
    )  # fmt: skip

    mesh: str | None = None
    """Axes such as dp=2,tp=2: tp shards the model, all others the batch. None: one axis dp of all ranks."""
    sequence_parallel: bool = False
    """Shard the activations between layers along the sequence dim; needs an axis tp."""
    fully_shard: bool = False
    """Shard parameters and the states of the optimizer over the axes of the batch, too: over the last of them."""
    nproc: int | None = None
    """Ranks to start; none is as many as the mesh has, or 2. Under torchrun it decides."""
    steps: int = 3000
    """Steps of the run; the learning rate falls until the last one."""
    stop_after: int | None = None
    """Stop after this step of the run, as if interrupted; --resume continues."""
    batch_size: int = 8
    """Windows of a step, over all ranks."""
    context: int = 128
    """Bytes of a window: how far back the model sees."""
    layers: int = 4
    dim: int = 128
    """Width of the model."""
    heads: int = 4
    """Of attention, in each layer."""
    dropout: float = 0.0
    learning_rate: float = 3e-3
    """Of AdamW, at its highest; it rises in `warmup_steps` steps and falls as a cosine to a twentieth."""
    warmup_steps: int = 150
    weight_decay: float = 0.1
    """Of matrices; vectors have none."""
    clip_norm: float = 1.0
    """Largest norm of the gradient of all parameters."""
    log_every: int = 100
    """Steps between two reports of the loss."""
    checkpoint: str = "runs/lm"
    """Folder of the runs, which have folders of their own there; relative to where the command runs."""
    sample_bytes: int = 300
    """Length of the text generated at the end."""
    temperature: float = 0.8
    """Of that text: 0 takes the likeliest byte each time, 1 samples from the model."""
    prompt: str = 'The "'
    """Its first characters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least, below in [
            ("dropout", 0, 1),
            ("warmup_steps", 0, inf),
            ("weight_decay", 0, inf),
            ("sample_bytes", 0, inf),
            ("temperature", 0, inf),
        ]:
            value = getattr(self, name)
            if not least <= value < below:
                end = "" if below == inf else f" and below {below}"
                raise ValueError(f"{name} is {value}, expected {least} or more{end}")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}, expected a number above 0")
        if self.dim % self.heads:
            raise ValueError(f"heads is {self.heads}, expected a divisor of dim, which is {self.dim}")
        if not self.prompt:
            raise ValueError("prompt is empty, expected the beginning of a text")
        self._check_mesh()

    @property
    def last_step(self) -> int:
        """The one to stop after, counted from the very first."""
        return min(self.steps, self.stop_after or self.steps)

    def _check_mesh(self) -> None:
        mesh = self._mesh()
        if mesh is not None and self.nproc not in (None, mesh.size()):
            raise ValueError(f"mesh is {self.mesh}, which has {mesh.size()} ranks, but nproc is {self.nproc}")
        if self.sequence_parallel and (mesh is None or TENSOR_AXIS not in (mesh.names or ())):
            raise ValueError(
                f"sequence_parallel needs an axis {TENSOR_AXIS} in the mesh, such as {TENSOR_AXIS}=2; mesh is "
                f"{self.mesh or 'none'}"
            )
        names = () if mesh is None else mesh.names or ()
        data_axes = [name for name in names if name != TENSOR_AXIS]
        if self.fully_shard and mesh is not None and not 1 <= len(data_axes) <= 2:
            raise ValueError(
                f"fully_shard needs one or two axes besides {TENSOR_AXIS} in the mesh, such as dp=2; mesh is "
                f"{self.mesh}"
            )

    def _mesh(self) -> Mesh | None:
        if self.mesh is None:
            return None
        mesh = parse_mesh(self.mesh)
        if mesh.names is None:
            raise ValueError(f"mesh is {self.mesh}, expected axes with names, such as dp=2,tp=2")
        return mesh

    @property
    def num_ranks(self) -> int:
        """How many ranks to start."""
        mesh = self._mesh()
        return mesh.size() if mesh is not None else self.nproc or 2

    def mesh_of(self, num_ranks: int) -> Mesh:
        """The mesh of this many ranks.

        Raises:
            ConfigError: the mesh is of another number.
        """
        mesh = self._mesh() or Mesh((num_ranks,), names=("dp",))
        if mesh.size() != num_ranks:
            raise ConfigError(
                f"mesh is {self.mesh}, which has {mesh.size()} ranks; here are {num_ranks}. Fix: give a mesh whose "
                f"sizes multiply to {num_ranks}."
            )
        return mesh
