"""The ways to hand a chat to a template: which it takes, and the text that comes of it.

Pure functions on one tokenizer's template; any thread may call them. A conversation that ends with
an assistant turn is continued: the text ends with that turn's, where the template renders it, and
no new turn is opened. Knows no token ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..errors import InvalidRequest
from ..requests import ChatPrompt
from .messages import Messages, as_dicts, has_calls, has_scattered_system, shapes
from .tokenizer import TemplateError, Tokenizer


@dataclass(frozen=True, slots=True)
class Form:
    """One way to hand messages to a template."""

    messages: Messages
    object_arguments: bool
    kwargs: Mapping[str, object]


def first_that_renders(tokenizer: Tokenizer, prompt: ChatPrompt) -> tuple[Form, str]:
    """The first form that the template takes and that loses no system message, and its text.

    Raises InvalidRequest where there is none.
    """
    refusal: TemplateError | None = None
    incomplete: tuple[Form, str] | None = None
    for form in _forms(prompt):
        try:
            text = render(tokenizer, form)
        except TemplateError as error:
            refusal = refusal or error
            continue
        if not _loses_system(form.messages, text):
            return form, text
        incomplete = incomplete or (form, text)
    if incomplete is not None:
        return incomplete
    raise InvalidRequest(str(refusal), param="messages", code="chat_template") from refusal


def render(tokenizer: Tokenizer, form: Form) -> str:
    """The text of a form, up to where the answer begins. Raises TemplateError."""
    last = form.messages[-1]
    if last.role != "assistant" or has_calls(last) or not last.content:
        return _rendered(tokenizer, form, form.messages, add_generation_prompt=True)
    mark = new_mark()
    marked = (*form.messages[:-1], replace(last, content=last.content + mark))
    text = _rendered(tokenizer, form, marked, add_generation_prompt=False)
    if text.count(mark) != 1:
        raise TemplateError("The model's chat template cannot continue an assistant message.")
    return text.partition(mark)[0]


def new_mark() -> str:
    """A word that no text contains and that templates leave alone."""
    return f"mark{secrets.token_hex(12)}"


def _rendered(
    tokenizer: Tokenizer, form: Form, messages: Messages, *, add_generation_prompt: bool
) -> str:
    return tokenizer.render(
        as_dicts(messages, object_arguments=form.object_arguments),
        add_generation_prompt=add_generation_prompt,
        **form.kwargs,
    )


def _forms(prompt: ChatPrompt) -> Iterator[Form]:
    """All forms to try: few templates need the later ones, so the first is nearly always used.

    Some templates iterate over ``tools`` without asking whether there are any, and some append a
    call's arguments to a string.
    """
    plain = dict(prompt.template_kwargs)
    settings = [plain] if "tools" in plain else [plain, {**plain, "tools": []}]
    arguments = (True, False) if any(map(has_calls, prompt.messages)) else (True,)
    for messages in shapes(prompt.messages):
        for object_arguments in arguments:
            for kwargs in settings:
                yield Form(messages, object_arguments, kwargs)


def _loses_system(messages: Messages, text: str) -> bool:
    return has_scattered_system(messages) and not all(
        m.content.strip() in text for m in messages if m.role == "system"
    )
