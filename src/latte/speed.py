"""How fast a run goes, and how fast its devices could."""

import time
from collections import deque
from collections.abc import Callable

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
"""Peak dense bfloat16 FLOP/s of one JAX device, by the beginning of its `device_kind`.

Sources: Google Cloud's pages of each TPU version (cloud.google.com/tpu/docs/v4 and so on) and
NVIDIA's data sheets, whose figures for sparse matrices are halved. A running v4 or v5p chip is one
device (its two cores work as one), a TPU7x chip is two.
"""


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of one device; None where it is not known, a CPU for one."""
    if device_kind in PEAK_FLOPS:
        return PEAK_FLOPS[device_kind]
    # GPUs name their form or memory after the model: «NVIDIA A100-SXM4-40GB», «NVIDIA H200 NVL».
    gpus = [name for name in PEAK_FLOPS if name.startswith("NVIDIA")]
    names = [name for name in gpus if device_kind.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else None


class Speed:
    """Tokens a second and model FLOP utilisation, over the last `window` steps.

    tokens_per_step: tokens of a global batch.
    flops_per_token: model FLOPs of training on one token (forward and backward, no recomputation).
    device_kind, devices: as JAX names the devices, and how many of them there are.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_token: float,
        device_kind: str,
        devices: int,
        window: int = 20,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tokens, self._flops = tokens_per_step, flops_per_token
        peak = peak_flops(device_kind)
        self._peak = peak and peak * devices
        self._marks: deque[tuple[int, float]] = deque(maxlen=window + 1)
        self._clock = clock

    def restart(self) -> None:
        """Forgets the past: call after a pause, such as an evaluation or a compilation."""
        self._marks.clear()

    def update(self, step: int) -> dict[str, float]:
        """Marks the end of a step. Returns tokens_per_second, and mfu where the peak is known.

        The first step after the start or `restart` returns nothing: it has no beginning.
        """
        self._marks.append((step, self._clock()))
        (first, start), (last, end) = self._marks[0], self._marks[-1]
        if end <= start:
            return {}
        tokens_per_second = self._tokens * (last - first) / (end - start)
        speed = {"tokens_per_second": tokens_per_second}
        if self._peak:
            speed["mfu"] = tokens_per_second * self._flops / self._peak
        return speed
