"""Known fields that this server does not offer: refused by name, never silently dropped.

Pure data and one function. A field passes when its value asks for nothing (``tools: []``,
``echo: false``, ``suffix: null``); the feature that supports a field removes its row.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_troupe.runtime.errors import Unsupported

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prompt_logprobs": (0,),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "ignore_eos": (False,),
    "min_tokens": (0,),
}
"""Field name to the values, besides null, that ask for nothing."""


def refuse_unsupported(body: Mapping[str, object]) -> None:
    """Raise Unsupported for the first field that asks for something not offered."""
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and not any(_same(value, accepted) for accepted in neutral):
            raise Unsupported(f"{name} is not supported by this server", param=name)


def _same(value: object, accepted: object) -> bool:
    """Equality that keeps booleans apart from numbers."""
    return type(value) is type(accepted) and value == accepted
