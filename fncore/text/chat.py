"""Chats as token ids: prompts to sample from, and conversations whose assistant turns are labelled."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fncore.errors import UserError, shorten
from fncore.models.hf import read_json

Messages = list[dict[str, str]]


def encode_prompt(tokenizer: Any, messages: Messages) -> list[int]:
    """Ids of a chat up to where the assistant's reply begins."""
    return _render(tokenizer, messages, add_generation_prompt=True)


def encode_conversation(tokenizer: Any, messages: Messages, *, stops: Collection[int]) -> tuple[list[int], list[bool]]:
    """Ids of a whole chat, and which of them are the assistant's: each reply and its end marker.

    Labels come from structure: a reply is what the template adds to the prompt before it. Raises `UserError` where the
    template rewrites earlier turns, so that the prompt is no prefix of the whole.
    """
    ids = _render(tokenizer, messages, add_generation_prompt=False)
    labels = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = encode_prompt(tokenizer, messages[:turn])
        through = _render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
        if ids[: len(prompt)] != prompt or ids[: len(through)] != through:
            raise UserError(
                f"the chat template rewrites earlier turns: turn {turn} ({message['content'][:60]!r}) does not follow "
                "the ids of its own prompt, so its tokens can't be labelled"
            )
        end = next((index + 1 for index in range(len(prompt), len(through)) if ids[index] in stops), len(through))
        labels[len(prompt) : end] = [True] * (end - len(prompt))
    return ids, labels


def _render(tokenizer: Any, messages: Messages, *, add_generation_prompt: bool) -> list[int]:
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {tokenizer.name_or_path} has no chat template")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
    except Exception as error:  # a template is a program, and refuses as its author liked
        roles = [message["role"] for message in messages]
        hint = "; leave out --system if the template has no system role" if "system" in roles else ""
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} refuses the roles {', '.join(roles) or 'of an empty chat'} "
            f"({' '.join(str(error).split())[:300] or type(error).__name__}){hint}"
        ) from error


def stop_tokens(tokenizer: Any, model: str) -> frozenset[int]:
    """Ids that end a reply: the tokenizer's end of sequence, and those of the folder's generation config."""
    stops = {tokenizer.eos_token_id} - {None}
    path = Path(model) / "generation_config.json"
    if path.is_file():
        listed = read_json(path).get("eos_token_id")
        ids = [] if listed is None else listed if isinstance(listed, list) else [listed]
        if not all(type(token) is int for token in ids):
            raise UserError(f"{path}: eos_token_id must be the id of a token or a list of them, not {shorten(listed)}")
        stops |= set(ids)
    if not stops:
        raise UserError(f"{model}: neither its tokenizer nor its generation config names an end-of-sequence token")
    return frozenset(stops)
