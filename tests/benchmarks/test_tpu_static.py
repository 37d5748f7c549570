"""Programs are read for their kernels and the moves around them."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "tpu_static.py"


@pytest.fixture(scope="module")
def tpu_static():
    spec = importlib.util.spec_from_file_location("tpu_static", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PROGRAM = """HloModule jit_f

%inner (p: f32[9,9999999]) -> f32[9] {
  %copy.9 = f32[9,9999999]{1,0} copy(%p)
}

ENTRY %main (x: bf16[1024,1024]) -> (bf16[1024,1024], f32[8]) {
  %x = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %copy.1 = bf16[1024,1024]{0,1:T(8,128)(2,1)} copy(%x)
  %small = f32[8]{0} fusion(%x), kind=kLoop
  %k.1 = (bf16[1024,1024]{1,0}, f32[8]{0}) custom-call(%copy.1, %x), custom_call_target="tpu_custom_call"
  ROOT %t = (bf16[1024,1024]{1,0}, f32[8]{0}) tuple(%k.1, %small)
}
"""  # noqa: E501


def test_a_kernel_is_its_operands_and_results_and_a_copy_is_a_move(tpu_static):
    kernels, moves = tpu_static.read_program(PROGRAM)
    size = 2 * 1024 * 1024
    assert kernels == {"k.1": 3 * size + 32}
    assert moves == {"copy copy.1": 2 * size, "fusion small": size + 32}
