"""Schedules are counted with the trips of their loops, and programs are read for their moves."""

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


LISTING = """= control target key start
LB: loop body
= control target key end

     0   :  { %6 = vsyncpa [#allocation3], 0 }
   0x1 LB: > { %s1 = sadd.s32 1, %s2
base_bounds: (512, 2)
 */ }
   0x2 LB: >> { %s3 = sadd.s32 1, %s4 }
   0x3   : {}
   0x4   : >> { %p1 = scmp.ge.s32.totalorder %s3, 16 /* loop exit test */ }
   0x5 LB: >> { %p2 = scmp.ge.s32.totalorder %s5, %s6 /* loop exit test */ }
   0x6 PF: > { %p3 = scmp.ge.s32.totalorder %s1, 34 /* loop exit test */  ;;  %s7 = smov 0 }
   0x7   :  { %8 = vsyncpa [#allocation4], 1 }
"""


def test_bundles_count_with_the_trips_of_their_loops(tpu_static):
    """Two bundles outside; 34 times two, sixteen times three, and a loop of unknown length."""
    issue = tpu_static.count_bundles(LISTING)
    assert issue.bundles == 8
    assert issue.cycles == 2 + 34 * (2 + 16 * 3 + 1)
    assert issue.unbounded == 1


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
