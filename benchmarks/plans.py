"""Plans of the configs, each on the slice that its docstring names, with no TPU.

    python benchmarks/plans.py [--only latte_1b] [--matrix] [--json FILE] [--table FILE]

Minutes a config. `--matrix` plans them on other slices too, with 2M tokens a step. `--json` keeps
the figures of configs that are not planned again; `--table` prints a file's rows as README shows
them, and plans nothing.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from latte.config import CONFIGS

GIB = 2**30
MORE = {
    "latte_1b, a million tokens": "plan --config latte_1b --topology v5e:16x16 "
    "--train.sequence_length 1048576 --train.batch_size 1 --mesh.data 1 --mesh.fsdp 1 "
    "--mesh.context 256",
}
"""Plans that no docstring names."""
SLICES = {
    "256 v5e": ("v5e:16x16", 1, 16),
    "2 × 256 v5e": ("v5e:16x16", 2, 16),
    "64 v5p": ("v5p:4x4x4", 1, 4),
    "256 v6e": ("v6e:16x16", 1, 16),
}
"""Of the matrix: chips, how many slices, and devices that share the parameters, a side's. Google
Cloud counts the cores of v5p, and calls its 64 chips v5p-128."""


def commands() -> dict[str, list[str]]:
    """The arguments of `latte` with which each config's docstring says that it was planned."""
    found = {}
    for path in sorted(CONFIGS.glob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        line = re.search(r"^latte (plan .*)$", doc, re.M)
        if line:
            found[path.stem] = line[1].split()
    return found | {name: line.split() for name, line in MORE.items()}


def matrix() -> dict[tuple[str, str], list[str]]:
    """The arguments of `latte` for every config that has a plan, on every slice."""
    found, own = {}, commands()
    for config in sorted(set(own) - set(MORE)):
        for name, (topology, slices, fsdp) in SLICES.items():
            words = f"plan --config {config} --topology {topology}".split()
            if slices > 1:
                words += ["--slices", str(slices)]
            if words != own[config]:
                rows = ["--train.batch_size", "512", "--train.accumulate", "1"]
                words += [*rows, "--mesh.data", "0", "--mesh.fsdp", str(fsdp)]
            found[config, name] = words
    return found


def measure(arguments: list[str]) -> dict:
    """One plan; one that does not fit is a mistake here."""
    command = [sys.executable, "-m", "latte", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {"command": command_of(arguments), **json.loads(done.stdout)}


def row(plan: dict) -> str:
    """A line of README's table."""
    slices = f"{plan['slices']} × " if plan["slices"] > 1 else ""
    step = plan["step"]
    cells = [
        f"`{plan['config']}`",
        f"{slices}`{plan['topology']}`",
        f"{plan['tokens_per_step'] / 1e6:.2f}M of {plan['sequence_length']:,}",
        f"{plan['memory']['total'] / GIB:.1f} of {plan['memory']['room'] / GIB:.1f} GiB",
        f"{step['total']:.3f} s",
        f"{plan['tokens_per_second'] / 1e6:.2f}M",
        f"{plan['mfu']:.0%}",
        rest(plan),
    ]
    return f"| {' | '.join(cells)} |"


def rest(plan: dict) -> str:
    """What most of a step goes to beside the model's own arithmetic."""
    held = list(plan["held_down_by"].items())[1:3]
    return ", ".join(f"{name} {share:.0%}" for name, share in held)


def command_of(arguments: list[str]) -> str:
    return " ".join(["latte", *arguments])


def table(plans: dict[str, dict]) -> Iterator[str]:
    """README's lines, of plans by their commands: each config's own, then the matrix."""
    own = [command_of(arguments) for arguments in commands().values()]
    yield from (row(plans[command]) for command in own if command in plans)
    cells: dict[str, list[str]] = {}
    for (config, _), arguments in matrix().items():
        plan = plans.get(command_of(arguments))
        cell = f"{plan['mfu']:.0%}: {rest(plan)}" if plan else ""
        cells.setdefault(config, []).append(cell)
    yield f"| config | {' | '.join(SLICES)} |"
    yield from (f"| `{config}` | {' | '.join(found)} |" for config, found in cells.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="configs whose name has this in it")
    parser.add_argument("--matrix", action="store_true", help="plan them on other slices too")
    parser.add_argument("--json", type=Path, help="keeps the figures, read and written")
    parser.add_argument("--table", type=Path, help="print this file's tables")
    options = parser.parse_args()
    source = options.table or options.json
    kept = source is not None and source.exists()
    old = json.loads(source.read_text())["plans"] if kept else []
    plans = {plan["command"]: plan for plan in old}
    if options.table:
        print("\n".join(table(plans)))
        return
    wanted = list(commands().items())
    if options.matrix:
        wanted += [(name, arguments) for (name, _), arguments in matrix().items()]
    for name, arguments in wanted:
        if options.only in name:
            plan = measure(arguments)
            plans[plan["command"]] = plan
            print(row(plan), flush=True)
            if options.json:
                options.json.write_text(
                    json.dumps({"plans": list(plans.values())}, indent=1) + "\n"
                )


if __name__ == "__main__":
    main()
