"""Whether a store is what its manifest says."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from latte.data.manifest import (
    Manifest,
    check_file,
    mend,
    read_file,
    read_manifest,
    read_records,
    shard_name,
)
from latte.data.place import Place
from latte.data.shard import FileRecord
from latte.errors import UserError

_THREADS = 8
"""Files that are looked at a time."""


def verify(
    place: Place, *, full: bool = False, progress: Callable[[int, int], None] = lambda *_: None
) -> Manifest:
    """Checks a store: that all its files are there and have their sizes, and that counts agree.

    Args:
      full: read every file and compare its checksum too.
      progress: is told the bytes that were checked, and all.

    Raises:
      UserError: a file is missing, truncated or corrupt, or the manifest's counts are not those of
        the shards.
    """
    manifest = read_manifest(place)
    for name in manifest.files:
        read_file(place, manifest, name)
    records = read_records(place, manifest)
    files = [
        (f"{shard_name(i)}/{name}", file)
        for i, record in enumerate(records)
        for name, file in record.files.items()
    ]
    _check_counts(place, manifest, len(records), sum(file.bytes for _, file in files))
    done = 0

    def check(item: tuple[str, FileRecord]) -> int:
        name, file = item
        if full or not place.size_is(name, file.bytes):
            check_file(place, name, file, place.digest(name))
        return file.bytes

    with ThreadPoolExecutor(_THREADS) as pool:
        for size in pool.map(check, files):
            done += size
            progress(done, manifest.bytes)
    return manifest


def _check_counts(place: Place, manifest: Manifest, shards: int, size: int) -> None:
    if (shards, size) != (manifest.shards, manifest.bytes):
        raise UserError(
            f"{place} has {shards} shards of {size} bytes, and its manifest says "
            f"{manifest.shards} of {manifest.bytes}: {mend(place)}"
        )
