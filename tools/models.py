"""Models of Hugging Face, sharded by generic plans and by their own, beside one process.

    python -m tools.models                               # every model, plan and number of ranks: minutes
    python -m tools.models --only 'Llama|GPT-2' --ranks 2 --plan tensor
    python -m tools.models --page docs/hugging-face.md   # writes the table into the page

"own" is the tensor-parallel plan that a model has, where it has one; the other plans know no more of a
model than the names, kinds and shapes of its parameters. Compared with the plain model is what `CHECKS` lists. The exit
status is 1 if any of it failed.
"""

import argparse
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard, distribute_tensor, shard_module
from shardwise._layout import Placement
from shardwise.errors import PlanError
from shardwise.parallel import fully_shard, parallelize_module, plan_from_transformers
from shardwise.testing import world

sys.path.append(str(Path(__file__).parents[1]))  # this script may run from anywhere

from tools.model_zoo import FAMILIES, Family, Inputs

NEW_TOKENS = 4
RANKS = (2, 4)
WIDTH = 200  # of a line that reports a failure

# ---- the plans --------------------------------------------------------------------------------------------------

ROW_PARALLEL = re.compile(
    r"(o_proj|out_proj|o|wo|down_proj|fc2|c_proj|dense_4h_to_h|w2|linear_out|output\.dense|attention\.dense"
    r"|self_attention\.dense|self_attn\.dense|projection)$"
)


def tensor_plan(model: nn.Module) -> dict[str, Placement]:
    """Tables by rows, stacked experts by experts; layers that end a block along inputs, others along outputs."""
    plan: dict[str, Placement] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = dict(module.named_parameters(prefix=path, recurse=False))
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) or type(module).__name__ == "Conv1D":
            outputs, inputs = (1, 0) if type(module).__name__ == "Conv1D" else (0, 1)
            if ROW_PARALLEL.search(path):
                plan[f"{prefix}weight"] = Shard(inputs)
            else:
                plan |= {name: Shard(outputs if x.ndim > 1 else 0) for name, x in own.items()}
        elif isinstance(module, nn.Embedding):
            plan[f"{prefix}weight"] = Shard(0)
        else:
            plan |= {name: Shard(0) for name, x in own.items() if x.ndim == 3}  # stacked experts
    return plan


def fully_sharded_plan(model: nn.Module) -> dict[str, Placement]:
    """Every parameter along dim 0."""
    return {name: Shard(0) if p.ndim else Replicate() for name, p in model.named_parameters()}


def with_units(model: nn.Module) -> nn.Module:
    """Every module in a list is a unit, and the model is one."""
    for module in list(model.modules()):
        for child in module if isinstance(module, nn.ModuleList) else ():
            if all(p.ndim for p in child.parameters()):
                fully_shard(child)
    return fully_shard(model, ignored_params=[p for p in model.parameters() if not p.ndim])


Sharder = Callable[[nn.Module], nn.Module]
PLANS: dict[str, Sharder] = {
    "tensor": lambda model: shard_module(model, tensor_plan(model)),
    "fully sharded": lambda model: shard_module(model, fully_sharded_plan(model)),
    "units": with_units,
    "own": lambda model: parallelize_module(model, None, plan_from_transformers(model)),
}
PLAIN_INPUTS = ("tensor", "own")  # the others shard the batch

# ---- one model under one plan -----------------------------------------------------------------------------------

Values = dict[str, Tensor]


def full(x: Tensor) -> Tensor:
    """The full tensor, detached."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def forward_and_backward(model: Any, inputs: Inputs, **options: Any) -> Values:
    """Logits, loss, and gradients by name."""
    out = model(**inputs, **options)
    out.loss.backward()
    values = {name: full(out[name]) for name in out if name.startswith(("logits", "loss"))}
    grads = {f"gradient of {name}": full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return values | grads


def trained(model: Any, inputs: Inputs) -> Values:
    return forward_and_backward(model, inputs)


def three_steps(model: Any, inputs: Inputs) -> Values:
    """Losses of SGD, then the parameters."""
    optimizer, values = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {}
    for step in range(3):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        values[f"loss {step}"] = full(loss)
    return values | {name: full(p) for name, p in model.named_parameters()}


def generated(model: Any, inputs: Inputs) -> Values:
    model.generation_config.eos_token_id = None  # which would end some examples earlier
    with torch.no_grad():
        return {"tokens": full(model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False))}


def in_bfloat16(model: Any, inputs: Inputs) -> Values:
    as_bfloat16 = {k: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}
    return forward_and_backward(model.bfloat16(), as_bfloat16)


def checkpointed(reentrant: bool) -> Callable[[Any, Inputs], Values]:
    def run(model: Any, inputs: Inputs) -> Values:
        model.train().activation_checkpointing_enable({"use_reentrant": reentrant})
        return forward_and_backward(model, inputs)

    return run


@dataclass(frozen=True)
class Check:
    """What runs, on the plain model and on the sharded one."""

    run: Callable[[Any, Inputs], Values]
    rtol: float = 1e-3
    atol: float = 1e-5
    applies: Callable[[Family, Any], bool] = lambda family, model: True


def generates(family: Family, model: Any) -> bool:
    return bool(family.prompt)


def checkpoints(family: Family, model: Any) -> bool:
    return bool(model.supports_gradient_checkpointing)


CHECKS = {
    "values": Check(trained),
    "steps": Check(three_steps),
    "generate": Check(generated, applies=generates),
    "bf16": Check(in_bfloat16),
    "checkpoint": Check(checkpointed(False), applies=checkpoints),
    "reentrant": Check(checkpointed(True), applies=checkpoints),
}


@dataclass
class Trial:
    """A model, with what one process computes."""

    family: Family
    expected: dict[str, Values] = field(default_factory=dict)

    @cached_property
    def plain(self) -> Any:
        return self.family.build()

    def inputs(self, check: str) -> Inputs:
        given = self.family.inputs()
        return {name: given[name] for name in self.family.prompt} if check == "generate" else given

    def want(self, check: str) -> Values:
        if check not in self.expected:
            self.expected[check] = CHECKS[check].run(deepcopy(self.plain), self.inputs(check))
        return self.expected[check]

    def got(self, check: str, plan: str, ranks: int) -> Values:
        """What rank 0 gets; the ranks share one set of layouts."""

        def body() -> Values:
            model = PLANS[plan](deepcopy(self.plain))
            inputs = self.inputs(check)
            if plan not in PLAIN_INPUTS:
                inputs = {
                    k: distribute_tensor(x, Mesh((ranks,)), [Shard(0)]) if isinstance(x, Tensor) else x
                    for k, x in inputs.items()
                }
            return CHECKS[check].run(model, inputs)

        return world(ranks).run(body)[0]

    def judge(self, check: str, plan: str, ranks: int) -> str:
        """ "" if the sharded model equals the plain one, else what differs."""
        if check == "bf16" and self.family.no_choice:
            config = {**self.family.config, **self.family.no_choice}
            return Trial(replace(self.family, config=config, no_choice={})).judge(check, plan, ranks)
        want = self.want(check)
        try:
            got = self.got(check, plan, ranks)
        except Exception as error:  # noqa: BLE001 - whatever a model raises is the result
            return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        if check == "bf16":
            return bfloat16_difference(got, want, self.want("values"))
        return difference(got, want, CHECKS[check])


def difference(got: Values, want: Values, check: Check) -> str:
    if got.keys() != want.keys():
        return f"only one has {sorted(got.keys() ^ want.keys())}"
    problems = []
    for name, x in want.items():
        try:
            assert_close(got[name], x, rtol=check.rtol, atol=check.atol)
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    return "\n".join(problems)


def bfloat16_difference(got: Values, plain: Values, exact: Values) -> str:
    """Whether the sharded model is as near to single precision as the plain one, up to a factor of 2.

    Beyond that, a result may differ by 2 % of its norm, and a gradient by 0.2 % of that of all gradients: some are
    zero but for rounding.
    """
    problems = []
    of_all = torch.stack([x.norm() for name, x in exact.items() if name.startswith("gradient")]).norm()
    for name, x in exact.items():
        ours, theirs = ((v[name].float() - x).norm() for v in (got, plain))
        allowed = 0.02 * x.norm() + (0.002 * of_all if name.startswith("gradient") else 0)
        if not ours <= 2 * theirs + allowed:
            problems.append(
                f"{name}: {ours:.2g} from single precision, the plain model {theirs:.2g}; {allowed:.2g} more may be"
            )
    return "\n".join(problems)


# ---- all of them ------------------------------------------------------------------------------------------------

YES, NONE = "yes", "–"


@dataclass(frozen=True)
class Result:
    """What came of one check: `YES`, `NONE` where it does not apply, or what differs."""

    model: str
    plan: str
    ranks: int
    check: str
    outcome: str

    @property
    def failed(self) -> bool:
        return self.outcome not in (YES, NONE)

    def __str__(self) -> str:
        return f"{self.model}, {self.plan} on {self.ranks}, {self.check}: {self.outcome}"


def results(only: str, plans: Sequence[str], ranks: Sequence[int], checks: Sequence[str]) -> Iterator[Result]:
    """The results of all checks of the models whose names match `only`."""
    for name, family in FAMILIES.items():
        if re.fullmatch(only, name):
            trial = Trial(family)
            for plan, n, check in product(plans, ranks, checks):
                applies = CHECKS[check].applies(family, trial.plain) and (plan != "own" or has_plan(trial.plain))
                yield Result(name, plan, n, check, (trial.judge(check, plan, n) or YES) if applies else NONE)


def has_plan(model: nn.Module) -> bool:
    """Whether the model has a plan of its own."""
    try:
        plan_from_transformers(model)
    except PlanError:
        return False
    return True


def table(found: Sequence[Result]) -> str:
    """A row for the models of a kind that pass the same checks, under all plans on every number of ranks."""
    rows: dict[tuple[str, str], list[str]] = {}
    for model in dict.fromkeys(result.model for result in found):
        passed = passed_checks([result for result in found if result.model == model])
        rows.setdefault((FAMILIES[model].kind, passed), []).append(model)
    lines = [f"| {kind} | {', '.join(names)} | {passed} |" for (kind, passed), names in rows.items()]
    return "\n".join(["| kind | models | checks |", "| --- | --- | --- |", *lines])


def passed_checks(of_model: Sequence[Result]) -> str:
    """What passed: "all", or "all but" the checks that the model has no use for; or what failed."""
    failed = [f"not {result.check} by {result.plan} on {result.ranks}" for result in of_model if result.failed]
    passed = {result.check for result in of_model if result.outcome == YES}
    other = ", ".join(check for check in CHECKS if check not in passed)
    return ", ".join(failed) or (f"all but {other}" if other else "all")


BEGIN, END = "<!-- made by `python -m tools.models --page docs/hugging-face.md` -->", "<!-- end of what is made -->"


def write_page(page: Path, found: Sequence[Result]) -> None:
    """Replace what lies between `BEGIN` and `END` by the table."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=".*", help="models whose names match")
    parser.add_argument("--plan", choices=PLANS, action="append")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--check", choices=CHECKS, action="append")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    parser.add_argument("--verbose", action="store_true", help="print every result, and tracebacks")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for result in results(args.only, args.plan or [*PLANS], args.ranks or RANKS, args.check or [*CHECKS]):
        found.append(result)
        if result.failed or args.verbose:
            print(result if args.verbose else str(result).splitlines()[0][:WIDTH], flush=True)
    made, failed = [r for r in found if r.outcome != NONE], sum(r.failed for r in found)
    print(f"{len(made)} checks of {len({r.model for r in made})} models, {failed} failed")
    if args.page:
        write_page(args.page, found)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
