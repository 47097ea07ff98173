"""A run's folder and its face: config.json, metrics.jsonl, samples.jsonl, curves.png, a progress line, a table."""

import dataclasses
import json
import math
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fncore import policy, tree
from fncore.errors import UserError
from fncore.tree import Tree

Record = dict[str, Any]


def default_folder(name: str) -> str:
    return f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def due(every: int, step: int, last: int) -> bool:
    """Whether something that happens `every` so many steps (0: never), and after the last, happens now."""
    return every > 0 and (step % every == 0 or step == last)


def require_finite(grad_norm: float, *, step: int, loss: float) -> None:
    """Raise `UserError` for a gradient or loss that is NaN or infinite. Reduced, they are the same on all ranks: all
    stop."""
    if not (math.isfinite(grad_norm) and math.isfinite(loss)):
        raise UserError(
            f"step {step}: the norm of the gradient is {grad_norm} and the loss {loss}, so training can't go on; try a "
            "lower --lr, more --warmup-steps or --dtype float32"
        )


def require_finite_parameters(params: Tree) -> None:
    """Raise `UserError` for parameters that are NaN or infinite, as no gradient after the last update would show."""
    if not all(leaf.isfinite().all() for leaf in tree.leaves(params)):
        raise UserError("the last update left parameters that are not finite, so no model was saved; try a lower --lr")


def require_free(folder: str | None) -> None:
    """Raise `UserError` if the run folder, where one is named, holds anything already."""
    with _writing(folder):
        path = Path(folder or "")
        if folder is not None and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"--out {folder} already holds files; name a new folder, or remove that one")


@contextmanager
def _writing(folder: str | Path | None) -> Iterator[None]:
    """A full disk or a folder without permission is the user's to mend."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and "(os error " not in str(error):  # as libraries in Rust say it
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--out {folder}: can't be written ({reason})") from error


def versions() -> dict[str, str]:
    """Of Python and of what the numbers depend on."""
    names = ("fncore", "torch", "transformers", "tokenizers", "reasoning-gym", "math-verify")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}


class Run:
    """Rank 0 writes and shows; on the other ranks (`active=False`) every method does nothing.

    Raises `UserError` if the folder holds anything already: nothing is overwritten. As a context it gives the terminal
    back at its end, after an error as well.
    """

    def __init__(self, folder: str, config: Any, *, total: int, active: bool, provenance: Record | None = None) -> None:
        self.folder, self.active = Path(folder), active
        self.records: list[Record] = []
        self.shown: list[Record] = []
        if not active:
            return
        self.saved = False
        require_free(folder)
        with _writing(folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(dataclasses.asdict(config), indent=2)
            (self.folder / "config.json").write_text(text + "\n")
            facts = json.dumps({**(provenance or {}), "versions": versions()}, indent=2)
            (self.folder / "provenance.json").write_text(facts + "\n")
        self.console = Console()
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("", total=total)
        self.total, self.last_line = total, 0.0
        self.progress.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.active:
            self.progress.stop()
            if isinstance(error, KeyboardInterrupt):
                error.args = (f"{'the' if self.saved else 'no'} model was saved; the run is in {self.folder}/",)

    def say(self, text: str) -> None:
        if self.active:
            self.progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def log(self, record: Record, *, show: list[str]) -> None:
        """Append a line to metrics.jsonl and show the numbers named in `show`. NaN and infinity are written as null."""
        if not self.active:
            return
        self.records.append(record)
        self._append("metrics.jsonl", [{k: _finite(v) for k, v in record.items()}])
        text = "  ".join(f"{name} {record[name]:.4g}" for name in show if record.get(name) is not None)
        self.progress.update(self.task, completed=record["step"], description=text)
        due = record.get("eval/accuracy") is not None or record["step"] == self.total
        if not self.console.is_terminal and (due or time.monotonic() - self.last_line > 5.0):
            self.say(f"step {record['step']}/{self.total}  {text}")
            self.last_line = time.monotonic()

    def samples(self, records: list[Record]) -> None:
        """Append sampled completions to samples.jsonl; the latest are shown at the end."""
        if self.active and records:
            self._append("samples.jsonl", records)
            self.shown = records

    def save_model(self, trained: policy.Policy, *, card: str) -> None:
        """Write the model to the folder's `model/`."""
        if self.active:
            with _writing(self.folder):
                policy.save(self.folder / "model", trained, card=card)
            self.saved = True

    def finish(self) -> None:
        """Draw the curves and print the last samples and where everything is."""
        if not self.active:
            return
        self.progress.stop()
        with _writing(self.folder):
            draw(self.records, self.folder / "curves.png")
        if self.shown:
            table = Table("prompt", "completion", "reward", title="sampled completions")
            for sample in self.shown[:8]:
                table.add_row(_plain(sample["prompt"]), _plain(sample["completion"]), f"{sample['reward']:.3g}")
            self.console.print(table)
        self.say(f"written to {self.folder}/: {', '.join(sorted(path.name for path in self.folder.iterdir()))}")

    def _append(self, name: str, records: list[Record]) -> None:
        with _writing(self.folder), (self.folder / name).open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(text: str, limit: int = 70) -> str:
    """Safe to show: no control characters, no console markup, not long."""
    text = "".join(c if c.isprintable() else " " for c in text).replace("[", r"\[")
    return text if len(text) <= limit else "..." + text[-limit:]


def draw(records: list[Record], path: Path) -> None:
    """Small multiples of every number that was recorded at least twice and changed, over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                series.setdefault(name, []).append((record["step"], value))
    series = {name: points for name, points in series.items() if len({y for _, y in points}) > 1}
    first = ["eval/accuracy", "reward/mean", "loss"]
    names = sorted(series, key=lambda name: (first.index(name) if name in first else len(first), name))
    columns = 4
    rows = max(1, math.ceil(len(names) / columns))
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 2.6 * rows), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    for axis, name in zip(axes.flat, names, strict=False):
        axis.plot(*zip(*series[name], strict=True), marker="o" if len(series[name]) < 20 else None, markersize=3)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
