"""Programs known in advance: trips, products, bytes and collectives are counted right."""

import pytest

from latte.plan.chips import parse_topology
from latte.plan.collectives import Layout, Place, collectives_of
from latte.plan.predict import predict
from latte.plan.program import Program

PROGRAM = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%inside (i: (s32[], f32[8,512])) -> pred[] {
  %i = (s32[]{:T(128)}, f32[8,512]{1,0}) parameter(0)
  %limit = s32[]{:T(128)} constant(7)
  %at = s32[]{:T(128)} get-tuple-element(%i), index=0
  ROOT %lt = pred[]{:T(512)} compare(%at, %limit), direction=LT
}

%body (i: (s32[], f32[8,512])) -> (s32[], f32[8,512]) {
  %i = (s32[]{:T(128)}, f32[8,512]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%i), index=0
  %x = f32[8,512]{1,0} get-tuple-element(%i), index=1
  %one = s32[] constant(2)
  %next = s32[] add(%at, %one)
  %w = f32[512,512]{1,0:T(8,128)S(1)} constant(0)
  %y = f32[8,512]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
  %r = f32[8,512]{1,0} all-reduce(%y), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), use_global_device_ids=true, to_apply=%add
  ROOT %t = (s32[], f32[8,512]{1,0}) tuple(%next, %r)
}

ENTRY %main (x: f32[8,512]) -> f32[8,512] {
  %x = f32[8,512]{1,0} parameter(0)
  %first = s32[] constant(1)
  %state = (s32[], f32[8,512]{1,0}) tuple(%first, %x)
  %loop = (s32[], f32[8,512]{1,0}) while(%state), condition=%inside, body=%body
  %y = f32[8,512]{1,0} get-tuple-element(%loop), index=1
  %all = f32[32,512]{1,0} all-gather(%y), channel_id=2, replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a','b'}, dimensions={0}
  ROOT %cut = f32[8,512]{1,0} slice(%all), slice={[0:8], [0:512]}
}
"""  # noqa: E501
SIZE = 8 * 512 * 4


def layout(slices: int = 1) -> Layout:
    places = [Place((x, y), i) for i in range(slices) for x in range(2) for y in range(2)]
    axes = {"data": 2 * slices, "fsdp": 2}
    return Layout(axes, places, parse_topology("v5e:2x2", slices))


def test_trips_are_read_from_the_condition():
    """From 1 below 7 in steps of 2."""
    program = Program(PROGRAM)
    visits = {visit.computation.name: visit.times for visit in program.visits()}
    assert visits == {"main": 1, "body": 3}
    assert program.unbounded == []


def test_products_count_with_their_trips():
    prediction = predict(Program(PROGRAM), layout(), lambda name: None)
    assert prediction.flops == 3 * 2 * 8 * 512 * 512


def test_collectives_name_their_axes_and_what_each_device_sends():
    """Two of four devices along one side, one link: an all-reduce sends twice a half."""
    prediction = predict(Program(PROGRAM), layout(), lambda name: None)
    reduced, gathered = sorted(prediction.traffic, key=lambda one: one.kind, reverse=True)
    assert (reduced.kind, reduced.axes, reduced.bytes) == ("all-reduce", ("data",), 3 * SIZE)
    assert reduced.seconds == pytest.approx(3 * SIZE / 50e9)
    assert (gathered.kind, gathered.axes) == ("all-gather", ("data", "fsdp"))
    assert gathered.bytes == 3 * SIZE
    assert gathered.seconds == pytest.approx(3 * SIZE / (2 * 50e9))


def test_what_is_in_the_vector_memory_is_not_read_from_the_hbm():
    program = Program(PROGRAM)
    body = program.computations["body"]
    assert program.hbm_bytes(body, body.instructions["y"]) == 2 * SIZE


def test_padding_is_no_product():
    """A product over heads as a convolution: each output meets one tap."""
    line = "bf16[4096,16,65] convolution(%x, %w), window={size=16 pad=15_15 rhs_reversal=1}"
    text = f"""ENTRY %main (x: bf16[4096,2048,1]) -> bf16[4096,16,65] {{
  %x = bf16[4096,2048,1]{{1,0,2}} parameter(0)
  %w = bf16[16,65,2048]{{2,1,0}} parameter(1)
  ROOT %y = {line}, dim_labels=bf0_0oi->b0f
}}
"""
    program = Program(text)
    main = program.computations["main"]
    assert program.flops(main, main.root) == 2 * 4096 * 2048 * 16 * 65


def test_a_collective_in_steps_counts_once():
    text = """%step (p: f32[8]) -> f32[16] {
  %p = f32[8] parameter(0)
  ROOT %g = f32[16] all-gather(%p), channel_id=5, replica_groups={{0,1},{2,3}}, dimensions={0}
}

ENTRY %main (x: f32[8]) -> f32[16] {
  %x = f32[8] parameter(0)
  %first = f32[16] fusion(%x), kind=kCustom, calls=%step
  ROOT %second = f32[16] fusion(%x), kind=kCustom, calls=%step
}
"""
    program = Program(text)
    found = list(collectives_of(program, program.computations["main"], layout()))
    assert [(one.kind, one.axes, one.hidden) for _, one in found] == [
        ("all-gather", ("fsdp",), True)
    ]


def transfers(kind: str, size: int) -> str:
    """A program that begins a transfer between slices, multiplies, and waits for the result."""
    about = f'frontend_attributes={{_xla_megascale_transfer_type="{kind}"}}'
    return f"""ENTRY %main (x: f32[{size}], y: f32[8,512], w: f32[512,512]) -> f32[8,512] {{
  %x = f32[{size}] parameter(0)
  %y = f32[8,512] parameter(1)
  %w = f32[512,512] parameter(2)
  %token = token[] after-all()
  %give = (f32[{size}], u32[], token[]) send(%x, %token), channel_id=1, {about}
  %take = (f32[{size}], u32[], token[]) recv(%token), channel_id=2, {about}
  %z = f32[8,512] convolution(%y, %w), dim_labels=bf_io->bf
  %given = token[] send-done(%give), channel_id=1
  %taken = (f32[{size}], token[]) recv-done(%take), channel_id=2
  ROOT %end = f32[8,512] copy(%z)
}}
"""


@pytest.mark.parametrize(
    ("kind", "slices", "share"),
    [
        ("ALL_REDUCE", 2, 1.0),
        ("ALL_REDUCE", 4, 1.5),
        ("REDUCE_SCATTER", 4, 0.75),
        ("ALL_TO_ALL", 4, 0.75),
        ("ALL_GATHER", 4, 3.0),
        ("ONE_TO_ONE", 4, 1.0),
    ],
)
def test_transfers_between_slices_cross_the_network(kind, slices, share):
    """Of 4 MB, for which a chip's share of the network takes more time than the product."""
    prediction = predict(Program(transfers(kind, 10**6)), layout(slices), lambda name: None)
    [sent] = prediction.traffic
    assert (sent.kind, sent.axes) == (kind.lower().replace("_", "-"), ("data",))
    assert sent.network
    assert sent.bytes == share * 4e6
    assert sent.seconds == pytest.approx(sent.bytes / 3.125e9)
    time = prediction.time
    assert time.hidden == pytest.approx(time.matrix)
    assert time.network == pytest.approx(sent.seconds - time.matrix)
    assert time.interconnect == 0


def test_a_small_transfer_is_over_before_its_result_is_needed():
    time = predict(Program(transfers("ALL_REDUCE", 2)), layout(2), lambda name: None).time
    assert time.network == 0
    assert time.hidden > 0
