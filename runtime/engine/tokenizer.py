"""The tokenizer of a model directory, read by mlx-lm, behind the text side's protocol.

Owns the loaded tokenizer. Any thread may call it: encoding, whole decoding and rendering take
turns under one lock (the library's tokenizers are not safe to share), while the table of pieces
that streaming reads needs none. Knows no request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from mlx_lm.utils import load_tokenizer as load_wrapper

from ..errors import ModelError
from ..text.pieces import TokenTable, build_table
from ..text.tokenizer import TemplateError, Tokenizer

_MARKERS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
)
"""Pairs that mlx-lm does not look for, or only in the vocabulary; some models spell them out."""

_PROBES = (
    "Hello, world!  It's 12.5 °C .\n\n\tdef f(x): return x\n",
    " 如何降级Mac? ภาษาไทย हिन्दी 👩‍👩‍👧‍👦 🇯🇵 é",
)


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Load what ``model_dir`` holds, without the network and without code of the model's own.

    End tokens are those of ``generation_config.json``, else of ``config.json``, and the
    tokenizer's own. Raises ModelError when the files are missing or cannot be read.
    """
    if not model_dir.is_dir():
        raise ModelError(f"There is no model directory {model_dir}.", code="model_not_found")
    try:
        return ModelTokenizer(_load(model_dir))
    except ModelError:
        raise
    except Exception as error:
        # Whatever a broken file makes the libraries raise, for the operator it is one fault.
        raise ModelError(f"The tokenizer in {model_dir} cannot be read: {error}") from error


def _load(model_dir: Path) -> Any:
    options = {"trust_remote_code": False, "local_files_only": True}
    read: Any = load_wrapper
    try:
        return read(model_dir, options, eos_token_ids=_end_ids(model_dir))
    except SystemExit as error:
        # mlx-lm asks the family's file for defaults, and one of them (olmo.py) ends the process.
        raise ModelError(f"mlx-lm cannot run the model in {model_dir} on this machine") from error


def _end_ids(model_dir: Path) -> list[int] | None:
    for name in ("generation_config.json", "config.json"):
        value = _read_object(model_dir / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if found := [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]:
            return found
    return None


def _read_object(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.")
    return value


class ModelTokenizer:
    """The protocol ``runtime.text.tokenizer.Tokenizer`` on mlx-lm's tokenizer wrapper."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._lock = Lock()
        tokens = _tokens_by_id(wrapper.get_vocab())
        self._vocab_size = len(tokens)
        self._eos_ids = frozenset(int(i) for i in wrapper.eos_token_ids)
        self._markers = _think_markers(wrapper)
        self._special = _special_ids(wrapper) - self._marker_ids()
        table = build_table(tokens, _decoder(wrapper), self._special)
        self._table = table if table is not None and self._agrees(table) else None

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_text(self) -> str | None:
        token = self._wrapper.bos_token
        return None if token is None else str(token)

    @property
    def table(self) -> TokenTable | None:
        return self._table

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapper.has_chat_template)

    @property
    def think_markers(self) -> tuple[str, str] | None:
        return self._markers

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._lock:
            ids = self._wrapper.encode(text, add_special_tokens=add_special_tokens)
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        known = [i for i in ids if 0 <= i < self._vocab_size]
        with self._lock:
            # Some models' settings ask for blanks before punctuation to be removed, which would
            # make the text depend on where it is cut.
            return str(self._wrapper.decode(known, clean_up_tokenization_spaces=False))

    def token_bytes(self, token_id: int) -> bytes:
        if self.is_special(token_id) or not 0 <= token_id < self._vocab_size:
            return b""
        if self._table is not None:
            return self._table.pieces[token_id]
        return self.decode([token_id]).encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def render(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        try:
            with self._lock:
                rendered = self._wrapper.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **kwargs,
                )
        except Exception as error:
            # Templates are programs of the model's makers: they may raise anything.
            raise TemplateError(_reason(error)) from error
        if not isinstance(rendered, str):
            raise TemplateError("The model's chat template does not give text.")
        return rendered

    def _marker_ids(self) -> set[int]:
        if self._markers is None:
            return set()
        return {
            i for marker in self._markers for i in self.encode(marker, add_special_tokens=False)
        }

    def _agrees(self, table: TokenTable) -> bool:
        """Whether the table spells real text as the tokenizer itself does."""
        for probe in _PROBES:
            ids = [
                i for i in self.encode(probe, add_special_tokens=False) if i not in self._special
            ]
            spelled = b"".join(table.pieces[i] for i in ids).decode("utf-8", "replace")
            if spelled.lstrip(" ") != self.decode(ids).lstrip(" "):
                return False
        return True


def _tokens_by_id(vocabulary: Mapping[str, int]) -> list[str | None]:
    tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    return tokens


def _special_ids(wrapper: Any) -> set[int]:
    added = getattr(wrapper, "added_tokens_decoder", {})
    marked = {int(i) for i, token in added.items() if token.special}
    return marked | {int(i) for i in wrapper.all_special_ids}


def _decoder(wrapper: Any) -> object:
    """The decoder's description as JSON, or None for a tokenizer that is not of ``tokenizers``."""
    backend = getattr(wrapper, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    return None if decoder is None else json.loads(decoder.__getstate__())


def _think_markers(wrapper: Any) -> tuple[str, str] | None:
    """mlx-lm's finding, else a known pair that the vocabulary or the template spells."""
    if wrapper.has_thinking:
        return str(wrapper.think_start), str(wrapper.think_end)
    vocabulary = wrapper.get_vocab()
    template = _template_text(wrapper.chat_template)
    for start, end in _MARKERS:
        if (start in vocabulary and end in vocabulary) or (start in template and end in template):
            return start, end
    return None


def _template_text(template: object) -> str:
    if isinstance(template, dict):
        return "\n".join(str(text) for text in template.values())
    return template if isinstance(template, str) else ""


def _reason(error: Exception) -> str:
    """The template's own words if it raised on purpose; else no detail of its insides."""
    if type(error).__module__.partition(".")[0] == "jinja2" and type(error).__name__ == (
        "TemplateError"
    ):
        return str(error)
    return "The model's chat template cannot render these messages."
