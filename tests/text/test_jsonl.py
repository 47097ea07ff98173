import json

import pytest

from fncore.errors import UserError, shorten
from fncore.text.jsonl import conversations, read_jsonl

USER = {"role": "user", "content": "3 + 4?"}
REPLY = {"role": "assistant", "content": "7"}


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "data.jsonl"
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
        return path

    return write


def test_lines_are_numbered_from_one_and_a_byte_order_mark_and_trailing_blank_lines_are_skipped(write):
    path = write(b'\xef\xbb\xbf{"a": 1}\r', {"b": "\u2028"}, b"", b" ", b"")
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (2, {"b": "\u2028"})]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b"{nonsense", "{nonsense"),
        (b'["a"]', "['a']"),
        (b"null", "None"),
        (b'{"a": "\xff"}', "xff"),
        (b"  ", "blank"),
        (b"[" * 100_000, "[[["),
    ],
)
def test_a_bad_line_is_named(write, line, value):
    path = write({"a": 1}, line, {"a": 2})
    with pytest.raises(UserError, match=r"data\.jsonl, line 2") as caught:
        list(read_jsonl(path))
    assert value in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_is_an_error(write, content):
    with pytest.raises(UserError, match="holds no records"):
        list(read_jsonl(write(content)))


def test_a_missing_file_and_a_folder_are_errors(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="can't be read"):
            list(read_jsonl(path))


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_conversations_drop_unknown_keys_and_keep_tool_calls_of_either_spelling(write, key):
    calls = [{"name": "add", "arguments": {"a": 3}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls, "id": 9}
    listed = {key: [USER | {"weight": 1}, call, {"role": "tool", "content": "7"}, REPLY], "id": 1}
    spelled = {key: [USER, call | {"content": "", "tool_calls": json.dumps(calls)}]}
    first, second = conversations(write(listed, spelled))
    assert first == [USER, {"role": "assistant", "content": "", "tool_calls": calls}, listed[key][2], REPLY]
    assert second[1]["tool_calls"] == json.dumps(calls)


@pytest.mark.parametrize(
    ("record", "value"),
    [
        ({"text": "hello"}, "'hello'"),
        ({"messages": []}, "[]"),
        ({"messages": "hello"}, "'hello'"),
        ({"messages": [USER, "hello"]}, "'hello'"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "None"),
        ({"messages": [USER, {"role": "assistant", "content": 7}]}, "7"),
        ({"messages": [{"role": "human", "content": "a"}, REPLY]}, "'human'"),
        ({"messages": [{"role": ["user"], "content": "a"}, REPLY]}, "['user']"),
        ({"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, "ud800"),
        ({"messages": [USER]}, "3 + 4?"),
        ({"conversations": [USER, {"role": "assistant", "content": " "}]}, "3 + 4?"),
    ],
)
def test_a_bad_conversation_is_named(write, record, value):
    path = write({"messages": [USER, REPLY]}, record)
    with pytest.raises(UserError, match=r"data\.jsonl, line 2.*expected") as caught:
        conversations(path)
    assert value in str(caught.value)
    str(caught.value).encode()


def test_shorten():
    assert shorten("a") == "'a'"
    assert len(shorten("a" * 1000)) <= 80
    shorten("\udfff").encode()
