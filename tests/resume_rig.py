"""Interrupts generations and compares what the same request says afterwards with one whole run."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_troupe.actors.system import Runtime
from mlx_troupe.runtime.requests import (
    Channel,
    Finished,
    GenerationRequest,
    ScoredToken,
    TextDelta,
    Usage,
)


@dataclass(frozen=True)
class Answer:
    """Everything that a client sees of a finished answer."""

    texts: tuple[tuple[Channel, str], ...]
    scores: tuple[ScoredToken, ...]
    reason: str
    usage: Usage

    @property
    def text(self) -> str:
        """Of both channels."""
        return "".join(text for _, text in self.texts)

    def same_as(self, other: Answer) -> None:
        """Raise AssertionError unless only the cached tokens differ."""
        assert self.texts == other.texts
        assert self.scores == other.scores
        assert self.reason == other.reason
        mine, theirs = self.usage, other.usage
        assert mine.prompt_tokens == theirs.prompt_tokens
        assert mine.completion_tokens == theirs.completion_tokens
        assert mine.lane == theirs.lane
        assert mine.cached_tokens <= mine.prompt_tokens


async def whole(runtime: Runtime, request: GenerationRequest) -> Answer:
    """A run to the end."""
    async with runtime.generate(request) as generation:
        texts: list[tuple[Channel, str]] = []
        scores: list[ScoredToken] = []
        async for event in generation:
            if isinstance(event, TextDelta):
                scores += event.scores
                if texts and texts[-1][0] is event.channel:
                    texts[-1] = (event.channel, texts[-1][1] + event.text)
                else:
                    texts.append((event.channel, event.text))
                continue
            assert isinstance(event, Finished), event
            scores += event.scores
            return Answer(tuple(texts), tuple(scores), event.reason.value, event.usage)
    raise AssertionError("the generation ended without a terminal event")


async def interrupted(runtime: Runtime, request: GenerationRequest, events: int) -> bool:
    """Leave after so many events; False if the answer ended before."""
    async with runtime.generate(request) as generation:
        for _ in range(events):
            if not isinstance(await generation.next_event(), TextDelta):
                return False
    return True
