"""KV schemes as words of the command line and as a model's kv_config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.kvschemes import (
    TURBO_KEY_BITS,
    TURBO_VALUE_BITS,
    AffineKV,
    KVScheme,
    LayerBits,
    PerLayerKV,
    PlainKV,
    TurboKV,
    check_scheme,
    name_of,
    parse_kv_quant,
    read_kv_config,
    start_of,
)


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("off", PlainKV()),
        ("config", PerLayerKV()),
        ("4", AffineKV(4)),
        ("8", AffineKV(8)),
        ("turbo", TurboKV(8, 3)),
        ("turbo:k2v8", TurboKV(2, 8)),
    ],
)
def test_the_words_of_the_command_line(text: str, scheme: KVScheme) -> None:
    """Each word means one scheme, from the first token on; turbo alone is k8v3."""
    assert parse_kv_quant(text) == scheme
    assert start_of(scheme) == 0
    assert parse_kv_quant(name_of(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "none of off"),
        ("6", "none of off"),
        ("Turbo", "none of off"),
        ("turbo:", "none of off"),
        ("turbo:k8", "none of off"),
        ("turbo:k8v3 ", "none of off"),
        ("8,turbo", "none of off"),
        ("turbo:k3v3", "keys of 3 bits do not exist, only 2, 4, 5 and 8"),
        ("turbo:k8v6", "values of 6 bits do not exist, only 2, 3, 4, 5 and 8"),
    ],
)
def test_other_words_are_refused_with_what_would_do(text: str, told: str) -> None:
    """A scheme that does not exist is never taken for one that does."""
    with pytest.raises(ValueError, match=told):
        parse_kv_quant(text)


@given(st.text(max_size=12))
def test_no_text_crashes_the_parser(text: str) -> None:
    """Whatever is typed is a scheme or a ValueError."""
    try:
        scheme = parse_kv_quant(text)
    except ValueError:
        return
    check_scheme(scheme)


@given(st.sampled_from(TURBO_KEY_BITS), st.sampled_from(TURBO_VALUE_BITS))
def test_every_turbo_scheme_goes_through_its_name(key_bits: int, value_bits: int) -> None:
    """Name and parser agree on all widths."""
    scheme = TurboKV(key_bits, value_bits)
    check_scheme(scheme)
    assert parse_kv_quant(name_of(scheme)) == scheme


@pytest.mark.parametrize(
    "scheme", [AffineKV(3), AffineKV(8, 32), TurboKV(3, 3), TurboKV(8, 7), AffineKV(4, start=-1)]
)
def test_schemes_put_together_wrongly_are_refused(scheme: KVScheme) -> None:
    """A library's caller is told, too."""
    with pytest.raises(ModelError):
        check_scheme(scheme)


def write(folder: Path, content: object) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "kv_config.json").write_text(text)
    return folder


def test_layers_of_a_file(tmp_path: Path) -> None:
    """Bits and groups by layer; 0 and 16 bits mean plain; groups are of 64 unless they say so."""
    lines = [
        {"layer_idx": 3, "bits": 8, "group_size": 64},
        {"layer_idx": 7, "bits": 4, "group_size": 32},
        {"layer_idx": 11, "bits": 4},
        {"layer_idx": 12, "bits": 16},
        {"layer_idx": 13, "bits": 0},
    ]
    expected = (LayerBits(3, 8), LayerBits(7, 4, 32), LayerBits(11, 4))
    assert read_kv_config(write(tmp_path, lines)) == expected


def test_no_file_means_no_layer(tmp_path: Path) -> None:
    """A model without the file is plain."""
    assert read_kv_config(tmp_path) == ()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "cannot be read"),
        ({"layer_idx": 0, "bits": 8}, "list"),
        ([3], "not an object"),
        ([{"bits": 8}], "layer_idx must be a whole number"),
        ([{"layer_idx": 0}], "bits must be a whole number"),
        ([{"layer_idx": "0", "bits": 8}], "layer_idx must be a whole number"),
        ([{"layer_idx": True, "bits": 8}], "layer_idx must be a whole number"),
        ([{"layer_idx": -1, "bits": 8}], "no layer -1"),
        ([{"layer_idx": 0, "bits": 5}], "wants 5 bits"),
        ([{"layer_idx": 0, "bits": 8, "group_size": 48}], "groups of 48"),
        ([{"layer_idx": 0, "bits": 8, "group_size": None}], "group_size must be"),
        ([{"layer_idx": 0, "bits": 8, "v_bits": 4}], "'v_bits'"),
        ([{"layer_idx": 0, "bits": 8}, {"layer_idx": 0, "bits": 4}], "layer 0 twice"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, content: object, told: str) -> None:
    """A mistake in the file is told, and never leaves a layer plain in silence."""
    with pytest.raises(ModelError, match=told):
        read_kv_config(write(tmp_path, content))
