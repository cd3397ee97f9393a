"""The collectives of compiled programs, read from lines that XLA's compilers for TPU v5e and H100 have written."""

import pytest

from mirrored._plan.modules import Sent, collectives_in

TPU = """
%fused_computation.3 (param: f32[8,128]) -> f32[8,128] {
  %all-reduce.9 = f32[8,128]{1,0:T(8,128)} all-reduce(%param), replica_groups={}
}
ENTRY %main.1 (a: f32[8]) -> f32[8] {
  %all-reduce.2 = (f32[8,256]{1,0:T(8,128)S(1)}, bf16[8,2]{1,0:T(8,128)S(1)}) all-reduce(%a, %b), channel_id=2
  %fusion.4 = f32[8,256]{1,0} fusion(%a), kind=kOutput, calls=%fused_computation.3
  %async-collective-done.1 = f32[100]{0} fusion(%c), kind=kCustom, calls=%async_collective_fusion.2
  %all-gather.10 = pred[8,3]{1,0} all-gather(%d), dimensions={0}
  %reduce_scatter.1 = f32[16,128]{1,0:T(8,128)S(1)} reduce-scatter(%e), channel_id=1, replica_groups=mesh['replica'=8] {'replica'}
  %reduce_scatter.2 = f32[16,128]{1,0:T(8,128)S(1)} reduce-scatter(%e), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %reduce_scatter.3 = f32[16,128]{1,0} reduce-scatter(%e), channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}
}
"""

GPU = """
ENTRY %main (a: f32[9]) -> f32[9] {
  %all-reduce-start = ((f32[21]{0}), f32[21]{0}) all-reduce-start(%a), channel_id=1
  %gemm_fusion.1 = bf16[4,4]{1,0} fusion(%b), kind=kCustom, calls=%gemm
  %all-reduce-done = f32[21]{0} all-reduce-done(%all-reduce-start), backend_config={}
  %reduce-scatter-start = ((f32[32,64]{1,0}, s64[32,1]{1,0}), (f32[1,64]{1,0}, s64[1,1]{1,0})) reduce-scatter-start(%c, %d)
  %reduce-scatter-done = (f32[1,64]{1,0}, s64[1,1]{1,0}) reduce-scatter-done(%reduce-scatter-start)
  %all-gather-start = ((f32[1,64]{1,0}), (f32[32,64]{1,0})) all-gather-start(%e)
  %fusion-start = ((bf16[512]{0}), bf16[512]{0}) fusion-start(%f), kind=kCustom, backend_config={"kind":"__triton_collective"}
  %cublas.1 = (f32[4,4]{1,0}, s8[99]{0}) custom-call(%g, %h), custom_call_target="__cublas$gemm"
  %fusion-done = bf16[512]{0} fusion-done(%fusion-start)
}
"""

NO_PRODUCTS = """
ENTRY %main (a: f32[9]) -> f32[9] {
  %all-reduce.1 = f32[9]{0} all-reduce(%a), channel_id=1
  %convert_fusion.1 = f32[9]{0} fusion(%b), kind=kLoop, calls=%fused_convert, metadata={op_name="jit(conv)/gemm/mul"}
  %custom.1 = f32[9]{0} custom-call(%b), custom_call_target="TopK", metadata={source_file="/convolution(s)/my gemm.py"}
}
"""

TPU_LOOP = """
%region_5.7 (param.11: (s32[], f32[5])) -> pred[] {
  %constant.21 = s32[]{:T(128)} constant(5)
  ROOT %lt.5 = pred[]{:T(512)} compare(%get-tuple-element.116, %constant.21), direction=LT
}
%region_0.6 (param.1: (s32[], f32[5])) -> (s32[], f32[5]) {
  %constant.3 = s32[]{:T(128)} constant(90)
  %all-reduce.2 = f32[10]{0:T(128)} all-reduce(%a), channel_id=2
}
ENTRY %main.8 (param.5: f32[256,10]) -> f32[5] {
  %all-reduce.3 = f32[20]{0:T(128)} all-reduce(%b), channel_id=3
  %while.17 = (s32[]{:T(128)}, f32[5]{0:T(128)}) while(%tuple.35), condition=%region_5.7, body=%region_0.6
}
"""

GPU_LOOPS = """
%inner (param: f32[4]) -> f32[4] {
  %all-reduce.1 = f32[4]{0} all-reduce(%param), channel_id=1
}
%outer (param: (s32[], f32[4])) -> (s32[], f32[4]) {
  %conditional.1 = f32[4]{0} conditional(%i, %a, %b), branch_computations={%inner, %other}
}
ENTRY %main (a: f32[9]) -> f32[9] {
  %while.1 = (s32[], f32[4]{0}) while(%tuple), condition=%limit, body=%outer, backend_config={"known_trip_count":{"n":"7"}}
}
"""


def test_what_is_in_a_loop_runs_as_often_as_the_loop() -> None:
    assert [(sent.num_bytes, sent.times) for sent in collectives_in(TPU_LOOP)] == [(40, 5), (80, 1)]
    assert [(sent.num_bytes, sent.times) for sent in collectives_in(GPU_LOOPS)] == [(16, 7)]


def test_a_tpu_s_collectives() -> None:
    assert collectives_in(TPU) == [
        Sent("all-reduce", 8 * 256 * 4 + 8 * 2 * 2, False, 1),
        Sent("all-reduce", 400, True, 0),
        Sent("all-gather", 24, False, 0),
        Sent("reduce-scatter", 8 * 16 * 128 * 4, False, 0),
        Sent("reduce-scatter", 4 * 16 * 128 * 4, False, 0),
        Sent("reduce-scatter", 2 * 16 * 128 * 4, False, 0),
    ]


def test_a_gpu_s_collectives_and_what_runs_beside_them() -> None:
    assert collectives_in(GPU) == [
        Sent("all-reduce", 84, True, 2),
        Sent("reduce-scatter", 32 * 64 * 4 + 32 * 8, False, 1),
        Sent("all-gather", 32 * 64 * 4, True, 1),
        Sent("all-reduce", 1024, True, 1),
    ]


def test_what_only_has_the_name_of_a_product_is_none() -> None:
    assert collectives_in(NO_PRODUCTS) == [Sent("all-reduce", 36, False, 0)]
    products = ("convolution(%b)", 'custom-call(%b), custom_call_target="__cudnn$convForward"', "dot(%b, %c)")
    for product in products:
        [sent] = collectives_in(NO_PRODUCTS.replace("custom-call(%b)", f"{product}, metadata={{}}"))
        assert sent.later == 1, product


@pytest.mark.parametrize("text", ["", "HloModule jit_f\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n"])
def test_a_program_that_sends_nothing(text: str) -> None:
    assert collectives_in(text) == []
