"""Imports run one way, randomness is a value, and nothing is unpickled or evaluated: read from the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("fncore", "algorithms", "launch")
SOURCES = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

# What the modules of `fncore`, or all of a package, may import of `fncore`. Every module needs a row.
CORE = "errors tree random stats batch grad nn optim"
ALLOWED = {
    "errors": "",
    "tree": "",
    "random": "",
    "stats": "",
    "batch": "",
    "folder": "",
    "grad": "tree",
    "nn": "random",
    "optim": "tree",
    "cli": "errors",
    "step": CORE,
    "distributed": CORE,
    "models": f"{CORE} folder models",
    "text": "errors random models.hf text",
    "sampling": f"{CORE} models sampling text.chat",
    "policy": "errors models text",
    "evaluation": f"{CORE} sampling text",
    "run": "errors policy tree",
    "checkpoint": f"{CORE} folder step",
}
ALGORITHMS = f"{CORE} text"  # they know no model, no rank and no config file

# launch/bench.py measures the other libraries too.
ONLY_IN = {
    "transformers": ("fncore.models.hf", "fncore.models.gguf", "fncore.text", "launch.bench"),
    "tokenizers": ("fncore.text",),
    "torch.distributed": ("fncore.distributed",),
}
GENERATORS = (
    "torch.rand", "torch.randn", "torch.randint", "torch.randperm", "torch.normal", "torch.bernoulli",
    "torch.rand_like", "torch.randn_like", "torch.randint_like", "torch.poisson", "torch.multinomial",
    "torch.manual_seed", "torch.seed", "torch.get_rng_state", "torch.set_rng_state", "torch.random",
    "torch.nn.functional.dropout", "torch.nn.init", "random", "numpy.random", "secrets",
    *(f"Tensor.{name}_" for name in ("normal", "uniform", "bernoulli", "random", "exponential", "cauchy")),
)  # fmt: skip
CODE = ("eval", "exec", "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "torch.load")


def used(source: str) -> Iterator[tuple[int, str]]:
    """The line and full dotted name of everything imported, and of every use of an imported or a builtin name."""
    tree, names = ast.parse(source), {"eval": "eval", "exec": "exec"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                names[item.asname or item.name.split(".")[0]] = item.name if item.asname else item.name.split(".")[0]
                yield node.lineno, item.name
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for item in node.names:
                names[item.asname or item.name] = f"{origin}.{item.name}"
                yield node.lineno, f"{origin}.{item.name}"
    for node in ast.walk(tree):
        parts, root = [], node
        while isinstance(root, ast.Attribute):
            parts, root = [root.attr, *parts], root.value
        if isinstance(root, ast.Name) and root.id in names:
            yield root.lineno, ".".join([names[root.id], *parts])
        elif isinstance(node, ast.Attribute):
            yield node.lineno, f"Tensor.{node.attr}"  # or another object's; only the names of `GENERATORS` matter


def under(name: str, places: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of `places` or lies in one."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def arrow(module: str, name: str) -> str | None:
    """What is wrong when `module` imports `name`."""
    layer, target = FOLDERS.index(module.split(".")[0]), name.split(".")[0]
    if name.startswith("."):
        return "relative import"
    if target not in FOLDERS:
        return None
    if target == "launch" or FOLDERS.index(target) > layer:
        return f"imports {name}"
    if target == "fncore" and layer < 2:
        row = ALGORITHMS
        if layer == 0:
            own = module.removeprefix("fncore.")
            row = ALLOWED.get(own, ALLOWED.get(own.split(".")[0]))
            if row is None:
                return "has no row in ALLOWED"
        if not under(name, tuple(f"fncore.{part}" for part in row.split())):
            return f"imports {name}, outside its row"
    return None


def faults(path: str, source: str) -> list[str]:
    """What a source file at `path` breaks, with line numbers."""
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    found = []
    for line, name in used(source):
        problems = [arrow(module, name)]
        problems += [
            f"uses {one}" for one, places in ONLY_IN.items() if under(name, (one,)) and not under(module, places)
        ]
        if under(name, CODE):
            problems.append(f"runs or unpickles code: {name}")
        if not module.startswith("launch") and under(name, GENERATORS):
            problems.append(f"reads a global generator: {name}")
        found += [f"{path}:{line}: {problem}" for problem in problems if problem]
    return found


@pytest.mark.parametrize("path", SOURCES)
def test_imports_run_one_way_and_nothing_is_drawn_or_evaluated(path):
    assert faults(path, (ROOT / path).read_text()) == []


def test_every_row_but_the_checkpoint_names_a_module():
    named = {path.removesuffix(".py").split("/")[1] for path in SOURCES if path.startswith("fncore/")} - {"__init__"}
    assert named <= set(ALLOWED) <= named | {"checkpoint"}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("fncore/tree.py", "from fncore import random"),
        ("fncore/batch.py", "import fncore.tree"),
        ("fncore/nn.py", "from fncore.models import decoder"),
        ("fncore/optim.py", "from fncore import stats as s"),
        ("fncore/models/lora.py", "from fncore.text.chat import Messages"),
        ("fncore/models/decoder.py", "from fncore import distributed"),
        ("fncore/sampling/engine.py", "from fncore.text.tasks import Task"),
        ("fncore/run.py", "def late():\n    from fncore.distributed import World"),
        ("fncore/evaluation.py", "import torch.distributed as dist"),
        ("fncore/novelty.py", "from fncore import tree"),
        ("fncore/step.py", "from .distributed import World"),
        ("fncore/step.py", "from algorithms import kl"),
        ("fncore/step.py", "from launch.sft import main"),
        ("algorithms/kl.py", "from fncore.distributed import World"),
        ("algorithms/kl.py", "from fncore.models import decoder"),
        ("algorithms/kl.py", "import launch.grpo"),
        ("launch/sft.py", "from launch.grpo import Config"),
        ("launch/sft.py", "from transformers import AutoTokenizer"),
        ("fncore/policy.py", "import transformers"),
        ("fncore/models/hf.py", "from tokenizers import Tokenizer"),
        ("algorithms/kl.py", "import torch\nx = torch.rand(3)"),
        ("algorithms/kl.py", "import torch as t\nt.manual_seed(0)"),
        ("algorithms/kl.py", "from torch import multinomial"),
        ("algorithms/kl.py", "noise = values.clone().normal_()"),
        ("fncore/nn.py", "import torch.nn.functional as F\ny = F.dropout(x)"),
        ("fncore/nn.py", "from torch import nn\ny = nn.functional.dropout(x)"),
        ("fncore/batch.py", "import random\nrandom.shuffle(rows)"),
        ("fncore/batch.py", "from random import shuffle"),
        ("fncore/batch.py", "import numpy as np\nnp.random.rand()"),
        ("fncore/batch.py", "y = eval('1')"),
        ("algorithms/rewards/verifiers.py", "run = exec"),
        ("launch/sft.py", "import torch\nparams = torch.load('model.pt')"),
        ("launch/sft.py", "from pickle import loads"),
    ],
)
def test_a_forbidden_line_is_found(path, source):
    assert faults(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "fncore/nn.py",
            "from fncore import random\nimport torch\nkeep = random.bernoulli(key)\ny = torch.where(a, b, c)",
        ),
        ("fncore/text/chat.py", "from transformers import AutoTokenizer\nfrom tokenizers import Tokenizer"),
        ("algorithms/kl.py", "from fncore import random, stats\nx = random.uniform(key, ())"),
        ("launch/sft.py", "import torch\nfrom fncore.distributed import World\ntorch.manual_seed(0)\nmodel.eval()"),
    ],
)
def test_an_allowed_line_passes(path, source):
    assert faults(path, source) == []
