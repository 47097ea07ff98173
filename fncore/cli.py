"""From a typed config to a command line, and from a mistake to one sentence."""

import dataclasses
import difflib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from fncore.errors import UserError

Config = TypeVar("Config")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


JsonObject = Annotated[
    dict[str, Any],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: _json_object(words[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def nearest(name: str, known: Collection[str]) -> str:
    """The end of an error message: what was probably meant, and what there is."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"


def require(config: Any, least: float, *names: str) -> None:
    """Raise `UserError` for a setting below `least`, or NaN or infinite. None, a default, passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            bound = f"{least} or more" if value < least else "a finite number"
            raise UserError(f"--{name.replace('_', '-')} {value}: must be {bound}")


def check_seed(seed: int) -> None:
    """Raise `UserError` for a seed that 64 bits can't hold."""
    if not -(2**63) <= seed < 2**63:
        raise UserError(f"--seed {seed}: must be at least -2**63 and below 2**63")


@contextmanager
def mistakes() -> Iterator[None]:
    """Settings that a function below refuses with `ValueError` are the user's to mend."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def parse(kind: type[Config], arguments: list[str] | None = None) -> Config:
    """A config of the dataclass `kind` from the command line: flags, over the defaults that `--config FILE` gives."""
    arguments = sys.argv[1:] if arguments is None else arguments
    default = kind()
    for index, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if name == "--config":
            default = read(kind, Path(value or " ".join(arguments[index + 1 : index + 2])))
    return tyro.cli(kind, args=arguments, default=default)


def read(kind: type[Config], path: Path) -> Config:
    """A config from a JSON file, such as a run's config.json. Raises `UserError` for what it can't use, by name."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"--config {path}: can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--config {path}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: expected an object of settings, found {type(values).__name__}")
    default: Any = kind()
    known = {field.name: field for field in dataclasses.fields(default)}
    for name in values:
        if name not in known:
            raise UserError(f"--config {path}: unknown setting {name!r}{nearest(name, known)}")
    return dataclasses.replace(default, **{name: _typed(path, default, name, value) for name, value in values.items()})


def _typed(path: Path, default: Any, name: str, value: Any) -> Any:
    """The value as the command line would read it, so that a file is checked as strictly as flags are."""
    if value is None and getattr(default, name) is None:
        return None
    kind, flag = type(default), f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        words = [flag if value else f"--no-{flag[2:]}"]
    elif isinstance(value, list):
        words = [flag, *map(str, value)]
    else:
        words = [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
    try:
        with redirect_stderr(io.StringIO()):  # tyro prints some errors whatever it is told
            return getattr(tyro.cli(kind, args=words, console_outputs=False), name)
    except SystemExit as error:
        raise UserError(f"--config {path}: {name} can't be {value!r}") from error


def run(main: Callable[[Config], None], kind: type[Config]) -> None:
    """Parse the command line and run `main`. A `UserError` becomes one sentence on stderr and exit status 2.

    Where every rank makes the same mistake, rank 0 says it: the others leave it a moment to do so.
    """
    rank = int(os.environ.get("RANK", 0))
    try:
        main(parse(kind))
    except UserError as error:
        if rank:
            time.sleep(1.0)
        where = f" (rank {rank})" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        print(f"error{where}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        os._exit(2)  # no destructor of a process group may wait for peers
    except KeyboardInterrupt as stop:
        if rank == 0:
            print(f"stopped; {stop or 'no model was saved'}", file=sys.stderr, flush=True)
        os._exit(130)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
