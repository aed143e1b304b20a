"""What the code looks like from outside: `python -m tools.structure [PACKAGE | --packages]`.

Prints files and lines of each package, loose modules, import cycles, assignments into other modules, uses of `Any` and
`type: ignore`, and how often words occur that docs/glossary.md replaces. PACKAGE is the package's folder; default:
src/shardwise. `--packages` prints the packages as CONTRIBUTING.md lists them. tests/test_structure.py holds the limits.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

# From the top down: a package may import the packages of the lines below its own; `testing` may import all of them.
LAYERS = """
    _cli
    plan
    simulation
    debug
    _pictures | _models | collectives
    parallel
    checkpoint | experimental | _graph_capture | _launch | data
    embedding | sharded_tensor
    _torch_bridge
    _tensor
    _lookups | _attention
    _rules
    _redistribute
    _collectives
    _trace
    _layout
    errors
"""

SOURCE = Path(__file__).parents[1] / "src" / "shardwise"
PACKAGE = "shardwise"
ANY = r": Any\b|-> Any\b"

# Words with a plain meaning that once stood for a term of the field; docs/glossary.md has the terms.
WORDS = (
    "summand|summands|cut|cuts|whole|piece|pieces|travel|travels|travelled|travelling|border|borders|mend|mended|bring|brings|brought|"
    "tell|tells|told|stand|stands|asked|dearer|priced|ragged|crossing|crossings|contribution|contributions|door|doors|"
    "tape|tapes|surroundings|board|boards|cry|cries|greet|greets|hear|hears|heard|ears|meter|meters|granule|granules|"
    "sizeless|outdated|outdates"
).split("|")


class Assignment(NamedTuple):
    file: str
    line: int
    target: str


@cache
def nodes(text: str) -> list[ast.AST]:
    """All nodes of a source, its module first. Several tests read each file, so it is parsed once."""
    return [*ast.walk(ast.parse(text))]


def modules(root: Path) -> dict[str, Path]:
    """Every module below `root` by its name without the package's own: `rules.row`; a package has its folder's name."""
    names = {file: ".".join(file.relative_to(root).with_suffix("").parts) for file in sorted(root.rglob("*.py"))}
    return {name.removesuffix("__init__").rstrip("."): file for file, name in names.items()}


def imported(tree: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Local name and full dotted name of everything that these nodes import, inside functions too."""
    for node in tree:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def import_graph(root: Path) -> dict[str, set[str]]:
    """Which module of the package imports which others."""
    known = modules(root)
    graph: dict[str, set[str]] = {name: set() for name in known}
    for name, file in known.items():
        for _, full in imported(nodes(file.read_text(encoding="utf-8"))):
            target = full.removeprefix(PACKAGE).lstrip(".") if full.split(".")[0] == PACKAGE else ""
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != name:
                graph[name].add(target)
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other in a circle (strongly connected components; Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            start = stack.index(node)
            group = stack[start:]
            del stack[start:]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def assignments_into_others(root: Path, package: str = PACKAGE) -> list[Assignment]:
    """Where a module assigns to an attribute or item of something that it imported from `package`."""
    found = []
    for name, file in modules(root).items():
        tree = nodes(file.read_text(encoding="utf-8"))
        foreign = {
            local: full
            for local, full in imported(tree)
            if full.split(".")[0] == package and not full.startswith(f"{PACKAGE}.{name}.")
        }
        for node in tree:
            for target in _targets(node):
                if isinstance(target, ast.Attribute | ast.Subscript) and _root(target) in foreign:
                    found += [Assignment(str(file.relative_to(root)), target.lineno, ast.unparse(target))]
    return found


def _targets(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Assign(targets=targets):
            return [
                inner for target in targets for inner in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return [target]
        case ast.Call(func=ast.Name(id="setattr"), args=[owner, *_]):
            return [ast.copy_location(ast.Attribute(owner, "…"), owner)]
    return []


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def packages(root: Path) -> dict[str, tuple[int, int]]:
    """Files and lines of every folder and loose module directly under the package."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file in sorted(root.rglob("*.py")):
        package = counts[file.relative_to(root).parts[0]]
        package[0] += 1
        package[1] += len(file.read_text(encoding="utf-8").splitlines())
    return {name: (files, lines) for name, (files, lines) in counts.items()}


def layers() -> list[list[str]]:
    """The packages of each line of `LAYERS`, the top line first."""
    return [[package.strip() for package in line.split("|")] for line in LAYERS.strip().splitlines()]


def package_list(root: Path = SOURCE) -> str:
    """Every package with the first line of its docstring, in the order of the layers; CONTRIBUTING.md shows it."""
    lines = []
    for packages_of_line in [*layers(), ["testing"]]:
        for package in packages_of_line:
            path = root / package / "__init__.py" if (root / package).is_dir() else root / f"{package}.py"
            summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
            name = f"{package}/" if path.name == "__init__.py" else f"{package}.py"
            lines.append(f"{'| ' if package != packages_of_line[0] else '  '}{name:18} {summary}".rstrip())
    return "\n".join(lines)


def loose_modules(root: Path) -> list[str]:
    return sorted(file.name for file in root.glob("*.py") if file.name != "__init__.py")


def count(root: Path, pattern: str) -> int:
    return sum(len(re.findall(pattern, file.read_text(encoding="utf-8"))) for file in root.rglob("*.py"))


def words(texts: list[str]) -> Counter[str]:
    return Counter(re.findall(rf"\b(?:{'|'.join(WORDS)})\b", "\n".join(texts).lower()))


def words_of_code(root: Path = SOURCE) -> Counter[str]:
    return words([file.read_text(encoding="utf-8") for file in root.rglob("*.py")])


def words_of_pages(root: Path = SOURCE) -> Counter[str]:
    pages = [page for folder in (root.parents[1], root.parents[1] / "docs") for page in folder.glob("*.md")]
    return words([page.read_text(encoding="utf-8") for page in pages])


def main() -> None:
    if sys.argv[1:] == ["--packages"]:
        print(package_list())
        return
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE
    sizes = packages(root)
    for name, (files, lines) in sorted(sizes.items(), key=lambda item: -item[1][1]):
        print(f"{name:20} {files:4} files {lines:6,} lines")
    print(f"{'all':20} {sum(f for f, _ in sizes.values()):4} files {sum(n for _, n in sizes.values()):6,} lines")
    loose = loose_modules(root)
    print(f"loose modules: {len(loose)}: {', '.join(loose)}")
    circles = cycles(import_graph(root))
    print(f"import cycles: {len(circles)}")
    for group in circles:
        print("  " + ", ".join(group))
    hidden, patches = assignments_into_others(root), assignments_into_others(root, "torch")
    print(f"assignments into other modules: {len(hidden)}; into torch: {len(patches)}")
    for found in hidden + patches:
        print(f"  {found.file}:{found.line} {found.target}")
    print(f"Any: {count(root, ANY):,}; type: ignore: {count(root, 'type: ignore')}")
    for what, counted in (("src", words_of_code(root)), ("pages", words_of_pages(root))):
        print(f"words in {what}: {counted.total():,}: {', '.join(f'{w} {n}' for w, n in counted.most_common())}")


if __name__ == "__main__":
    main()
