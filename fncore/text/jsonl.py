"""JSON Lines files, checked line by line so that a bad record is reported where it stands."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from fncore.errors import UserError, has_surrogate, shorten

ROLES = ("system", "user", "assistant", "tool")
_OPTIONAL = ("reasoning_content", "tools", "tool_calls")


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield `(line number from 1, record)` for each line of a JSON Lines file.

    Blank lines are accepted at the end of the file and nowhere else. A byte order mark is skipped.

    Raises:
        UserError: the file can't be read or holds no record, or a line is blank, not UTF-8, not JSON or not an object.
    """
    blank, seen = 0, False
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                where = f"{path}, line {number}"
                if not raw.strip():
                    blank = blank or number
                    continue
                if blank:
                    raise UserError(f"{path}, line {blank}: the line is blank, expected a JSON object.")
                yield number, _record(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw, where)
                seen = True
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error}).") from None
    if not seen:
        raise UserError(f"{path}: the file holds no records, expected one JSON object a line.")


def conversations(path: str | Path) -> list[list[dict[str, Any]]]:
    """Read conversations `{"messages": [...]}` or `{"conversations": [...]}`, one a line.

    A message comes back with its `role` and `content`, and with `reasoning_content`, `tools` and `tool_calls` where
    it has them; other keys, of messages and records, are ignored.

    Raises:
        UserError: the file, line and value of the first record that isn't a conversation with a reply to learn from.
    """
    found = []
    for number, record in read_jsonl(path):
        where = f"{path}, line {number}"
        key = next((key for key in ("messages", "conversations") if key in record), None)
        if key is None:
            bad(where, "the record", record, 'an object with "messages" or "conversations"')
        conversation = messages(record[key], where=where, what=f'"{key}"')
        if not any(_is_reply(message) for message in conversation):
            bad(where, f'"{key}"', record[key], "at least one assistant message that isn't empty")
        found.append(conversation)
    return found


def messages(value: object, *, where: str, what: str) -> list[dict[str, Any]]:
    """Check that `value` is a list of chat messages and return it without unknown keys.

    `where` (file and line) and `what` (the field) begin the text of an error. Content may be null only on an assistant
    message with tool calls, as in OpenAI's format; it is then returned as "".

    Raises:
        UserError: an empty list, a message that isn't an object, an unknown role, or content that isn't text.
    """
    if not isinstance(value, list) or not value:
        bad(where, what, value, "a list of at least one message")
    checked = []
    for position, message in enumerate(value, 1):
        name = f"message {position} of {what}"
        if not isinstance(message, dict):
            bad(where, name, message, 'an object with "role" and "content"')
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            bad(where, f"the role of {name}", role, f"one of {', '.join(ROLES)}")
        if content is None and role == "assistant" and message.get("tool_calls"):
            content = ""
        extra = {key: message[key] for key in _OPTIONAL if message.get(key) is not None}
        checked.append({"role": role, "content": text(content, where=where, what=f"the content of {name}"), **extra})
    return checked


def text(value: object, *, where: str, what: str) -> str:
    """Check that `value` is a string that UTF-8 can hold.

    Raises:
        UserError: it isn't, with `where`, `what` and the value.
    """
    if not isinstance(value, str):
        bad(where, what, value, "a string")
    if has_surrogate(value):
        bad(where, what, value, "text without unpaired surrogates")
    return value


def bad(where: str, what: str, value: object, expected: str) -> NoReturn:
    """Raise the `UserError` "where: what is value, expected expected."."""
    raise UserError(f"{where}: {what} is {shorten(value)}, expected {expected}.")


def _record(raw: bytes, where: str) -> dict[str, Any]:
    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: {shorten(raw)} is not UTF-8 (byte {error.start + 1} of the line).") from None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {shorten(line.strip())} is not valid JSON ({error}).") from None
    if not isinstance(record, dict):
        bad(where, "the line", record, "a JSON object")
    return record


def _is_reply(message: dict[str, Any]) -> bool:
    filled = message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
    return message["role"] == "assistant" and bool(filled)
