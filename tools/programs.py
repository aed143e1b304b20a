"""Random programs of torch ops, as lines of Python that mean the same on one process and on ranks.

A line is made from a template by filling its blanks at random and is kept if torch runs it. Layouts
appear in calls of `leaf`, `redistribute` and `boundary` only, which do not change values: see `tools.fuzz`.
"""

import copy
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint  # for the programs
from torch import Tensor, nn

from shardwise import Boxes, Mesh, OnRanks, Partial, Replicate, Shard
from tools.templates import CONTEXTS, EXPRESSIONS, STATEMENTS

MESHES = ("Mesh((1,))", "Mesh((2,))", "Mesh((3,))", "Mesh((4,))", "Mesh((5,))", "Mesh((2, 2))", "Mesh((2, 3))")
SMALLER = ("Mesh((2,), (1, 0))", "Mesh((1,), (1,))")  # meshes of some ranks of a world
LARGEST = 400  # elements of a tensor


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient: Tensor = grads[0] * 3 * x**2
        return gradient


class Scaled(torch.autograd.Function):
    """x * sum of y; saves its result too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        out = x * y.sum()
        ctx.save_for_backward(x, y, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, y, _ = ctx.saved_tensors
        return grads[0] * y.sum(), (grads[0] * x).sum().expand(y.shape)


def _checkpoint(function: Any, *args: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def _autocast(function: Any, *args: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return function(*args)


def _hooked(module: nn.Module, x: Tensor, k: float) -> Any:
    """What a module with forward and backward hooks returns; its parameters are the same everywhere."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(1, parameter.numel() + 1).sin().view(parameter.shape))
    module.register_forward_hook(lambda module, args, out: out * k)

    def scaled(module: nn.Module, grads_in: Any, grads_out: Any) -> Any:
        return tuple(None if g is None else g * k for g in grads_in)

    module.register_full_backward_hook(scaled)
    return module(x)


def _twice(function: Any, *args: Tensor) -> Any:
    function(*args)
    return function(*args)


NAMES: dict[str, Any] = {
    "torch": torch, "F": F, "Mesh": Mesh, "Shard": Shard, "Partial": Partial, "Replicate": Replicate,
    "OnRanks": OnRanks, "Boxes": Boxes, "copy": copy, "nn": nn, "checkpoint": _checkpoint, "autocast": _autocast,
    "hooked": _hooked, "Cube": Cube, "Scaled": Scaled,
}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """Lines to run on `world` ranks; the last one may be one that torch refuses."""

    world: int
    lines: tuple[str, ...]

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, which differ from those that torch draws for plain tensors."""
        return any(re.search(r"dropout|bernoulli|rand|uniform_|normal_\(", line) for line in self.lines)

    @property
    def is_coarse(self) -> bool:
        """Whether it rounds to bfloat16."""
        return any("bfloat16" in line or "autocast" in line for line in self.lines)

    def __str__(self) -> str:
        body = "".join(f"    {line!r},\n" for line in self.lines)
        return f"from tools.program_judge import Program, verdict\n\nprint(verdict(Program({self.world}, (\n{body}))))"


def plain_leaf(seed: int, shape: Sequence[int], dtype: torch.dtype, grad: bool, *layout: Any) -> Tensor:
    """The value of a leaf: normal floats, small integers, or booleans."""
    numbers = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(tuple(shape), generator=numbers) < 0.5
    if dtype == torch.int64:
        return torch.randint(-3, 4, tuple(shape), generator=numbers)
    return torch.randn(tuple(shape), generator=numbers, dtype=torch.float64).to(dtype).requires_grad_(grad)


PLAIN: dict[str, Any] = {
    "leaf": plain_leaf,
    "redistribute": lambda x, *layout: x.clone(memory_format=torch.contiguous_format),
    "boundary": lambda x: x.clone(),
    "captured": _twice,
}

# ---- writing ----------------------------------------------------------------------------------------------------

FIT = ["{a}", "{a}.detach()", "{a}.sum({d}, keepdim=True)", "{a}.flip(0)", "{a}[0]", "{a}.mean()", "{a}.clone()",
       "redistribute({a}, {w})", "torch.tensor(2.0, dtype={a}.dtype)"]  # fmt: skip
MASK = ["({a} > 0)", "({a} <= 0.5)", "({a}.abs() > 0.3)", "redistribute({a} > 0, {w})"]


class Author:
    """Writes one program, line by line, running it on plain tensors on the way."""

    def __init__(self, seed: int, world: int = 0) -> None:
        self.random = random.Random(seed)
        self.mesh = self.random.choice(
            [m for m in MESHES if not world or _mesh(m).size() == world] or [f"Mesh(({world},))"]
        )
        self.world = _mesh(self.mesh).size()
        self.seed = seed
        self.env: dict[str, Any] = {**NAMES, **PLAIN}
        self.lines: list[str] = []
        self.count = 0
        self.has_plain_leaf = self.has_small_mesh = False  # not both: ranks outside a mesh get no gradient from it

    def program(self, length: int) -> Program:
        for _ in range(self.random.randint(1, 4)):
            self.write(self.leaf())
        end = len(self.lines) + length
        for _ in range(length * 12):
            if len(self.lines) >= end or not self.step():
                break
        return Program(self.world, tuple(self.lines))

    def step(self) -> bool:
        """One more line; False after one that torch refuses."""
        expression = self.random.random() < 0.65
        template = self.random.choice(EXPRESSIONS if expression else STATEMENTS)
        try:
            text = self.filled(template, list(self.tensors()))
        except IndexError:
            return True
        if expression:
            self.count += 1
            text = f"v{self.count} = {text}"
            if self.random.random() < 0.08:
                text = f"{self.random.choice(CONTEXTS)}: {text}"
        return self.write(text)

    def write(self, line: str) -> bool:
        torch.manual_seed(self.seed)
        try:
            exec(line, self.env)  # noqa: S102 - a line of this module
        except Exception:  # noqa: BLE001 - whatever torch refuses
            if self.random.random() > 0.01:
                return True
            self.lines.append(line)
            return False
        unfit = [name for name, x in self.tensors() if not _usable(x)]
        for name in unfit:
            del self.env[name]
        if not unfit:
            self.lines.append(line)
        return True

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, x) for name, x in self.env.items() if isinstance(x, Tensor)]

    # ---- blanks ----

    def filled(self, template: str, tensors: Sequence[tuple[str, Tensor]]) -> str:
        """The template with its blanks filled; IndexError where no tensor fits."""
        pick = self.random.choice
        floats = [x for x in tensors if x[1].is_floating_point()]
        recent = floats[-4:] if self.random.random() < 0.7 else floats
        some = recent if self.random.random() < 0.9 else tensors
        leaves = [x for x in tensors if x[1].is_leaf and x[1].requires_grad]
        name, a = pick([x for x in some if not x[1].is_leaf or not x[1].requires_grad] if "{t}" in template else
                       leaves if "{l}" in template else some)  # fmt: skip
        d = self.random.randrange(a.ndim) if a.ndim else 0
        d = d - a.ndim if a.ndim and self.random.random() < 0.3 else d
        length = a.shape[d] if a.ndim else 1
        blanks = {"a": name, "t": name, "l": name, "d": str(d), "n": str(self.random.randrange(max(length, 1)))}
        blanks |= {"e": str(self.random.randrange(max(a.ndim, 1))), "f": str(round(self.random.random(), 2))}

        def fill(match: re.Match[str]) -> str:
            blank = match[1]
            return blanks[blank] if blank in blanks else self.blank(blank, a, length, floats, fill)

        return re.sub(r"\{(\w)\}", fill, template)

    def blank(self, blank: str, a: Tensor, length: int, floats: Sequence[tuple[str, Tensor]], fill: Any) -> str:
        pick = self.random.choice
        match blank:
            case "c":
                return pick(floats)[0]
            case "b":
                fitting = [n for n, x in floats if _fits(x.shape, a.shape)]
                return pick(fitting) if self.random.random() < 0.5 else re.sub(r"\{(\w)\}", fill, pick(FIT))
            case "m":
                return re.sub(r"\{(\w)\}", fill, pick(MASK))
            case "j":
                shape = pick([(3,), (2, 2), (1,), (0,), (5,)])
                return self.leaf_text(shape, "torch.int64") + f" % {max(length, 1)}"
            case "k":
                return pick(["2", "0.5", "-1.5", "3", "1", "True"])
            case "s":
                return pick(["1:", ":-1", "::2", "0:1", "1:3", "-2:", ":0"])
            case "w":
                return f"{self.mesh_text()}, {self.placements(a.shape)}"
            case "x":
                parts = [self.bracket(a, dim) for dim in range(self.random.randint(1, max(a.ndim, 1)))]
                # Behind a second ellipsis torch indexes dims that there are not.
                return ", ".join(":" if p == "..." and "..." in parts[:i] else p for i, p in enumerate(parts))
            case "z":
                return self.shape_of(a)
        raise AssertionError(blank)

    def bracket(self, a: Tensor, dim: int) -> str:
        length = max(a.shape[dim] if dim < a.ndim else 1, 1)
        n = self.random.randrange(length)
        kinds = [str(n), str(n - length), f"{n}:", f":{n}", "::2", ":", "None", "...", f"{n}:{n + 2}", f"[{n}, 0]"]
        kinds += [f"torch.tensor([{n}, 0, {n}])", f"torch.tensor({n})"]
        return self.random.choice(kinds)

    def shape_of(self, a: Tensor) -> str:
        """A shape of as many elements."""
        sizes = [1, 1]
        left = a.numel()
        for factor in [2, 2, 3, 5, 7, 2, 3]:
            if left and left % factor == 0:
                left //= factor
                sizes[self.random.randrange(2)] *= factor
        shape = [*sizes, left] if left != 1 else sizes
        self.random.shuffle(shape)
        if self.random.random() < 0.3:
            shape[0] = -1
        return str(tuple(shape))

    # ---- leaves and layouts ----

    def leaf(self) -> str:
        ndim = self.random.choice([0, 1, 1, 2, 2, 2, 2, 3, 3, 4])
        shape = [self.random.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 7, *([0] * (self.random.random() < 0.15))])
                 for _ in range(ndim)]  # fmt: skip
        dtype = self.random.choice(["torch.float64"] * 8 + ["torch.float32", "torch.int64", "torch.bool"])
        self.count += 1
        return f"x{self.count} = {self.leaf_text(shape, dtype)}"

    def leaf_text(self, shape: Sequence[int], dtype: str) -> str:
        grad = "float" in dtype and self.random.random() < 0.75
        averages = "float" in dtype and not grad
        layout = f"{self.mesh_text()}, {self.placements(shape, dtype != 'torch.bool', averages, not grad)}"
        if self.random.random() < 0.08 and not self.has_small_mesh:
            layout, self.has_plain_leaf = "None", True
        return f"leaf({self.random.randrange(100)}, {tuple(shape)}, {dtype}, {grad}, {layout})"

    def mesh_text(self) -> str:
        self.used = self.mesh
        if self.random.random() < 0.04:  # another mesh of the same ranks
            self.used = self.random.choice([m for m in MESHES if _mesh(m).size() == self.world] or [self.mesh])
        if self.world > 1 and self.random.random() < 0.02 and not self.has_plain_leaf:
            self.used, self.has_small_mesh = self.random.choice(SMALLER), True
        return self.used

    def placements(self, shape: Sequence[int], sums: bool = True, averages: bool = True, maxima: bool = True) -> str:
        """A layout on the mesh that was written last."""
        mesh = _mesh(self.used)
        reductions = ["sum"] * 4 * sums + ["avg"] * averages + ["max", "min", "product"] * (maxima and sums)
        reduction = self.random.choice(reductions) if reductions else ""
        shards = [[n] for n in shape]  # sizes of the shards along each dim
        if shape and mesh.ndim == 1 and self.random.random() < 0.04:
            return f"[Boxes({self.boxes(shape, mesh.size())})]"
        found = []
        for positions in mesh.shape:
            kind = self.random.choice(["shard"] * 6 + ["replicate"] * 3 + ["sum"] * 2 + ["one"])
            if kind == "shard" and shape:
                found.append(self.shard(shards, positions))
            elif kind == "sum" and reduction:
                found.append(f"Partial({reduction!r})")
            elif kind == "one":
                found.append(f"OnRanks({self.random.randrange(positions)})")
            else:
                found.append("Replicate()")
        return f"[{', '.join(found)}]"

    def shard(self, shards: list[list[int]], positions: int) -> str:
        dim = self.random.randrange(len(shards))
        rows = []
        for length in shards[dim]:
            marks = sorted(self.random.randint(0, length) for _ in range(positions - 1))
            rows.append([b - a for a, b in pairwise([0, *marks, length])])
        if self.random.random() < 0.5:
            step = [-(-length // positions) for length in shards[dim]]
            rows = [[max(0, min(n, (i + 1) * s) - min(n, i * s)) for i in range(positions)]
                    for n, s in zip(shards[dim], step, strict=True)]  # fmt: skip
            text = f"Shard({dim})"
        else:
            text = f"Shard({dim}, {rows if len(rows) > 1 else rows[0]})"
        shards[dim] = [n for row in rows for n in row]
        return text

    def boxes(self, shape: Sequence[int], positions: int) -> str:
        """Two boxes, each on a random position."""
        dim = self.random.randrange(len(shape))
        at = self.random.randint(0, shape[dim])
        one, two = list(shape), list(shape)
        one[dim], two[dim] = at, shape[dim] - at
        start = [0] * len(shape)
        start[dim] = at
        boxes: list[Any] = [[] for _ in range(positions)]
        boxes[self.random.randrange(positions)].append([[0] * len(shape), one])
        boxes[self.random.randrange(positions)].append([start, two])
        return str(boxes)


def _mesh(text: str) -> Mesh:
    mesh: Mesh = eval(text)  # noqa: S307 - a text of this module
    return mesh


def _usable(x: Tensor) -> bool:
    """Small, and not a view whose base was changed in place in a way that torch cannot differentiate."""
    try:
        return x.numel() <= LARGEST and x.ndim <= 5 and repr(x.grad_fn) != ""
    except RuntimeError:
        return False


def _fits(shape: Sequence[int], into: Sequence[int]) -> bool:
    try:
        return tuple(torch.broadcast_shapes(tuple(shape), tuple(into))) == tuple(into)
    except RuntimeError:
        return False


def program(seed: int, world: int = 0) -> Program:
    """The random program of a seed."""
    author = Author(seed, world)
    return author.program(author.random.randint(3, 12))
