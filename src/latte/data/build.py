"""The making of a store: plan, tokenizer, shards, manifest. Whatever is there is not made again.

plan.json is written first, and says what the store will be: a second start with other settings is
refused. manifest.json comes last: a store without one is not whole.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from latte.data.engine import Engine, make_shards
from latte.data.inputs import Found, size_of_input
from latte.data.manifest import FORMAT, NAME, write_manifest
from latte.data.place import Place
from latte.data.progress import Progress, Stage
from latte.data.shard import NAME as RECORD
from latte.data.shard import ShardRecord
from latte.data.task import PARTIAL, Job, read_hashes, read_shard, too_many_bad
from latte.data.tokenizer import Tokenizer, read_tokenizer
from latte.errors import UserError

PLAN = "plan.json"
_THREADS = 16
"""Records of shards that are read at a time."""


@dataclass(frozen=True)
class Plan:
    """What decides a store.

    corpus: how it was asked for. inputs: what tells each from others, as far as it is known.
    tokenizer: how it is made, or the fingerprint of one that is there.
    heldout: share of the text.
    weights: published proportions of the subsets.
    left_out: files that are in no shard, each with the reason.
    """

    corpus: str
    inputs: list[Any]
    tokenizer: dict[str, Any]
    heldout: float
    weights: dict[str, float]
    left_out: dict[str, str]

    def to_json(self) -> bytes:
        inputs = {
            "count": len(self.inputs),
            "sha256": hashlib.sha256(json.dumps(self.inputs).encode()).hexdigest(),
        }
        content = {"format": FORMAT, **asdict(self), "inputs": inputs}
        return json.dumps(content, indent=1, sort_keys=True).encode()


def build(
    place: Place,
    plan: Plan,
    found: Found,
    make_tokenizer: Callable[[], Tokenizer],
    engine: Engine,
    skip_bad: int,
    report: Progress,
) -> None:
    """Makes a store, or what is missing of it.

    Args:
      make_tokenizer: called where the store has no tokenizer yet.
      skip_bad: documents that may be bad, and are left out.

    Raises:
      UserError: another store was begun there, or the corpus is bad.
    """
    _begin(place, plan)
    if place.read(NAME) is not None:
        return
    tokenizer = _keep_tokenizer(place, make_tokenizer)
    job = Job(place, tokenizer, found.inputs, found.share, found.corpus.subsets, skip_bad)
    _make_missing(job, engine, report)
    records = _leave_out_copies(_read_shards(job), job)
    bad = [item for record in records for item in record.bad]
    if len(bad) > skip_bad:
        raise too_many_bad(bad, skip_bad)
    for where, why in bad:
        report.say(f"left out {where}: {why}")
    if not any(record.ranges for record in records):
        raise UserError(f"{plan.corpus} holds no text: give another --data.path or --data.corpus")
    write_manifest(
        place,
        records,
        {PLAN: plan.to_json(), **tokenizer.files()},
        corpus=plan.corpus,
        vocab_size=tokenizer.vocab_size,
        fingerprint=tokenizer.fingerprint,
        weights=plan.weights,
        left_out=plan.left_out,
    )


def _begin(place: Place, plan: Plan) -> None:
    """Writes the plan, or compares it with the one that is there."""
    there, new = place.read(PLAN), plan.to_json()
    if there is None:
        place.write(PLAN, new)
    elif there != new:
        before, now = json.loads(there), json.loads(new)
        key = next(key for key in now if before.get(key) != now[key])
        raise UserError(
            f"{place} was begun with another {key} ({_short(before.get(key))}, and now it is "
            f"{_short(now[key])}): give another --out, or delete that folder"
        )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}…"


def _keep_tokenizer(place: Place, make: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer of a store; a trained one is kept, so that no second start trains it again."""
    try:
        return read_tokenizer(place.read, place)
    except UserError:
        tokenizer = make()
    for name, content in tokenizer.files().items():
        place.write(name, content)
    return tokenizer


def _make_missing(job: Job, engine: Engine, report: Progress) -> None:
    """Makes the shards that are not there: those of held-out files first, so that no copy of one
    of their documents is trained on."""
    _remove_partial(job.place)
    names = job.place.names("shards")
    done = {int(name.split("/")[1]) for name in names if name.endswith(f"/{RECORD}")}
    sizes = {i: size_of_input(item) for i, item in enumerate(job.inputs) if i not in done}
    stage = Stage(report, "tokenizing", sum(sizes.values()))
    hashes, made = np.empty(0, np.uint64), 0
    for heldout in (True, False):
        todo = [(i, item) for i, item in enumerate(job.inputs) if item.heldout == heldout]
        missing = [(i, item) for i, item in todo if i not in done]
        size = sum(sizes[i] for i, _ in missing)
        for _ in make_shards(engine, job, missing, hashes, size, stage.advance):
            made += 1
            if not all(sizes.values()):  # of files elsewhere: they are about alike
                stage.expect(made, len(sizes))
        if heldout:
            some = [read_hashes(job.place, i) for i, _ in todo]
            hashes = np.unique(np.concatenate([hashes, *some]))
    _remove_partial(job.place)


def _remove_partial(place: Place) -> None:
    """Removes what tasks that were killed, here or on other machines, had begun."""
    if place.is_local:
        for partial in place.folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(partial, ignore_errors=True)


def _read_shards(job: Job) -> list[ShardRecord]:
    def read(number: int) -> ShardRecord:
        record = read_shard(job.place, number)
        assert record is not None
        return record

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(read, range(len(job.inputs))))


def _leave_out_copies(records: list[ShardRecord], job: Job) -> list[ShardRecord]:
    """Of files with the same content only the first one counts; the others are bad."""
    seen: dict[str, str] = {}
    kept = []
    for record, item in zip(records, job.inputs, strict=True):
        if item.source:
            name, digest = item.name, record.sources[0].sha256
            if digest in seen:
                bad = [(name, f"a copy of {seen[digest]}")]
                record = replace(record, ranges=[], bad=bad, copies=0)
            seen.setdefault(digest, name)
        kept.append(record)
    return kept
