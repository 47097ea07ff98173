"""Folders that appear whole or not at all."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(place: Path) -> Iterator[Path]:
    """A new folder beside `place` to write into, which takes that place, synced, when the block ends without an error.

    What stood there is moved aside first and removed last. Wherever a crash strikes, one of both is whole: at `place`,
    or, for the moment between two renames, the former one at `place.old-...`.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    name = uuid.uuid4().hex
    draft, old = place.with_name(f".{place.name}.{name}"), place.with_name(f"{place.name}.old-{name[:8]}")
    draft.mkdir()
    try:
        yield draft
        for path in (*draft.rglob("*"), draft):
            _sync(path)
        if place.exists():
            place.rename(old)
        try:
            draft.rename(place)
        except BaseException:
            if old.exists():
                old.rename(place)
            raise
        with contextlib.suppress(OSError):  # some file systems can't sync a folder
            _sync(place.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
