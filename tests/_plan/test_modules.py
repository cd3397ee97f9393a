"""The collectives of compiled programs, read from lines that XLA's compilers for TPU v5e and H100 have written."""

import pytest

from mirrored._plan.modules import Sent, collectives_in

TPU = """
ENTRY %main.1 (a: f32[8]) -> f32[8] {
  %all-reduce.2 = (f32[8,256]{1,0:T(8,128)S(1)}, bf16[8,2]{1,0:T(8,128)S(1)}) all-reduce(%a, %b), channel_id=2
  %fusion.4 = f32[8,256]{1,0} fusion(%a), kind=kOutput, calls=%fused_computation.3
  %all-gather.10 = pred[8,3]{1,0} all-gather(%d), dimensions={0}
  %reduce_scatter.1 = f32[16,128]{1,0:T(8,128)S(1)} reduce-scatter(%e), channel_id=1, replica_groups=mesh['replica'=8] {'replica'}
  %reduce_scatter.2 = f32[16,128]{1,0:T(8,128)S(1)} reduce-scatter(%e), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %reduce_scatter.3 = f32[16,128]{1,0} reduce-scatter(%e), channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}
}
"""

#: An all-reduce that keeps a slice, with the message that moves the slices to their places.
TPU_SCATTER = """
%all-reduce-scatter (input: f32[402432,128]) -> f32[50400,128] {
  %pad = f32[403200,128]{1,0:T(8,128)} pad(%input, %constant.305), padding=0_768x0_0
  %all-reduce.1 = f32[403200,128]{1,0:T(8,128)} all-reduce(%pad), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %slice.1 = f32[50400,128]{1,0:T(8,128)S(1)} dynamic-slice(%all-reduce.1, %multiply.1), dynamic_slice_sizes={50400,128}
}
ENTRY %main.0_spmd (param.1: f32[51511296]) -> f32[50304,128] {
  %fusion = f32[50400,128]{1,0:T(8,128)S(1)} fusion(%param.1), kind=kCustom, calls=%all-reduce-scatter, backend_config={}
  %collective-permute-start = (f32[672,128]{1,0}, f32[672,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%fusion)
  %collective-permute-done = f32[672,128]{1,0:T(8,128)S(1)} collective-permute-done(%collective-permute-start)
}
"""

#: One all-gather, in the fusions that begin it, compute beside it, and end it.
TPU_ASYNC = """
%fused_computation.16 (param_0.36: f32[256,2048]) -> (f32[256,2048], f32[2048,2048]) {
  %all-gather.17 = f32[2048,2048]{1,0:T(8,128)} all-gather(%param_0.36), channel_id=1, replica_groups=mesh['r'=8] {'r'}
  ROOT %custom-call.1 = (f32[256,2048]{1,0}, s32[2]{0}) custom-call(%all-gather.17), custom_call_target="AsyncCollectiveStart"
}
%async_collective_fusion.27 (param_0.39: f32[256,2048], param_1.36: f32[2048,2048]) -> (f32[2048,2048], f32[256,2048]) {
  %convolution.25 = f32[2048,2048]{1,0:T(8,128)S(1)} convolution(%fusion.31, %fusion.30), dim_labels=fb_io->bf
  %all-gather.19 = f32[2048,2048]{1,0:T(8,128)S(1)} all-gather(%param_0.39), channel_id=1, replica_groups=mesh['r'=8] {'r'}
}
%fused_computation.18 (param_0.40: f32[256,2048], param_1.37: f32[2048,2048]) -> f32[2048,2048] {
  %all-gather.21 = f32[2048,2048]{1,0:T(8,128)} all-gather(%param_0.40), channel_id=1, replica_groups=mesh['r'=8] {'r'}
  ROOT %custom-call.3 = f32[2048,2048]{1,0} custom-call(%param_0.40, %all-gather.21), custom_call_target="AsyncCollectiveDone"
}
ENTRY %main.0_spmd (param.5: f32[256,2048]) -> f32[2048,2048] {
  %async-collective-start = (f32[256,2048]{1,0}, s32[2]{0}) fusion(%a), kind=kCustom, calls=%fused_computation.16
  %fusion.27 = (f32[2048,2048]{1,0}, f32[256,2048]{1,0}) fusion(%g), kind=kCustom, calls=%async_collective_fusion.27
  ROOT %async-collective-done = f32[2048,2048]{1,0} fusion(%g), kind=kCustom, calls=%fused_computation.18
}
"""

GPU = """
%fused_psum.clone (param_0: bf16[512]) -> bf16[512] {
  ROOT %psum.14.2 = bf16[512]{0} all-reduce(%param_0), channel_id=1, replica_groups=mesh['r'=8] {'r'}, to_apply=%region_0.0
}
%all-to-all.wrapped (param_1: f32[8,4]) -> f32[8,4] {
  ROOT %all-to-all.1 = f32[8,4]{1,0} all-to-all(%param_1), channel_id=1, dimensions={0}
}
ENTRY %main (a: f32[9]) -> f32[9] {
  %all-reduce-start = f32[21]{0} all-reduce-start(%a), channel_id=1
  %gemm_fusion.1 = bf16[4,4]{1,0} fusion(%b), kind=kCustom, calls=%gemm
  %all-reduce-done = f32[21]{0} all-reduce-done(%all-reduce-start), backend_config={}
  %reduce-scatter-start = ((f32[32,64], s64[32,1]), (f32[4,64], s64[4,1])) reduce-scatter-start(%c, %d), replica_groups=[1,8]<=[8]
  %reduce-scatter-done = (f32[4,64]{1,0}, s64[4,1]{1,0}) reduce-scatter-done(%reduce-scatter-start)
  %all-gather-start = ((f32[1,64]{1,0}), f32[32,64]{1,0}) all-gather-start(%e)
  %fusion-start = ((bf16[512]{0}), bf16[512]{0}) fusion-start(%f), kind=kCustom, calls=%fused_psum.clone
  %cublas.1 = (f32[4,4]{1,0}, s8[99]{0}) custom-call(%g, %h), custom_call_target="__cublas$gemm"
  %fusion-done = bf16[512]{0} fusion-done(%fusion-start)
  %all-gather-done = f32[32,64]{1,0} all-gather-done(%all-gather-start)
  %async-start = ((f32[8,4]{1,0}), f32[8,4]{1,0}) async-start(%i), calls=%all-to-all.wrapped
  %async-done = f32[8,4]{1,0} async-done(%async-start)
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
%other (param: f32[4]) -> f32[4] {
  %all-reduce.2 = f32[2]{0} all-reduce(%param), channel_id=1
}
%outer (param: (s32[], f32[4])) -> (s32[], f32[4]) {
  %conditional.1 = f32[4]{0} conditional(%i, %a, %b), branch_computations={%inner, %other}
  %conditional.2 = f32[4]{0} conditional(%i, %a, %b), true_computation=%other, false_computation=%limit
}
%limit (param: (s32[], f32[4])) -> pred[] {
  %all-reduce.3 = f32[]{0} all-reduce(%param), channel_id=1
}
ENTRY %main (a: f32[9]) -> f32[9] {
  %while.1 = (s32[], f32[4]{0}) while(%tuple), condition=%limit, body=%outer, backend_config={"known_trip_count":{"n":"7"}}
  %call = f32[4]{0} call(%b), to_apply=%inner
}
"""


def test_what_is_in_a_loop_runs_as_often_as_the_loop_and_one_branch_of_a_condition() -> None:
    assert [(sent.num_bytes, sent.times) for sent in collectives_in(TPU_LOOP)] == [(80, 1), (40, 5)]
    down_to_zero = collectives_in(TPU_LOOP.replace("constant(5)", "constant(0)"))
    assert [sent.times for sent in down_to_zero] == [1, 1], "at least once, where no number is known"
    assert [(sent.num_bytes, sent.times) for sent in collectives_in(GPU_LOOPS)] == [(4, 7), (16, 7), (8, 7), (16, 1)]


def test_a_tpu_s_collectives() -> None:
    assert collectives_in(TPU) == [
        Sent("all-reduce", 8 * 256 * 4 + 8 * 2 * 2, False, 1),
        Sent("all-gather", 24, False, 0),
        Sent("reduce-scatter", 8 * 16 * 128 * 4, False, 0),
        Sent("reduce-scatter", 4 * 16 * 128 * 4, False, 0),
        Sent("reduce-scatter", 2 * 16 * 128 * 4, False, 0),
    ]


def test_a_collective_in_a_tpu_s_fusions_counts_once_with_its_kind_and_bytes() -> None:
    scatter = Sent("reduce-scatter", 403200 * 128 * 4, False, 0)
    assert collectives_in(TPU_SCATTER) == [scatter, Sent("collective-permute", 672 * 128 * 4, False, 0)]
    assert collectives_in(TPU_ASYNC) == [Sent("all-gather", 2048 * 2048 * 4, True, 0)]


def test_a_gpu_s_collectives_and_what_runs_beside_them() -> None:
    assert collectives_in(GPU) == [
        Sent("all-reduce", 84, True, 2),
        Sent("reduce-scatter", 32 * 64 * 4 + 32 * 8, False, 1),
        Sent("all-gather", 32 * 64 * 4, True, 1),
        Sent("all-reduce", 1024, True, 1),
        Sent("all-to-all", 128, False, 0),
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
