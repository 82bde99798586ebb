"""When two requests are the same one, so that the second goes on where the first was interrupted.

Plain functions; no task, no clock. Everything that decides which tokens come, and how they become
text, is part of the identity: any difference starts afresh.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import asdict, dataclass

from ..prefix.entries import namespace_of
from ..requests import GenerationRequest, Sampling


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it was resolved.

    Attributes:
        prompt: its token ids.
        sampling: with every default filled in.
        limit: most tokens of the answer.
        reasoning: the markers of a reasoning block and whether the prompt opens one; None where the
            answer is one text.
        namespace: of the model (``ModelInfo.namespace``).
        adapters: revisions, in order.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    reasoning: tuple[str, str, bool] | None
    namespace: str
    adapters: tuple[str, ...]


def is_determined(request: GenerationRequest, sampling: Sampling) -> bool:
    """Whether the request itself decides its answer: it is greedy, or brings its seed."""
    return sampling.temperature == 0 or request.sampling.seed is not None


def identity_of(request: GenerationRequest, asked: Asked) -> str | None:
    """A digest that is equal for equal requests; None for one that must never be replayed.

    A request that is sampled without a seed wants another answer each time, unless it names the one
    that it wants by its ``resume_key`` or the name of its stream.
    """
    determined = is_determined(request, asked.sampling)
    key = request.resume_key
    if not determined and key is None:
        if request.ticket is None:
            return None
        key = f"stream {request.ticket.name}"
    # What is off is left out, so that an option of a later release changes no older request.
    sampling = {k: v for k, v in asdict(asked.sampling).items() if v is not None}
    sampling["seed"] = request.sampling.seed if asked.sampling.temperature else None
    grammar = request.grammar
    described = {
        "sampling": sampling,
        "limit": asked.limit,
        "stop": request.stop,
        "stop_token_ids": sorted(request.stop_token_ids),
        "grammar": None if grammar is None else [type(grammar).__name__, asdict(grammar)],
        "logprobs": request.logprobs,
        "reasoning": asked.reasoning,
        "namespace": namespace_of(asked.namespace, asked.adapters),
        "key": key,
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    digest.update(array("q", asked.prompt).tobytes())
    return digest.hexdigest()
