"""A pool of gloo processes that lives as long as the test session and runs functions on groups of its first ranks."""

import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from fncore.distributed import World

SIZE = 4
GROUPS: dict[int, Any] = {}  # in a process of the pool: the group of the first n ranks


class Collectives:
    """Records the collectives that a rank issues: operation, elements, dtype."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str]] = []
        self.bytes = 0

    def __enter__(self) -> "Collectives":
        self._originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast")}
        for name, original in self._originals.items():
            setattr(dist, name, self._recorded(name, original))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _recorded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[-1] if name == "all_gather" else args[0]
            self.calls.append((name, tensor.numel(), str(tensor.dtype)))
            self.bytes += tensor.numel() * tensor.element_size()
            return original(*args, **kwargs)

        return call


def _serve(rank: int, rendezvous: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=SIZE)
    GROUPS.update({size: dist.new_group(list(range(size))) for size in range(1, SIZE + 1)})
    while (task := tasks.get()) is not None:
        function, size, args, kwargs = task
        try:
            results.put((rank, function(World(rank, size, group=GROUPS[size]), *args, **kwargs), None))
        except Exception:
            results.put((rank, None, traceback.format_exc()))


class Pool:
    def __init__(self, folder: Any) -> None:
        context = get_context("spawn")
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(SIZE)]
        path = str(folder / "rendezvous")
        self.processes = [
            context.Process(target=_serve, args=(rank, path, self.tasks[rank], self.results), daemon=True)
            for rank in range(SIZE)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], size: int, *args: Any, **kwargs: Any) -> list[Any]:
        """`function(world, *args)` on ranks 0 to size - 1; what each returned, by rank."""
        for rank in range(size):
            self.tasks[rank].put((function, size, args, kwargs))
        found = dict[int, Any]()
        for _ in range(size):
            rank, value, error = self.results.get(timeout=300)
            assert error is None, f"rank {rank}:\n{error}"
            found[rank] = value
        return [found[rank] for rank in range(size)]

    def close(self) -> None:
        for queue in self.tasks:
            queue.put(None)
        for process in self.processes:
            process.join(10)
            process.kill()
