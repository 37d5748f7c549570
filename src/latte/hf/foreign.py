"""The shapes of models that others trained, as configs of this project's."""

from typing import Any

from latte.config import ModelConfig
from latte.errors import UserError


def of_llama(stored: dict[str, Any], source: str) -> ModelConfig:
    """The config of a Llama: Transformer++ of some size.

    Args:
        stored: its config.json. source: names it in errors.

    Raises:
        UserError: it has something that Transformer++ does not.
    """
    rope = stored.get("rope_parameters") or stored.get("rope_scaling") or {}
    theta = rope.get("rope_theta", stored.get("rope_theta", 10_000.0))
    width, heads = stored["hidden_size"], stored["num_attention_heads"]
    _only(stored, source, "hidden_act", "silu")
    _only(stored, source, "rms_norm_eps", 1e-6)
    _only(stored, source, "attention_bias", False)
    _only(stored, source, "mlp_bias", False)
    _only(stored, source, "head_dim", width // heads)
    _only(rope, source, "rope_type", "default")
    return ModelConfig(
        vocab_size=stored["vocab_size"],
        width=width,
        layers=stored["num_hidden_layers"],
        pattern=("attention",),
        heads=heads,
        kv_heads=stored.get("num_key_value_heads") or heads,
        ff=stored["intermediate_size"],
        mlp="glu",
        norm="rms",
        position="rope",
        rope_theta=float(theta),
        max_length=stored.get("max_position_embeddings", 0),
        tied=stored.get("tie_word_embeddings", False),
    )


def _only(stored: dict[str, Any], source: str, name: str, value: Any) -> None:
    """Refuses a setting that the project's modules do not have."""
    found = stored.get(name)
    if found is not None and found != value:
        raise UserError(f"{source} has {name} {found!r}, but only {value!r} can be read")
