"""Latte language models in plain PyTorch, for transformers.

The definitions are those of the project that trained the weights: blocks of x + mixer(norm(x)) and
x + mlp(norm(x)), where a mixer is softmax attention (full, or through a window), latent attention,
or both under one softmax, with queries and keys from the input, a short convolution or an RG-LRU.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .cache_latte import LatteCache
from .configuration_latte import LatteConfig
from .mixing_latte import Place, attention, conv, latte, rg_lru


def _frequencies(half: int, wavelength: float, device: torch.device) -> Tensor:
    """Of pair i θ^(−i/half), rounded once from float64."""
    powers = torch.arange(half, dtype=torch.float64, device="cpu") / half
    return (wavelength**-powers).to(torch.float32).to(device)


def _rotate(x: Tensor, positions: Tensor, wavelength: float, *, back: bool = False) -> Tensor:
    """Turns pair i of x [B, T, H, D], (x_i, x_{i + D/2}), by its position's angle; or back."""
    half = x.shape[-1] // 2
    angles = positions[:, :, None, None].float() * _frequencies(half, wavelength, x.device)
    cosine, sine = torch.cos(angles), torch.sin(-angles if back else angles)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1).to(x.dtype)


def _sinusoids(positions: Tensor, width: int, wavelength: float) -> Tensor:
    """Fixed position vectors [B, T, width]: sines, then cosines."""
    frequencies = _frequencies(width // 2, wavelength, positions.device)
    angles = positions[:, :, None].float() * frequencies
    return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)


class LatteRMSNorm(nn.Module):
    """x / rms(x) · g, in float32 or wider."""

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.square().mean(dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean + self.epsilon) * self.weight).to(x.dtype)


class LatteLayerNorm(LatteRMSNorm):
    """(x − mean) / deviation · g + b."""

    def __init__(self, width: int, epsilon: float):
        super().__init__(width, epsilon)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(dim=-1, keepdim=True)
        return (super().forward(centred) + self.bias).to(x.dtype)


def _make_norm(config: LatteConfig) -> LatteRMSNorm:
    kind = LatteRMSNorm if config.norm == "rms" else LatteLayerNorm
    return kind(config.hidden_size, config.norm_epsilon)


class LatteMLP(nn.Module):
    """(silu(x W_gate) · x W_in) W_out, or gelu(x W_in) W_out."""

    def __init__(self, config: LatteConfig):
        super().__init__()
        width, hidden = config.hidden_size, config.intermediate_size
        self.project_in = nn.Linear(width, hidden, bias=False)
        if config.mlp == "glu":
            self.project_gate = nn.Linear(width, hidden, bias=False)
        self.project_out = nn.Linear(hidden, width, bias=False)
        self.gated = config.mlp == "glu"

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            hidden = F.silu(self.project_gate(x)) * self.project_in(x)
        else:
            hidden = F.gelu(self.project_in(x), approximate="tanh")
        return self.project_out(hidden)


# --- what queries and keys are made from --------------------------------------------------------


class LatteConv(nn.Module):
    """A depthwise convolution."""

    def __init__(self, config: LatteConfig):
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(config.conv_size, config.hidden_size))

    def forward(self, x: Tensor, place: Place, state: Any) -> tuple[Tensor, Any]:
        return conv(x, self.taps, place, state)


class LatteGate(nn.Module):
    """y = x W + b with a block-diagonal W."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(groups, width // groups, width // groups))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (self.weight.shape[0], -1))
        y = torch.einsum("btgi,gio->btgo", groups, self.weight.to(x.dtype))
        return y.flatten(-2) + self.bias.to(y.dtype)


class LatteRGLRU(nn.Module):
    """A real-gated linear recurrent unit."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.gate_decay = LatteGate(width, groups)
        self.gate_input = LatteGate(width, groups)
        self.lam = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, place: Place, state: Any) -> tuple[Tensor, Any]:
        return rg_lru(x, self.gate_decay(x), self.gate_input(x), self.lam, place, state)


class LatteRecurrence(nn.Module):
    """RMSNorm(RG-LRU(x))."""

    def __init__(self, config: LatteConfig):
        super().__init__()
        self.rg_lru = LatteRGLRU(config.hidden_size, config.num_attention_heads)
        self.norm = LatteRMSNorm(config.hidden_size, config.norm_epsilon)

    def forward(self, x: Tensor, place: Place, state: Any) -> tuple[Tensor, Any]:
        y, state = self.rg_lru(x, place, state)
        return self.norm(y), state


# --- mixers -------------------------------------------------------------------------------------


class LatteMixer(nn.Module):
    """The token mixer that a pattern names: its parts are joined by underscores.

    latte is latent attention, with `swa` under one softmax with a window; swa or attention alone
    are softmax attention. conv or r say what queries and keys (the latents' logits) are made from.
    """

    def __init__(self, config: LatteConfig, name: str):
        super().__init__()
        parts = name.split("_")
        width, heads = config.hidden_size, config.num_attention_heads
        self.heads, self.size = heads, width // heads
        self.of_latents, self.of_window = "latte" in parts, "latte" in parts and "swa" in parts
        self.kv_heads = heads
        if not self.of_latents or self.of_window:
            self.kv_heads = config.num_key_value_heads
        self.window = config.window if "swa" in parts else None
        turns = config.position in ("rope", "vapor")
        self.wavelength = config.wavelength if turns else None
        self.vapor = self.of_latents and not self.of_window and config.position == "vapor"
        if "conv" in parts:
            self.source = LatteConv(config)
        elif "r" in parts:
            self.source = LatteRecurrence(config)
        else:
            self.source = None
        key_size = config.latents if self.of_latents or "r" in parts else self.size
        key_heads = heads if self.of_latents else self.kv_heads
        queries = key_size + 1 if self.of_window else key_size
        self.project_q = nn.Linear(width, heads * queries, bias=False)
        self.project_k = nn.Linear(width, key_heads * key_size, bias=False)
        self.project_v = nn.Linear(width, self.kv_heads * self.size, bias=False)
        if self.of_window:
            self.project_window_q = nn.Linear(width, heads * self.size, bias=False)
            self.project_window_k = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.project_out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, place: Place, state: Any) -> tuple[Tensor, Any]:
        source, latents, near = (None, None, None) if state is None else state
        z = x
        if self.source is not None:
            z, source = self.source(x, place, source)
        q, k, v = self.project_q(z), self.project_k(z), self.project_v(x)
        q, v = self._heads(q, self.heads), self._heads(v, self.kv_heads)
        if self.of_latents:
            k = self._heads(k, self.heads)
            y, latents, near = self._mix(x, q, k, v, place, latents, near)
        else:
            y, near = self._attend(q, self._heads(k, self.kv_heads), v, place, near)
        return self.project_out(y.flatten(2).to(x.dtype)), (source, latents, near)

    @staticmethod
    def _heads(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place, state: Any):
        if self.wavelength is not None:
            q, k = (_rotate(a, place.positions, self.wavelength) for a in (q, k))
        return attention(q, k, v, self.window, place, state)

    def _mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, place: Place, latents: Any, near: Any
    ):
        """Latents, and the window as one more state of the mixture, its first."""
        p = torch.softmax(q.to(torch.promote_types(q.dtype, torch.float32)), dim=-1)
        if not self.of_window:
            if self.vapor:
                v = _rotate(v, place.positions, cast(float, self.wavelength), back=True)
            y, latents = latte(p, k, v, place, latents)
            if self.vapor:
                y = _rotate(y, place.positions, cast(float, self.wavelength))
            return y, latents, near
        qw = self._heads(self.project_window_q(x), self.heads)
        kw = self._heads(self.project_window_k(x), self.kv_heads)
        local, near = self._attend(qw, kw, v, place, near)
        values = v.repeat_interleave(self.heads // self.kv_heads, dim=2)
        far, latents = latte(p[..., 1:], k, values, place, latents)
        return p[..., :1] * local + far, latents, near


class LatteBlock(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LatteConfig, name: str):
        super().__init__()
        self.mixer_norm, self.mixer = _make_norm(config), LatteMixer(config, name)
        self.mlp_norm, self.mlp = _make_norm(config), LatteMLP(config)

    def forward(self, x: Tensor, place: Place, state: Any) -> tuple[Tensor, Any]:
        y, state = self.mixer(self.mixer_norm(x), place, state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


# --- models -------------------------------------------------------------------------------------


class LattePreTrainedModel(PreTrainedModel):
    """What transformers needs to know of the family."""

    config_class = LatteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LatteBlock"]  # noqa: RUF012
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        deviation = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=deviation)
        elif isinstance(module, LatteRMSNorm):
            nn.init.ones_(module.weight)
            if isinstance(module, LatteLayerNorm):
                nn.init.zeros_(module.bias)
        elif isinstance(module, LatteGate):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            nn.init.zeros_(module.bias)
        elif isinstance(module, LatteConv):
            nn.init.normal_(module.taps, std=module.taps.shape[0] ** -0.5)
        elif isinstance(module, LatteRGLRU):
            # Decays of 0.9 to 0.999 at an open gate.
            nn.init.uniform_(
                module.lam, math.log(math.expm1(1e-3 / 8)), math.log(math.expm1(0.013))
            )


class LatteModel(LattePreTrainedModel):
    """From tokens to hidden vectors."""

    def __init__(self, config: LatteConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if config.position == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        pattern = config.pattern
        names = [pattern[i % len(pattern)] for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList([LatteBlock(config, name) for name in names])
        self.norm = _make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden vectors of rows of tokens, after those that `past_key_values` has seen.

        Args:
            attention_mask [B, T] or [B, past + T]: 0 for padding, on the left, right or anywhere;
                no token sees it.
            position_ids [B, T]: places in their documents; a token at 0 begins a document, so
                that several may be packed into a row.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        training = self.gradient_checkpointing and self.training
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = _as_cache(past_key_values)
        if cache is None and use_cache and not training:
            cache = LatteCache()
        if cache is not None:
            cache.begin(x.shape[0], len(self.layers), x.device)
        place, order = _place(x, attention_mask, position_ids, cache)
        if order is not None:
            x = _in_order(x, order)
        x = x + self._positions(place).to(x.dtype)

        states = [None] * len(self.layers) if cache is None else cache.layers
        wanted = output_hidden_states
        wanted = self.config.output_hidden_states if wanted is None else wanted
        seen = [x]
        for i, layer in enumerate(self.layers):
            if training:
                x, _ = cast(Any, self._gradient_checkpointing_func)(layer, x, place, states[i])
            else:
                x, states[i] = layer(x, place, states[i])
            seen = [*seen, x] if wanted else [x]
        seen[-1] = self.norm(x)
        if cache is not None:
            _advance(cache, place)
        if order is not None:
            back = torch.argsort(order, dim=1)
            seen = [_in_order(h, back) for h in seen]
        output = BaseModelOutputWithPast(
            last_hidden_state=cast(Any, seen[-1]),
            past_key_values=cast(Any, cache if use_cache else None),
            hidden_states=cast(Any, tuple(seen) if wanted else None),
        )
        return output.to_tuple() if return_dict is False else output

    def _positions(self, place: Place) -> Tensor:
        """What is added to the embedding of each token."""
        if self.embed_positions is not None:
            room = self.embed_positions.num_embeddings
            if not torch.compiler.is_compiling() and int(place.positions.max()) >= room:
                raise ValueError(
                    f"a token stands at position {int(place.positions.max())}, but the model has "
                    f"learned {room} positions; give shorter texts"
                )
            return self.embed_positions(place.positions)
        if self.config.position == "sinusoidal":
            return _sinusoids(place.positions, self.config.hidden_size, self.config.wavelength)
        return torch.zeros((), device=place.positions.device)


def _as_cache(cache: Any) -> LatteCache | None:
    """The cache that a caller gave, where it is one, or a new one for another kind's empty one."""
    if cache is None or isinstance(cache, LatteCache):
        return cache
    if hasattr(cache, "get_seq_length") and cache.get_seq_length() == 0:
        return LatteCache()
    raise ValueError(
        f"past_key_values is a {type(cache).__name__}, but a Latte model carries a LatteCache: "
        "pass on the one that an earlier call returned"
    )


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """x [B, T, …] with its tokens in another order [B, T]."""
    return x.gather(1, order[..., None].expand_as(x)) if x.ndim == 3 else x.gather(1, order)


def _place(
    x: Tensor, mask: Tensor | None, positions: Tensor | None, cache: LatteCache | None
) -> tuple[Place, Tensor | None]:
    """Where the tokens stand, and the order in which each row's real ones come first."""
    batch, length = x.shape[:2]
    if mask is not None and mask.ndim != 2:
        raise ValueError(
            f"attention_mask has {mask.ndim} dimensions, but it must be [batch, length]; give "
            "position_ids that begin at 0 with each document to pack several into a row"
        )
    at = torch.arange(length, device=x.device).expand(batch, -1)
    if mask is None:
        real = torch.ones(batch, length, dtype=torch.bool, device=x.device)
    else:
        real = mask[:, -length:].to(x.device).bool()
    order = None
    if mask is not None and length > 1:
        order = torch.argsort(~real, dim=1, stable=True)
        real = _in_order(real, order)
    if positions is not None:
        positions = positions.to(x.device).expand(batch, -1)
        positions = positions if order is None else _in_order(positions, order)
    elif cache is not None:
        positions = cast(Tensor, cache.position)[:, None] + at
    else:
        positions = at
    positions = positions.masked_fill(~real, 0)
    nothing_seen = True if cache is None else (cast(Tensor, cache.count) == 0)[:, None]
    first = real & ((positions == 0) | ((at == 0) & nothing_seen))
    return Place(first.cumsum(dim=1), first, real, positions, real.sum(dim=1)), order


def _advance(cache: LatteCache, place: Place) -> None:
    """Notes what the call has read."""
    some = place.lengths > 0
    last = place.positions.gather(1, (place.lengths - 1).clamp(min=0)[:, None])[:, 0]
    position = torch.where(some, last + 1, cast(Tensor, cache.position))
    count = cast(Tensor, cache.count) + place.lengths
    cache.advance(place.real.shape[1], count, position)


class LatteForCausalLM(LattePreTrainedModel, GenerationMixin):
    """Next-token logits."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LatteConfig):
        super().__init__(config)
        self.model = LatteModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits of the next token, and the mean loss of `labels` where they are given."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        hidden = output.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )
        return result.to_tuple() if return_dict is False else result

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, *args, **kwargs
    ) -> None:
        """The cache of `generate`, which asks for one of its own kinds otherwise."""
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            cache._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = LatteCache()


__all__ = ["LatteForCausalLM", "LatteModel", "LattePreTrainedModel"]
