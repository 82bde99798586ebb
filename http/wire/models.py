"""``/v1/models`` on the wire. Pure data."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from mlx_troupe.runtime.model_info import ModelInfo


class ModelCard(Struct):
    """One model. Everything after ``owned_by`` is an extension, absent while it loads.

    ``adapters`` are the ids that a request to it may name now.
    """

    id: str
    object: str
    created: int
    owned_by: str
    context_window: int | UnsetType | None = UNSET
    vocab_size: int | UnsetType = UNSET
    batch_mode: str | UnsetType = UNSET
    adapters: tuple[str, ...] = ()


class ModelList(Struct):
    """All models, the served one first."""

    object: str
    data: tuple[ModelCard, ...]


def model_card(
    name: str, model: ModelInfo | None, created: int, adapters: tuple[str, ...] = ()
) -> ModelCard:
    """The card of the served model, which may still be loading."""
    card = ModelCard(id=name, object="model", created=created, owned_by="mlx-troupe")
    card.adapters = adapters
    if model is not None:
        card.context_window = model.context_window
        card.vocab_size = model.vocab_size
        card.batch_mode = "batch" if model.batchable else "serial"
    return card
