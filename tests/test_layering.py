"""The architecture: who may import whom, and who may ask for what. Read from the source."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "latte"

# Lower floors know nothing of higher ones; modules of the same floor may know each other. A module
# that is not named here fails a test below: say where it belongs.
FLOORS = [
    {"errors", "values", "config", "ops", "mesh", "speed", "memory"},
    {"layers", "data", "environment", "progress", "mirror"},
    {"model", "optim", "metrics", "processes"},
    {"checkpoint", "cost", "plots", "monitor"},
    {"run", "replay"},
    {"train", "evaluate", "generate", "report", "plan", "scaling"},
    {"hf", "serve", "harness", "positions"},
    {"cli", "data_cli"},
    {"__main__", "__init__"},
]

STORAGE = {"tensorstore", "orbax", "fsspec", "grain", "pyarrow", "ray"}
STANDARD = set(sys.stdlib_module_names)


def parts_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(PACKAGE).with_suffix("").parts


MODULES = {"/".join(parts_of(path)): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree: ast.AST, module: str) -> Iterator[str]:
    """Every module imported anywhere in a file, with its full name; relative ones are resolved."""
    package = ["latte", *module.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from latte import metrics` imports latte.metrics
            yield from (
                (f"{name}.{alias.name}" for alias in node.names) if name == "latte" else [name]
            )


def floor_of(part: str) -> int | None:
    return next((i for i, floor in enumerate(FLOORS) if part in floor), None)


def broken_rules(module: str, source: str) -> list[str]:
    """What a file, at `module` (its path in the package), does that its place does not allow."""
    tree = ast.parse(source)
    found = imports_that_break(module, set(imports(tree, module)))
    names = {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and not stdlib_platform(n)
    }
    if module != "ops/dispatch":
        found += [f"asks for the platform: {n}" for n in names & {"default_backend", "platform"}]
    if module != "mesh":
        called = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        makers = axis_makers(tree)
        found += [f"names axes: {c}" for c in called if c in makers]
    return found


def axis_makers(tree: ast.AST) -> set[str]:
    """What JAX's makers of meshes and PartitionSpecs are called in a file."""
    makers = {"PartitionSpec", "P", "Mesh", "make_mesh"}
    names = {f"jax.{name}" for name in makers} | {f"jax.sharding.{name}" for name in makers}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            names |= {a.asname or a.name for a in node.names if a.name in makers}
    return names


def stdlib_platform(node: ast.Attribute) -> bool:
    """platform.platform() of the standard library names the system, not the accelerator."""
    return ast.unparse(node) == "platform.platform"


def imports_that_break(module: str, imported: set[str]) -> list[str]:
    home = module.split("/")[0]
    mine, found = floor_of(home), []
    for name in sorted(imported):
        top, *below = name.split(".")
        if top == "latte" and below:
            theirs = floor_of(below[0])
            if mine is None or theirs is None or theirs > mine:
                found.append(f"imports {name} from a higher floor")
            if home == "ops" and below[0] != "ops":
                found.append(f"imports {name}: ops knows JAX and jaxtyping only")
        if home == "ops" and top not in {"jax", "jaxtyping", "latte"} | STANDARD:
            found.append(f"imports {name}: ops knows JAX and jaxtyping only")
        if module.startswith("hf/remote/") and not (
            name.startswith("latte.hf.remote.") or top in {"torch", "transformers"} | STANDARD
        ):
            found.append(f"imports {name}: what goes with a folder knows PyTorch only")
        if top in STORAGE and home not in ("data", "checkpoint", "mirror"):
            found.append(f"imports {name}: only data/, checkpoint and mirror know storage")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_keeps_to_its_floor(module):
    assert floor_of(module.split("/")[0]) is not None, f"{module} is on no floor of FLOORS"
    assert broken_rules(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops/latte/xla", "from latte.layers import x"),
        ("ops/latte/xla", "from latte.errors import x"),
        ("ops/latte/xla", "import numpy as np"),
        ("ops/latte/xla", "def f():\n    from ...layers.block import x"),
        ("layers/block", "import latte.model"),
        ("layers/block", "from latte import train"),
        ("model", "from latte.train import x"),
        ("train", "from latte.cli import x"),
        ("train", "import tensorstore as ts"),
        ("evaluate", "from orbax import checkpoint"),
        ("metrics", "import fsspec.core"),
        ("train", "import grain.python"),
        ("train", "import jax\njax.default_backend()"),
        ("train", "import jax\njax.devices()[0].platform"),
        ("model", "from jax.sharding import PartitionSpec as P\nP('data')"),
        ("model", "import jax\njax.sharding.PartitionSpec('data')"),
        ("train", "import jax\njax.make_mesh((2,), ('data',))"),
        ("newcomer", "from latte.model import x"),
        ("hf/remote/modeling_latte", "from latte.errors import x"),
        ("hf/remote/modeling_latte", "import numpy"),
    ],
)
def test_breaking_a_rule_is_found(module, source):
    assert broken_rules(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops/latte/xla", "import jax.numpy as jnp\nfrom latte.ops.chunk import x"),
        ("ops/latte/xla", "from ..chunk import x\nimport functools\nfrom jaxtyping import Float"),
        ("ops/dispatch", "import jax\njax.default_backend()"),
        ("data/store", "import tensorstore\nfrom latte.errors import UserError"),
        ("checkpoint", "import orbax.checkpoint"),
        ("mesh", "from jax.sharding import PartitionSpec as P\nP('data')"),
        ("cli", "from latte.train import train"),
        ("hf/remote/modeling_latte", "import torch\nfrom .mixing_latte import latte"),
        ("train", "from latte.mesh import make_mesh\nmake_mesh(8)"),
    ],
)
def test_keeping_the_rules_is_fine(module, source):
    assert broken_rules(module, source) == []
