"""Chat messages in the forms that chat templates accept.

Pure functions on frozen messages. The merge rule, tried in this order until the template takes the
messages:

1. as they are, with ``developer`` written as ``system``;
2. all system messages merged to the front, joined by an empty line;
3. also consecutive user turns, and consecutive assistant turns without calls, joined likewise;
4. also the system message put in front of the first user turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from ..requests import Message

Messages: TypeAlias = tuple[Message, ...]

_JOINT = "\n\n"


def shapes(messages: Messages) -> Iterator[Messages]:
    """The messages under each step of the rule that changes them."""
    last = tuple(replace(m, role="system") if m.role == "developer" else m for m in messages)
    yield last
    for step in (merge_system, join_turns, fold_system):
        changed = step(last)
        if changed != last:
            last = changed
            yield last


def with_instruction(messages: Messages, text: str) -> Messages:
    """The messages with one more instruction in front, after the system message's own."""
    if messages and messages[0].role in ("system", "developer"):
        first = replace(messages[0], content=messages[0].content + _JOINT + text)
        return (first, *messages[1:])
    return (Message("system", text), *messages)


def has_scattered_system(messages: Messages) -> bool:
    """Whether a system message stands anywhere but in front: some templates lose such a one."""
    return any(m.role == "system" for m in messages[1:])


def merge_system(messages: Messages) -> Messages:
    """One system message in front, or the messages as they are where that is so already."""
    if not has_scattered_system(messages):
        return messages
    system = [m for m in messages if m.role == "system"]
    merged = replace(system[0], content=_JOINT.join(m.content for m in system))
    return (merged, *(m for m in messages if m.role != "system"))


def join_turns(messages: Messages) -> Messages:
    """Consecutive turns of one speaker joined; turns with calls or unlike extras stay apart."""
    joined: list[Message] = []
    for message in messages:
        before = joined[-1] if joined else None
        if before is not None and _can_join(before, message):
            joined[-1] = replace(before, content=before.content + _JOINT + message.content)
        else:
            joined.append(message)
    return tuple(joined)


def fold_system(messages: Messages) -> Messages:
    """The system message as the beginning of the first user turn, if there are both."""
    if not messages or messages[0].role != "system":
        return messages
    system, *rest = messages
    for index, message in enumerate(rest):
        if message.role == "user":
            rest[index] = replace(message, content=system.content + _JOINT + message.content)
            return tuple(rest)
    return messages


def as_dicts(messages: Messages, *, object_arguments: bool) -> list[dict[str, object]]:
    """The plain form for templates; arguments of calls as objects, or else as JSON text.

    Content is always a string: templates print ``None`` or fail on it, none minds an empty one.
    """
    return [
        {
            **{key: value for key, value in m.extra.items() if value is not None},
            "role": m.role,
            "content": m.content,
            **_calls(m, object_arguments=object_arguments),
        }
        for m in messages
    ]


def has_calls(message: Message) -> bool:
    """Whether an assistant turn calls tools."""
    return bool(message.extra.get("tool_calls"))


def _can_join(before: Message, message: Message) -> bool:
    return (
        before.role == message.role
        and message.role in ("user", "assistant")
        and before.extra == message.extra
        and not has_calls(message)
    )


def _calls(message: Message, *, object_arguments: bool) -> dict[str, object]:
    calls = message.extra.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return {}
    return {"tool_calls": [_call(call, object_arguments=object_arguments) for call in calls]}


def _call(call: object, *, object_arguments: bool) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments", {})
    if object_arguments:
        arguments = _parsed(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: object) -> object:
    """JSON text as the object it describes; anything that is none stays what it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
