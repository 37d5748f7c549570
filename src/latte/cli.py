"""The command `latte`.

Exit status: 0, 1 for a run that failed, 2 for bad input (one sentence on stderr), 130 for Ctrl-C.
Nothing here imports JAX before the input has been checked, so that a mistake costs no time.
"""

import argparse
import errno
import itertools
import json
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from latte.config import (
    CONFIGS,
    Config,
    apply_overrides,
    check_run_dir,
    load,
    nearest,
    read_run_config,
    settings,
    validate,
)
from latte.errors import RunFailedError, UserError
from latte.values import kind_name, show


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UserErrors, and which never guesses at a prefix."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action="store_true", help="show this and stop")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")

    def options(self, argv: list[str]) -> argparse.Namespace | None:
        """The options of a command that takes no settings; None once help is shown.

        Raises:
            UserError: an argument is not known.
        """
        options, rest = self.parse_known_args(argv)
        if options.help:
            print(self.format_help(), end="")
            return None
        if rest:
            near = self.nearest_flag(rest[0]) or f"; see `{self.prog} --help`"
            raise UserError(f"unknown argument {rest[0]!r}{near}")
        return options

    def nearest_flag(self, word: str) -> str:
        """The option that `word` nearly spells, as the end of a sentence; may be empty."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        return nearest(word.partition("=")[0], flags, cutoff=0.75)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    _show_log()
    try:
        return _dispatch("latte", _COMMANDS, list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        return _say(error, 2)
    except RunFailedError as error:
        return _say(error, 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        # The reader went away; what Python still holds for it must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" that holds {error.filename}" if error.filename else ""
        return _say(f"the disk{where} is full; free some room and run the same command again", 2)


def _show_log() -> None:
    """Prints what the package notes and warns of as it prints its errors."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("latte: %(message)s"))
    log = logging.getLogger("latte")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def _say(message: object, status: int) -> int:
    text = " ".join(str(message).split())
    print(f"latte: {text}", file=sys.stderr)
    if "latte.processes" in sys.modules:
        sys.modules["latte.processes"].leave(status, text)
    return status


def _dispatch(prog: str, commands: dict[str, tuple[Callable, str]], argv: list[str]) -> int:
    if not argv:
        raise UserError(f"no command; there are {', '.join(commands)}, see `{prog} --help`")
    if argv[0] in ("-h", "--help"):
        width = max(map(len, commands)) + 2
        print(f"usage: {prog} COMMAND …\n")
        for name, (_, summary) in commands.items():
            print(f"  {name:{width}}{summary}")
        print(f"\n`{prog} COMMAND --help` says more.")
        return 0
    if argv[0] not in commands:
        near = nearest(argv[0], commands) or f"; there are {', '.join(commands)}"
        raise UserError(f"unknown command {argv[0]!r}{near}")
    run, summary = commands[argv[0]]
    return run(Parser(f"{prog} {argv[0]}", summary), argv[1:])


# --- train and plan: a config with overrides ---------------------------------------------------


def _train(parser: Parser, argv: list[str]) -> int:
    _add_run_dir(
        parser, "where the run is kept, or goes on (gs://… too); by default runs/NAME of the config"
    )
    options, config = configured(parser, argv)
    if config is None:
        return 0
    run_dir = folder_of(options.run_dir or f"runs/{config.name}")
    check_run_dir(run_dir, config)
    from latte.train import train

    train(config, run_dir)
    return 0


def _plan(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("--topology", metavar="SLICE", help="the slice, such as v5e:16x16")
    parser.add_argument("--slices", type=int, default=1, help="how many of them (%(default)s)")
    parser.add_argument(
        "--search",
        action="store_true",
        help="try microbatches, rematerialisation and meshes, and plan the best that fits",
    )
    add_json(parser)
    options, config = configured(parser, argv)
    if config is None:
        return 0
    from latte.plan.chips import parse_topology

    if options.topology is None:
        raise UserError("--topology is missing; name a slice, such as --topology v5e:16x16")
    topology = parse_topology(options.topology, options.slices)
    from latte.plan import check_fills, plan
    from latte.plan.report import describe, misfit, outline, to_dict
    from latte.plan.search import search

    if options.search:
        found = search(config, topology, lambda tried: print(outline(tried), file=sys.stderr))
    else:
        check_fills(config, topology)
        found = plan(config, topology)
    print(json.dumps(to_dict(found)) if options.json else describe(found))
    return 0 if found.memory.fits else _say(misfit(found), 1)


def configured(
    parser: Parser, argv: list[str], default: Config | None = None
) -> tuple[argparse.Namespace, Config | None]:
    """The options of a command that takes a config, and the config; None once help is shown.

    `default` is the config of a command that needs none.
    """
    parser.add_argument(
        "--config", metavar="NAME_OR_PATH", help=f"a file of {CONFIGS.name}/, or any .py file"
    )
    options, rest = parser.parse_known_args(argv)
    if options.help:
        print(parser.format_help().replace("\n\n", " [--SECTION.FIELD VALUE …]\n\n", 1), end="")
        print(_describe(load(options.config) if options.config else Config(name="")))
        return options, None
    known = {setting.key for setting in settings(Config(name=""))}
    for word in rest:
        if word.startswith("--") and word[2:].partition("=")[0] not in known:
            near = parser.nearest_flag(word)
            if near:
                raise UserError(f"unknown option {word!r}{near}")
    if options.config is None and default is None:
        names = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.py")))
        raise UserError(f"--config is missing; name a config ({names}) or the path of a .py file")
    config = load(options.config) if options.config else default
    assert config is not None
    return options, validate(apply_overrides(config, rest))


def _describe(config: Config) -> str:
    """Every setting with its value in `config`, grouped by section, as help text."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    lines = []
    for section, group in itertools.groupby(settings(config), lambda s: s.key.rpartition(".")[0]):
        lines += ["", f"{section}:"] if section else []
        for setting in group:
            lines.append(f"  --{setting.key} {show(setting.value)}")
            words = f"{setting.doc} ({kind_name(setting.kind)})"
            lines.append(textwrap.indent(textwrap.fill(words, width - 6), " " * 6))
    title = f"settings, with the values of {config.name}" if config.name else "settings"
    return "\n".join([f"\n{title}:", *lines])


# --- eval and generate: a finished or running run ----------------------------------------------


def _eval(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("--tasks", metavar="A,B", help="tasks of lm-evaluation-harness, instead")
    parser.add_argument("--task-path", metavar="DIR", help="a folder of task files of your own")
    parser.add_argument("--limit", type=int, help="items of each task; all by default")
    parser.add_argument(
        "--max-length", type=int, default=0, help="most tokens of an item; 0 as in training"
    )
    parser.add_argument("--batch", type=int, default=8, help="rows at once (%(default)s)")
    parser.add_argument(
        "--beside", metavar="DIR", help="an exported folder, to score through transformers too"
    )
    parser.add_argument(
        "--by-position", type=int, metavar="T", help="loss by position up to T tokens, instead"
    )
    add_json(parser)
    options = _of_run(parser, argv)
    if options is None:
        return 0
    for name, least in (("batch", 1), ("max_length", 0)):
        _check_least(name, getattr(options, name), least)
    for name in ("limit", "by_position"):
        _check_least(name, getattr(options, name) or 1, 1)
    if options.tasks:
        return _eval_tasks(options)
    if options.by_position:
        from latte.positions import positions_of_run

        found = positions_of_run(options.run_dir, options.by_position, batch=options.batch)
        _print_rows(found, "positions", options.json)
        return 0
    from latte.evaluate import evaluate_run

    print_values(evaluate_run(options.run_dir), options.json)
    return 0


def _eval_tasks(options: argparse.Namespace) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from latte.harness import run_tasks
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed; run `pip install latte-lm[eval]`"
        ) from None

    found = run_tasks(
        options.run_dir,
        options.tasks.split(","),
        task_path=Path(options.task_path) if options.task_path else None,
        limit=options.limit,
        length=options.max_length,
        batch_size=options.batch,
        beside=Path(options.beside) if options.beside else None,
    )
    if options.json:
        print(json.dumps(found))
        return 0
    for kind in ("tasks", "exported"):
        for task, scores in found.get(kind, {}).items():
            print_values({f"{kind} {task} {name}": value for name, value in scores.items()}, False)
    if "items_that_differ" in found:
        print_values({"items_that_differ": found["items_that_differ"]}, False)
    return 0


def _print_rows(found: dict[str, Any], rows: str, as_json: bool) -> None:
    """Prints values of which one is a table."""
    if as_json:
        print(json.dumps(found))
        return
    table = found.pop(rows)
    print_values(found, False)
    print("  ".join(f"{name:>12}" for name in table[0]))
    for row in table:
        cells = (f"{v:.5g}" if isinstance(v, float) else str(v) for v in row.values())
        print("  ".join(f"{cell:>12}" for cell in cells))


def _generate(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("--prompt", default="", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to write (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest (%(default)s)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="draw from the K likeliest; 0 from all (%(default)s)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the likeliest that together reach P (%(default)s)",
    )
    parser.add_argument("--batch", type=int, default=1, help="texts to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    add_json(parser)
    options = _of_run(parser, argv)
    if options is None:
        return 0
    _check_sampling(options)
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        raise UserError("--prompt is not UTF-8; give it as text of that encoding") from None
    from latte.generate import generate_run

    texts = generate_run(
        options.run_dir,
        [options.prompt] * options.batch,
        tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    if options.json:
        whole = ["".join(texts)] if options.batch == 1 else list(texts)
        print(json.dumps([{"prompt": options.prompt, "text": text} for text in whole]))
    elif options.batch == 1:
        for piece in (options.prompt, *texts, "\n"):
            print(piece, end="", flush=True)
    else:
        print("\n---\n".join(options.prompt + text for text in texts))
    return 0


def _serve(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one (%(default)s)")
    parser.add_argument(
        "--slots", type=int, default=16, help="requests that are drawn at once (%(default)s)"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=4096,
        help="most tokens of a prompt with its continuation (%(default)s)",
    )
    parser.add_argument(
        "--max-requests",
        type=int,
        default=256,
        help="requests in flight above which others are refused (%(default)s)",
    )
    options = _of_run(parser, argv)
    if options is None:
        return 0
    for name, least in (("slots", 1), ("max_length", 2), ("max_requests", 1), ("port", 0)):
        _check_least(name, getattr(options, name), least)
    try:
        from latte.serve.app import serve
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed; run `pip install latte-lm[serve]`"
        ) from None

    serve(
        options.run_dir,
        host=options.host,
        port=options.port,
        slots=options.slots,
        room=options.max_length,
        most=options.max_requests,
    )
    return 0


def _export(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("--out", metavar="DIR", help="the folder to write; it must not be there")
    parser.add_argument(
        "--push-to-hub", metavar="NAME", help="put it on the Hugging Face Hub, as USER/MODEL"
    )
    parser.add_argument(
        "--licence", default="apache-2.0", help="of the weights, for the card (%(default)s)"
    )
    parser.add_argument(
        "--shard-bytes", type=int, default=4_000_000_000, help="most bytes a file (%(default)s)"
    )
    add_json(parser)
    options = _of_run(parser, argv)
    if options is None:
        return 0
    if options.out is None:
        raise UserError("--out is missing; name the folder to write")
    _check_least("shard_bytes", options.shard_bytes, 1)
    from latte.hf.export import export, push

    out = Path(options.out)
    found = export(options.run_dir, out, licence=options.licence, shard_bytes=options.shard_bytes)
    if options.push_to_hub:
        found["pushed"] = push(out, options.push_to_hub)
    print_values(found, options.json)
    return 0


def _import(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("--from", dest="folder", metavar="DIR", help="a folder for transformers")
    _add_run_dir(parser, "the run directory to make; it must not be there")
    add_json(parser)
    options = parser.options(argv)
    if options is None:
        return 0
    for name, value in (("--from", options.folder), ("--run", options.run_dir)):
        if value is None:
            raise UserError(f"{name} is missing; see `{parser.prog} --help`")
    folder = Path(options.folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no model's folder: it has no config.json")
    from latte.hf.imports import import_folder

    print_values(import_folder(folder, Path(options.run_dir)), options.json)
    return 0


def _check_sampling(options: argparse.Namespace) -> None:
    for name, least in (("tokens", 1), ("batch", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        _check_least(name, getattr(options, name), least)
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p is {options.top_p}, but it must be above 0 and at most 1")


def _check_least(name: str, value: float | int, least: int) -> None:
    if not value >= least:
        flag = name.replace("_", "-")
        raise UserError(f"--{flag} is {value}, but it must be at least {least}")


def _of_run(parser: Parser, argv: list[str]) -> argparse.Namespace | None:
    """The options of a command that reads a run; None once help is shown."""
    _add_run_dir(parser, "the run's directory")
    options = parser.options(argv)
    if options is None:
        return None
    if options.run_dir is None:
        raise UserError(f"--run is missing; see `{parser.prog} --help`")
    options.run_dir = folder_of(options.run_dir)
    read_run_config(options.run_dir)
    return options


def folder_of(run_dir: str) -> Path:
    """A run directory as a folder of this host."""
    if "://" not in run_dir:
        return Path(run_dir)
    from latte.mirror import fetch

    return fetch(run_dir)


def _add_run_dir(parser: Parser, words: str) -> None:
    parser.add_argument("--run", "--run-dir", dest="run_dir", metavar="DIR", help=words)


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for a program to read")


def print_values(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
        return
    width = max(map(len, values), default=0) + 2
    for key, value in values.items():
        print(f"{key:{width}}{f'{value:.5g}' if isinstance(value, float) else value}")


def _data(parser: Parser, argv: list[str]) -> int:
    from latte.data_cli import COMMANDS

    return _dispatch(parser.prog, COMMANDS, argv)


_COMMANDS = {
    "train": (_train, "train a model, or go on with a run that was stopped"),
    "eval": (_eval, "the held-out loss of a run's newest checkpoint"),
    "generate": (_generate, "text from a run's newest checkpoint"),
    "serve": (_serve, "a run behind the OpenAI protocol, completions and chat"),
    "export": (_export, "a run's newest checkpoint as a folder for Hugging Face transformers"),
    "import": (_import, "a run directory of a folder for Hugging Face transformers"),
    "plan": (_plan, "what a run would take on a slice of TPUs, with none at hand"),
    "data": (_data, "prepare corpora and look at them"),
}
