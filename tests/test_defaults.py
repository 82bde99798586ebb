"""What an omitted field means: the request, then the operator's flag, then the model's file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from company import company, read

from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.http.testing import MODEL
from mlx_troupe.http.wire.chat import chat_call
from mlx_troupe.http.wire.parsing import parse_json
from mlx_troupe.runtime.defaults import SamplingDefaults, resolve_sampling
from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.requests import GenerationRequest, SamplingRequest, TokenPrompt
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import EOS, ByteTokenizer

FILE = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}


def defaults(folder: Path, content: object, **flags: Any) -> SamplingDefaults:
    """Of a model whose ``generation_config.json`` says that."""
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "generation_config.json").write_text(text)
    return SamplingDefaults.load(Settings(folder, "m", **flags))


@pytest.mark.parametrize(
    ("content", "flags", "wanted"),
    [
        (None, {}, (0.7, 0.0, 0, 0.0)),
        ("{", {}, (0.7, 0.0, 0, 0.0)),
        ([1], {}, (0.7, 0.0, 0, 0.0)),
        ({"temperature": "hot", "top_k": None, "top_p": True}, {}, (0.7, 0.0, 0, 0.0)),
        (FILE, {}, (0.6, 0.95, 20, 0.1)),
        ({**FILE, "do_sample": False}, {}, (0.0, 0.95, 20, 0.1)),
        (FILE, {"temperature": 0.0}, (0.0, 0.95, 20, 0.1)),
        (FILE, {"temperature": 1.5, "top_p": 0.5, "top_k": 0}, (1.5, 0.5, 0, 0.1)),
    ],
)
def test_flags_come_before_the_model_s_file_and_the_usual(
    content: object, flags: dict[str, Any], wanted: tuple[float, ...], tmp_path: Path
) -> None:
    """A file that cannot be read, or holds nonsense, counts as absent."""
    row = resolve_sampling(SamplingRequest(), defaults(tmp_path, content, **flags), MODEL)
    assert (row.temperature, row.top_p, row.top_k, row.min_p) == wanted


def test_a_request_comes_before_all(tmp_path: Path) -> None:
    """Zeros too: they are values, not absences."""
    wanted = SamplingRequest(temperature=0.0, top_p=0.0, top_k=0, min_p=0.0, seed=5)
    row = resolve_sampling(wanted, defaults(tmp_path, FILE, temperature=1.0), MODEL)
    assert (row.temperature, row.top_p, row.top_k, row.min_p, row.seed) == (0, 0, 0, 0, 5)


def test_a_penalty_s_window_is_never_longer_than_a_row(tmp_path: Path) -> None:
    """Room is made for as many tokens as it says, so a number of any size must not reach a row."""
    longest = MODEL.context_window
    assert longest is not None
    for asked, kept in ((longest - 1, longest - 1), (longest, 0), (1 << 40, 0), (10**400, 0)):
        wanted = SamplingRequest(
            repetition_context_size=asked, presence_context_size=asked, frequency_context_size=asked
        )
        row = resolve_sampling(wanted, defaults(tmp_path, None), MODEL)
        windows = (
            row.repetition_context_size,
            row.presence_context_size,
            row.frequency_context_size,
        )
        assert windows == (kept, kept, kept)


def test_a_repetition_penalty_never_makes_a_logit_infinite(tmp_path: Path) -> None:
    """For callers of the library, who are not stopped at the edge."""
    for value in (-1.0, 1e-40, 1000.0, math.nan):
        with pytest.raises(InvalidRequest) as caught:
            resolve_sampling(
                SamplingRequest(repetition_penalty=value), defaults(tmp_path, None), MODEL
            )
        assert caught.value.param == "repetition_penalty"


def test_a_repetition_penalty_of_one_or_zero_is_off(tmp_path: Path) -> None:
    """Zero as in mlx-lm, one because it changes nothing."""
    for value in (None, 0.0, -0.0, 1.0):
        wanted = SamplingRequest(repetition_penalty=value)
        assert resolve_sampling(wanted, defaults(tmp_path, None), MODEL).repetition_penalty == 0.0


def test_requests_without_a_seed_never_share_one() -> None:
    """Whenever they come: two of one millisecond as well."""
    seeds = {
        resolve_sampling(SamplingRequest(), SamplingDefaults(), MODEL).seed for _ in range(200)
    }
    assert len(seeds) == 200


@pytest.mark.parametrize(
    ("own", "flag", "calm", "wanted"),
    [
        (1.0, None, False, 1.0),
        (1.0, None, True, 0.7),
        (0.6, None, True, 0.6),
        (0.0, None, True, 0.0),
        (1.0, 1.2, True, 1.2),
    ],
)
def test_a_model_that_is_not_to_think_is_calm(
    own: float, flag: float | None, calm: bool, wanted: float, tmp_path: Path
) -> None:
    """Its own temperature is for thoughts; one that somebody asked for stands."""
    found = defaults(tmp_path, {"temperature": own}, temperature=flag)
    assert resolve_sampling(SamplingRequest(), found, MODEL, calm=calm).temperature == wanted
    asked = SamplingRequest(temperature=2.0)
    assert resolve_sampling(asked, found, MODEL, calm=calm).temperature == 2.0


class Listening(ByteTokenizer):
    """Remembers what templates were told."""

    def __init__(self, *, thinks: bool) -> None:
        super().__init__(thinks=thinks)
        self.told: list[object] = []

    def render(self, messages: list[dict[str, object]], **kwargs: Any) -> str:
        """See :class:`ByteTokenizer`."""
        self.told.append(kwargs.get("enable_thinking"))
        return super().render(messages, **kwargs)


def chat(**fields: Any) -> GenerationRequest:
    """A chat as it comes over the wire."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields}
    return chat_call(parse_json(json.dumps(body).encode()), MODEL).request


EXPLICIT = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.parametrize(
    ("flag", "fields", "told", "temperature"),
    [
        (None, {}, None, 1.0),
        (True, {}, True, 1.0),
        (False, {}, False, 0.7),
        (False, {"temperature": 0.9}, False, 0.9),
        (True, {"reasoning_effort": "none"}, False, 0.7),
        (False, {"reasoning_effort": "low"}, True, 1.0),
        (False, {"reasoning_effort": "none", **EXPLICIT}, True, 1.0),
        (None, {"reasoning_effort": "none"}, False, 0.7),
    ],
)
@pytest.mark.parametrize("thinks", [True, False])
async def test_whether_to_think(
    flag: bool | None,
    fields: dict[str, Any],
    told: bool | None,
    temperature: float,
    thinks: bool,
    tmp_path: Path,
    autojump_clock: object,
) -> None:
    """The template's own setting, then the effort, then the flag; only thinkers calm down."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 1.0}')
    tokenizer = Listening(thinks=thinks)
    device = ScriptedDevice(ModelInfo("scripted", tokenizer.vocab_size, 4096, frozenset({EOS})))
    async with company(device, tokenizer=tokenizer, model=tmp_path, thinking=flag) as (runtime, _):
        for request in (chat(**fields), GenerationRequest(TokenPrompt((5, 6)), max_tokens=1)):
            async with runtime.generate(request) as generation:
                await read(generation)
    rows = [start.sampling.temperature for plan in device.plans for start in plan.start]
    assert set(tokenizer.told) == {told}
    assert rows == [temperature if thinks or "temperature" in fields else 1.0, 1.0]
