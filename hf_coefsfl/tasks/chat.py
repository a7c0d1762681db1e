"""Conversations as texts: what comes before an answer, and the answer, by the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from ..federation.data_checks import DataError

Message = Mapping[str, Any]


def holds_messages(rows: Dataset, role: str) -> bool:
    """Return whether a column holds lists of messages rather than texts."""
    first = next((value for value in rows[role] if value), None)
    return isinstance(first, list) and isinstance(first[0], Mapping)


def check_messages(rows: Dataset, role: str, where: str) -> None:
    """Refuse a column with a row that is not a list of messages with a role and a content."""
    for row, messages in enumerate(rows[role]):
        if messages is None:
            raise DataError(f"The {role} of {where}, row {row}, is missing. Fill it in, or leave the row out.")
        for message in messages if isinstance(messages, list) else [messages]:
            if not isinstance(message, Mapping) or message.get("role") is None or message.get("content") is None:
                raise DataError(
                    f"The {role} of {where}, row {row}, has a message without a role or a content: "
                    f"{str(message)[:60]}. A message is a dict such as {{'role': 'user', 'content': 'Hello'}}."
                )


def check_template(tokenizer: Any, model_id: str) -> None:
    """Refuse a tokenizer that cannot turn messages into a text."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"The tokenizer of {model_id} has no chat template, which messages need. Choose a model that was made for "
            "conversations (often called Instruct), set tokenizer.chat_template and save it with the model, or give "
            "texts with --columns prompt=... completion=..."
        )


def last_answer(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """Return the last message of the assistant and what comes before it; both are empty if there is none."""
    for i in reversed(range(len(messages))):
        if messages[i]["role"] == "assistant":
            return messages[:i], messages[i : i + 1]
    return [], []


def as_texts(tokenizer: Any, prompt: Sequence[Message], answer: Sequence[Message]) -> tuple[str, str]:
    """Return the texts of the messages before an answer, with the answer's opening, and of the answer to its end."""
    if not answer:
        return "", ""
    before = tokenizer.apply_chat_template(_plain(prompt), tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(_plain([*prompt, *answer]), tokenize=False)
    if not whole.startswith(before):
        raise DataError(
            f"The chat template writes a conversation in another way once it has an answer: {before[-60:]!r} is not "
            "what comes before it. Answers must be of the assistant, and the template must keep what it wrote."
        )
    return before, whole[len(before) :].rstrip()  # templates end with a line break that no model has to say


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages without the empty fields that a table of rows with other fields gives them."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]
