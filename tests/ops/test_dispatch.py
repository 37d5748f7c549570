"""What is chosen for a platform, and what a name that is not there is answered."""

import logging

import jax
import pytest

from latte.ops import dispatch
from latte.ops.dispatch import choose, tracing_for

FORMS = {"reference": len, "xla": max}
KERNELS = {"tpu": min}


def test_the_best_form_is_that_of_the_platform(caplog):
    dispatch._say.cache_clear()
    assert choose("op", None, FORMS, KERNELS) is max
    with tracing_for("tpu"), caplog.at_level(logging.INFO, "latte"):
        assert choose("op", None, FORMS, KERNELS) is min
        assert choose("op", None, FORMS, KERNELS) is min
        assert choose("op", None, FORMS) is max
        assert choose("op", None, FORMS, KERNELS, fits=False) is max
    said = [record.getMessage() for record in caplog.records]
    assert said == ["op: its Pallas kernel on tpu", "op: XLA on tpu"]
    assert choose("op", None, FORMS, KERNELS) is max


def test_a_form_of_the_devices_own_comes_first_on_the_device(monkeypatch):
    here = {"native": {"tpu": "sum"}}
    with tracing_for("tpu"):
        assert choose("op", None, FORMS | {"sum": sum}, KERNELS, **here) is min
    monkeypatch.setattr(dispatch, "_say", lambda *_: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert choose("op", None, FORMS | {"sum": sum}, KERNELS, **here) is sum
    assert choose("op", None, FORMS, KERNELS, **here) is min
    assert choose("op", "pallas", FORMS | {"sum": sum}, KERNELS, **here) is min


@pytest.mark.parametrize(
    ("platform", "impl", "kernels", "fits", "words"),
    [
        ("cpu", "pallas", KERNELS, True, r"op has Pallas kernels for \['tpu'\] and this is 'cpu'"),
        ("tpu", "pallas", KERNELS, False, "does not take arrays of these types and sizes"),
        ("tpu", "pallas", None, True, r"'pallas': choose from \['reference', 'xla'\]"),
        ("tpu", "palas", KERNELS, True, r"choose from \['pallas', 'reference', 'xla'\]"),
    ],
)
def test_a_form_asked_for_by_name_never_gives_way(platform, impl, kernels, fits, words):
    with tracing_for(platform), pytest.raises(ValueError, match=words):
        choose("op", impl, FORMS, kernels, fits=fits)
