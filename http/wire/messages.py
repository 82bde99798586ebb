"""Chat messages on the wire and how they are flattened.

Pure functions. Text parts of one message are joined in order with nothing between them. ``null``,
absent, ``""`` and ``[]`` are the same empty content for an assistant; every other role must bring
content. Tool calls, tool results, names and earlier reasoning ride along for the template.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.requests import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_QUOTED = 40
"""Longest piece of a client's text that an error message repeats."""


class ContentPart(Struct):
    """One part of a content array; only text can be read."""

    type: str | None = None
    text: str | None = None


class FunctionCall(Struct):
    """A function and its arguments, as JSON text or as the object itself."""

    name: str
    arguments: str | dict[str, object] = "{}"


class ToolCall(Struct):
    """A call that the assistant made in an earlier turn."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class WireMessage(Struct):
    """One message as it comes over the wire."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


def to_messages(wire: Sequence[WireMessage] | None) -> tuple[Message, ...]:
    """The messages of a request. Raises InvalidRequest naming the message."""
    if not wire:
        raise InvalidRequest("messages required", param="messages")
    return tuple(_to_message(message, f"messages[{i}]") for i, message in enumerate(wire))


def _to_message(wire: WireMessage, param: str) -> Message:
    if wire.role not in ROLES:
        raise InvalidRequest(
            f"{param}.role: {_quote(wire.role)} is not one of {', '.join(ROLES)}",
            param=f"{param}.role",
        )
    if not wire.content and not isinstance(wire.content, str) and wire.role != "assistant":
        raise InvalidRequest(f"{param}.content: content required", param=f"{param}.content")
    return Message(
        role=wire.role,
        content=_flatten(wire.content, f"{param}.content"),
        extra=_extra(wire),
    )


def _flatten(content: str | list[ContentPart] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def _text(part: ContentPart, param: str) -> str:
    if part.type != "text":
        kind = "without a type" if part.type is None else f"of type {_quote(part.type)}"
        raise InvalidRequest(f"{param}: a part {kind} is not supported, only text", param=param)
    if part.text is None:
        raise InvalidRequest(f"{param}: a text part without text", param=param)
    return part.text


def _extra(wire: WireMessage) -> dict[str, object]:
    reasoning = wire.reasoning_content or wire.reasoning
    fields: dict[str, object | None] = {
        "name": wire.name,
        "tool_calls": msgspec.to_builtins(wire.tool_calls) if wire.tool_calls else None,
        "tool_call_id": wire.tool_call_id,
        "reasoning_content": reasoning,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _quote(text: str) -> str:
    return repr(text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "…")
