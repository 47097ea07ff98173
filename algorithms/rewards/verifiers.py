"""Verifiers: functions that score a completion, built from plain data in the process that runs them.

A completion is untrusted text. The libraries that read it here (reasoning-gym, SymPy) hand some of it to Python's
`eval`, so that `judging` puts every piece of code made from a string through a whitelist of names first.
"""

import difflib
import dis
import hashlib
import importlib
import inspect
import logging
import re
import string
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from types import CodeType
from typing import Any

from fncore.errors import UserError
from fncore.text.tasks import gym_dataset

Verifier = Callable[[list[dict[str, str]], str, str, int], object]
"""`(prompt, completion, answer, index)` to a number; a function of an operator may return anything."""

BUILTIN = ("task", "math", "number")
_NUMBERS = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
MATH_CHARACTERS = 2_000
TASK_CHARACTERS = 20_000

# Powers of powers and exponents of five digits and more, which would be computed in full.
_HUGE = re.compile(r"(?:\^|\*\*)[\s\d({]*(?:\^|\*\*)|(?:\^|\*\*)[\s({+-]*\d{5,}")
# As reasoning-gym reads it, whatever the case and the spaces; an imaginary unit may follow.
_NAN = re.compile(r"(?<![^\W\d_])nan[ij]?(?![^\W\d_])")
_WORD = re.compile(r"(?<!\\)\b[^\W\d_]{2,}")

_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
        Integer Float Rational Symbol Function Add Mul Pow Abs sqrt cbrt root exp log ln sin cos tan cot sec csc
        asin acos atan atan2 acot asec acsc sinh cosh tanh coth asinh acosh atanh erf gamma factorial binomial
        floor ceiling sign Min Max pi oo
        """,
    )
).union(string.ascii_letters)
# How SymPy's parser makes its names, before it reads a text.
_SYMPY = compile("from sympy import *", "<string>", "exec")
_REFUSED = ("FORMAT", "FOR_ITER", "MAKE_FUNCTION", "IMPORT", "STORE", "SEND", "YIELD")


class RefusedCode(Exception):
    """Text of a model was about to run as code that is more than a formula or a literal."""


def verifier(name: str, task_spec: dict[str, Any]) -> Verifier:
    """The verifier of a reward.

    Args:
        name: "task" (the task's own), "math" (equality of formulas by math-verify), "number" (the last number of the
            completion is the answer, whatever the words around it), or "module:function", a function of the operator
            that is called with the keyword arguments prompt, completion and answer.
        task_spec: What the task's `spec()` returned.

    Raises:
        UserError: no such verifier, or it can't be loaded.
    """
    if name == "math":
        return _math()
    if name == "number":
        return _number
    if name == "task":
        return _gym(task_spec) if task_spec.get("kind") == "reasoning_gym" else _math()
    if ":" in name:
        function = _function(name)
        return lambda prompt, completion, answer, index: function(prompt=prompt, completion=completion, answer=answer)
    near = difflib.get_close_matches(name, BUILTIN, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    raise UserError(f"There is no reward {name!r}{hint}; a reward is one of {', '.join(BUILTIN)}, or module:function.")


def _number(prompt: list[dict[str, str]], completion: str, answer: str, index: int) -> float:
    found = _NUMBERS.findall(extract_answer(completion[-TASK_CHARACTERS:]))
    expected = _NUMBERS.findall(answer)
    return float(bool(found and expected) and _value(found[-1]) == _value(expected[-1]))


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def provenance(name: str) -> dict[str, str]:
    """The file of a loaded "module:function" and the SHA-256 of its bytes; nothing for the built-in verifiers."""
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None) if ":" in name else None
    return {"file": file, "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest()} if file else {}


def extract_answer(completion: str) -> str:
    """The text in the last `<answer>...</answer>` after the thinking, or all that follows the thinking, stripped."""
    answer = _tagged(completion)
    return (_reply(completion) if answer is None else answer).strip()


@contextmanager
def judging() -> Iterator[None]:
    """While it lasts, code that this thread makes from a string may be a formula or a literal and nothing else.

    Raises:
        RefusedCode: inside, at the call of `eval` or `exec`, before anything has run.
    """
    _install_guard()
    _guarded.active = True
    try:
        yield
    finally:
        _guarded.active = False


def _reply(completion: str) -> str:
    return completion.rpartition("</think>")[2]


def _tagged(completion: str) -> str | None:
    # Not by a regular expression: a completion of nothing but opening tags would take quadratic time.
    before, closing, _ = _reply(completion).rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer if opening and closing else None


_guarded = threading.local()
_installed = threading.Event()


def _install_guard() -> None:
    # An audit hook sees what every library does, and can't be taken out again by anything that runs later.
    if not _installed.is_set():
        _installed.set()
        sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and getattr(_guarded, "active", False) and not _importing():
        _check_code(arguments[0])


def _check_code(code: CodeType) -> None:
    # Code objects as such differ by the flags of the module that made them.
    if (code.co_code, code.co_names, code.co_consts) == (_SYMPY.co_code, _SYMPY.co_names, _SYMPY.co_consts):
        return
    unknown = {*code.co_names, *code.co_varnames, *code.co_cellvars} - _NAMES
    if unknown:
        raise RefusedCode(f"names {', '.join(sorted(unknown))}")
    for operation in (instruction.opname for instruction in dis.get_instructions(code)):
        # Arithmetic on SymPy's numbers is what a formula is; on literals it can only fill the memory.
        if operation.startswith(_REFUSED) or (operation.startswith("BINARY") and not code.co_names):
            raise RefusedCode(f"does {operation}")


def _importing() -> bool:
    frame = sys._getframe(2)
    while frame:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _gym(spec: dict[str, Any]) -> Verifier:
    dataset = gym_dataset(spec["name"], spec["config"])

    def verify(prompt: list[dict[str, str]], completion: str, answer: str, index: int) -> float:
        entry = dataset[index]
        reply = extract_answer(completion)[-TASK_CHARACTERS:]
        if _HUGE.search(reply) or (_has_nan(reply) and not _has_nan(str(entry["answer"]))):
            return 0.0
        try:
            with judging():
                return float(dataset.score_answer(reply, entry=entry))
        except Exception:
            # Scorers raise on replies that they can't take apart; that they can score at all was checked at the start.
            return 0.0

    entry = dataset[0]
    try:
        dataset.score_answer(entry["answer"], entry=entry)
    except Exception as error:
        raise UserError(
            f"Task {spec['name']!r} can't score its own answer: {type(error).__name__}: {error}."
        ) from error
    return verify


def _has_nan(text: str) -> bool:
    # Its distance to a number compares as if it were none.
    return bool(_NAN.search(text.replace(" ", "").lower()))


def _math() -> Verifier:
    try:
        import math_verify
    except ImportError as error:
        raise UserError(f"The reward needs the package math-verify: {error}.") from error
    # It warns once that its own time limit is off. That one needs signals; the scorer keeps time from outside.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def read(text: str) -> list[Any]:
        return math_verify.parse(text, parsing_timeout=None)

    def read_answer(text: str) -> list[Any]:
        # In text the library looks for a number ("1" in "x + 1"); all of a formula is read between dollar signs.
        formula = f"${text}$"
        if "$" in text:
            return read(text)
        return (read(text) or read(formula)) if _WORD.search(text) else (read(formula) or read(text))

    def verify(prompt: list[dict[str, str]], completion: str, answer: str, index: int) -> float:
        completion = completion[-MATH_CHARACTERS:]
        reply, tagged = extract_answer(completion), _tagged(completion) is not None
        if not answer.strip() or not reply:
            return 0.0
        if reply == answer.strip():
            return 1.0
        if _HUGE.search(reply if tagged else reply.rpartition("\n")[2]):
            return 0.0
        gold = read_answer(answer)
        try:
            with judging():
                found = read_answer(reply) if tagged else read(reply)
                return float(math_verify.verify(gold, found, timeout_seconds=None))
        except Exception:
            return 0.0

    verify([], "1.0", "1", 0)
    return verify


def _function(name: str) -> Callable[..., object]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UserError(f"Reward {name!r} names no function, expected module:function.")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(f"Reward {name!r} can't be imported: {type(error).__name__}: {error}.") from error
    function = getattr(module, function_name, None)
    if function is None:
        near = difflib.get_close_matches(function_name, dir(module), n=1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise UserError(f"Reward {name!r}: module {module_name!r} has no function {function_name!r}{hint}")
    if not callable(function):
        raise UserError(f"Reward {name!r} is {function!r:.80}, expected a function.")
    try:
        inspect.signature(function).bind(prompt=[], completion="", answer="")
    except TypeError as error:
        raise UserError(
            f"Reward {name!r} can't be called with the keywords prompt, completion, answer: {error}."
        ) from None
    except ValueError:
        pass  # Some functions written in C have no signature to look at.
    return function
