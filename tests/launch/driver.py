"""Many launches inside one `torchrun`, since starting four ranks takes longer than the runs themselves.

torchrun --standalone --nproc-per-node 4 tests/launch/driver.py jobs.json

A job is [script, ranks, port, settings]: its first ranks call the script's `main`, the others go on to the next job.
"""

import importlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    # Each job has a rendezvous of its own, which torchrun's store would not give a second time.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for script, ranks, port, settings in json.loads(Path(sys.argv[1]).read_text()):
        if int(os.environ["RANK"]) < ranks:
            os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"] = str(ranks), str(port)
            module = importlib.import_module(f"launch.{script}")
            module.main(module.Config(**settings))


if __name__ == "__main__":
    main()
