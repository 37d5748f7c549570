"""The shape of a Latte model, as transformers keeps it."""

from transformers import PretrainedConfig


class LatteConfig(PretrainedConfig):
    """What the project's `ModelConfig` says of a language model, under transformers' names.

    Args:
        pattern: token mixers, repeated until there are `num_hidden_layers` of them.
        latents: latent states a head.
        window: keys that a token sees through a sliding window, itself included.
        conv_size: taps of the short convolution before queries and keys.
        mlp: "glu" or "gelu".
        norm: "rms" or "layer".
        position: "rope", "vapor", "sinusoidal", "learned" or "none".
        wavelength: base of the rotations and of sinusoids.
    """

    model_type = "latte"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        pattern: list[str] | None = None,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        latents: int = 16,
        window: int = 128,
        conv_size: int = 3,
        intermediate_size: int = 3072,
        mlp: str = "glu",
        norm: str = "rms",
        norm_epsilon: float = 1e-6,
        position: str = "rope",
        wavelength: float = 10_000.0,
        max_position_embeddings: int = 1024,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = True,
        use_cache: bool = True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.pattern = list(pattern or ["latte_r_swa"])
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.latents = latents
        self.window = window
        self.conv_size = conv_size
        self.intermediate_size = intermediate_size
        self.mlp = mlp
        self.norm = norm
        self.norm_epsilon = norm_epsilon
        self.position = position
        self.wavelength = wavelength
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**kwargs)


__all__ = ["LatteConfig"]
