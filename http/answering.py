"""From a parsed call to its answer, whole or streamed; shared by chat and text completions.

Runs in the request's own task. A generation is entered before any reply is begun, so whatever the
runtime refuses is still a plain JSON error; it is left as soon as the answer ends, or when the
client goes away, in both modes.
"""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, assert_never, cast

import msgspec
import trio
from quart import Response, request

from mlx_troupe.runtime.requests import Channel, Failed, Finished, TextDelta

from .connection import request_stack
from .guards import check_json_headers
from .sse import ChunkShape, EventStream, stream_response
from .wire.parsing import parse_json
from .wire.resuming import Cursor, Position, position_in, ticket_in
from .wire.session import session_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlx_troupe.runtime.model_info import ModelInfo
    from mlx_troupe.runtime.requests import ScoredToken

    from .metrics import Meter
    from .seams import Edge, GenerationLike
    from .wire.params import Call

OFF_LOOP_BYTES = 64 << 10
"""Larger bodies are parsed on a worker thread: parsing takes about 10 ms a megabyte."""
MAX_WARNING = 500
"""Longest text of a header; clients refuse headers of several kilobytes."""


class AnswerShape(ChunkShape, Protocol):
    """How one kind of answer is written, whole or in chunks."""

    def answer(self, content: str, reasoning: str, finished: Finished) -> msgspec.Struct:
        """The whole answer; ``finished`` has the scores of all its tokens."""
        ...


class MakeShape(Protocol):
    """Makes the shape of one answer."""

    def __call__(
        self, *, id: str, created: int, model: str, include_usage: bool
    ) -> AnswerShape: ...


async def answer_call(
    edge: Edge,
    route: str,
    id_prefix: str,
    parse: Callable[[Mapping[str, object], ModelInfo | None], Call],
    make_shape: MakeShape,
) -> Response:
    """Read the current request, run it and answer it. Raises TroupeError before any reply."""
    call = await _read_call(edge, parse)
    started = time.perf_counter()

    def shape(generation: GenerationLike) -> AnswerShape:
        return make_shape(
            id=f"{id_prefix}-{_answer_id(call)}",
            created=generation.created,
            model=edge.model_name,
            include_usage=call.include_usage,
        )

    if call.stream:
        return await _stream(edge, route, call, started, shape)
    async with edge.runtime.generate(call.request) as generation:
        with edge.metrics.measure(route, started) as meter:
            answer = await _collect(generation, meter, shape(generation))
    return with_warnings(json_response(answer), generation.warnings)


def json_response(value: object, status: int = 200) -> Response:
    """A JSON reply."""
    return Response(msgspec.json.encode(value), status, content_type="application/json")


def with_warnings(response: Response, warnings: Sequence[str]) -> Response:
    """The response with one ``Warning`` header for each thing that the client does not get."""
    for warning in warnings:
        # A quoted string of one line: whatever a client's own text may have put into it.
        text = re.sub(r"[^ !#-\[\]-~]+", " ", warning.replace('"', "'"))
        response.headers.add("Warning", f'199 mlx-troupe "{text[:MAX_WARNING]}"')
    return response


async def _read_call(
    edge: Edge, parse: Callable[[Mapping[str, object], ModelInfo | None], Call]
) -> Call:
    check_json_headers(request)
    body = cast("bytes", await request.get_data(cache=False))
    model = edge.runtime.model
    if len(body) <= OFF_LOOP_BYTES:
        call = parse(parse_json(body), model)
    else:
        call = await trio.to_thread.run_sync(lambda: parse(parse_json(body), model))
    header = request.headers.get
    session = None
    if edge.settings.sessions:
        session = call.request.session or session_in(header)
    ticket = ticket_in(header, call.stream_name, call.restarts) if call.stream else None
    explain = request.headers.get("x-cache-explain") == "1"
    asked = replace(call.request, session=session, explain=explain, ticket=ticket)
    return replace(call, request=asked)


async def _stream(
    edge: Edge,
    route: str,
    call: Call,
    started: float,
    shape: Callable[[GenerationLike], AnswerShape],
) -> Response:
    stack = request_stack()
    ticket = call.request.ticket
    read = None if ticket is None else position_in(request.headers.get)
    generation = await stack.enter_async_context(edge.runtime.generate(call.request))
    meter = stack.enter_context(edge.metrics.measure(route, started))
    keepalive = edge.settings.keepalive_interval
    resumed = generation.resumed or read == Position()
    cursor = None if ticket is None else Cursor(read if resumed else None)
    body = EventStream(generation, shape(generation), meter, stack, keepalive, cursor)
    response = stream_response(body)
    if ticket is not None:
        response.headers["X-Stream-Id"] = ticket.name
        response.headers["X-Stream-Resumed"] = "true" if resumed else "false"
    return with_warnings(response, generation.warnings)


def _answer_id(call: Call) -> str:
    """The same for every connection to a stream with a name, across restarts too."""
    ticket = call.request.ticket
    if ticket is None:
        return uuid.uuid4().hex
    return hashlib.sha256(ticket.name.encode()).hexdigest()[:32]


async def _collect(generation: GenerationLike, meter: Meter, shape: AnswerShape) -> msgspec.Struct:
    """Read a generation to its end. Raises the error that it failed with."""
    parts: dict[Channel, list[str]] = {channel: [] for channel in Channel}
    scores: list[ScoredToken] = []
    while True:
        event = await generation.next_event()
        meter.saw(event)
        match event:
            case TextDelta(channel, text, scored):
                parts[channel].append(text)
                scores += scored
            case Finished():
                content = "".join(parts[Channel.CONTENT])
                reasoning = "".join(parts[Channel.REASONING])
                finished = replace(event, scores=(*scores, *event.scores))
                return shape.answer(content, reasoning, finished)
            case Failed(error):
                raise error
            case _:
                assert_never(event)
