"""Plans of the configs, each on the slice that its docstring names, with no TPU.

    python benchmarks/plans.py [--only latte_1b] [--json FILE] [--table FILE]

Minutes a config. `--json` keeps the figures of configs that are not planned again; `--table` prints
a file's rows as README shows them, and plans nothing.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from latte.config import CONFIGS

GIB = 2**30
MORE = {
    "latte_1b, a million tokens": "plan --config latte_1b --topology v5e:16x16 "
    "--train.sequence_length 1048576 --train.batch_size 1 --mesh.data 1 --mesh.fsdp 1 "
    "--mesh.context 256",
}
"""Plans that no docstring names."""


def commands() -> dict[str, list[str]]:
    """The arguments of `latte` with which each config's docstring says that it was planned."""
    found = {name: line.split() for name, line in MORE.items()}
    for path in sorted(CONFIGS.glob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        line = re.search(r"^latte (plan .*)$", doc, re.M)
        if line:
            found[path.stem] = line[1].split()
    return found


def measure(arguments: list[str]) -> dict:
    """One plan; one that does not fit is a mistake here."""
    command = [sys.executable, "-m", "latte", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {"command": " ".join(["latte", *arguments]), **json.loads(done.stdout)}


def row(plan: dict) -> str:
    """A line of README's table."""
    slices = f"{plan['slices']} × " if plan["slices"] > 1 else ""
    step, held = plan["step"], list(plan["held_down_by"].items())[1:3]
    cells = [
        f"`{plan['config']}`",
        f"{slices}`{plan['topology']}`",
        f"{plan['tokens_per_step'] / 1e6:.2f}M of {plan['sequence_length']:,}",
        f"{plan['memory']['total'] / GIB:.1f} of {plan['memory']['room'] / GIB:.1f} GiB",
        f"{step['total']:.3f} s",
        f"{plan['tokens_per_second'] / 1e6:.2f}M",
        f"{plan['mfu']:.0%}",
        ", ".join(f"{name} {share:.0%}" for name, share in held),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="configs whose name has this in it")
    parser.add_argument("--json", type=Path, help="keeps the figures, read and written")
    parser.add_argument("--table", type=Path, help="print this file's table")
    options = parser.parse_args()
    if options.table:
        print("\n".join(map(row, json.loads(options.table.read_text())["plans"])))
        return
    kept = options.json is not None and options.json.exists()
    old = json.loads(options.json.read_text())["plans"] if kept else []
    plans = {plan["command"]: plan for plan in old}
    for name, arguments in commands().items():
        if options.only in name:
            plan = measure(arguments)
            plans[plan["command"]] = plan
            print(row(plan), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"plans": list(plans.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
