"""The names of JAX's primitives that the mirror proof knows, over all tried versions of JAX.

`tests/_jax/test_primitives.py` says which of them only some versions have, and fails when a name has come or gone.
"""

from __future__ import annotations

_ELEMENTWISE_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg nextafter not one_minus_square or polygamma
population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
sin sinh sqrt square sub tan tanh xor zeta
"""
#: Compute each element of the one result from the elements of the operands at the same place, and from scalars; their
#: parameters do not depend on the shape.
ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
_OTHER_PURE_NAMES = """
after_all approx_top_k argmax argmin bitcast_convert_type broadcast_in_dim cholesky cholesky_update concatenate
conv_general_dilated create_token cumlogsumexp cummax cummin cumprod cumsum custom_linear_solve device_put dot_general
dynamic_slice dynamic_update_slice eig eigh empty2 eq_to fft from_edtype gather geqp3 geqrf hessenberg householder_product iota
iota_2x32_shape layout_constraint le_to lt_to lu lu_pivots_to_permutation mulhi name optimization_barrier ormqr pad philox2x32
philox4x32 platform_index polynomial pvary qr ragged_dot_general random_bits random_clone random_fold_in random_gamma
random_seed random_split random_unwrap random_wrap reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor regularized_incomplete_beta reshape reshard rev
rng_bit_generator scaled_dot scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub schur select_and_gather_add
select_and_scatter select_and_scatter_add sharding_constraint slice sort split squeeze stack stop_gradient svd
symmetric_product threefry2x32 threefry4x32 tie tile to_edtype top_k transpose triangular_solve tridiagonal tridiagonal_solve
unstack with_memory_space_constraint
"""
#: Pure functions of their operands, whatever their parameters; a jaxpr among the parameters is checked too.
PURE = ELEMENTWISE | frozenset(_OTHER_PURE_NAMES.split())
#: Run the only jaxpr among their parameters once, with all operands in order.
CALLS = frozenset({
    "closed_call", "composite", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "eval_jaxpr", "jit", "linear_call",
    "remat2", "remat_opt",
})  # fmt: skip
#: Calls that mean nothing beyond that, and may be inlined.
INLINE_CALLS = frozenset({"closed_call", "eval_jaxpr", "jit"})
#: Calls that compute something again, when derivatives are taken.
AGAIN = frozenset({"remat2"})
#: Calls whose parameters, but for the jaxpr, matter to derivatives only.
CUSTOM_DERIVATIVE = frozenset({"custom_jvp_call", "custom_vjp_call"})
#: Parameters that are functions, which the primitive also has as jaxprs.
SAID_TWICE = frozenset({("reduce", "computation")})
#: Run jaxprs in other ways, which `jaxprs` knows.
CONTROL_FLOW = frozenset({"cond", "custom_linear_solve", "scan", "while"})
#: Run a jaxpr several times.
LOOPS = frozenset({"scan", "while"})
#: Add their operands up, put them side by side, or choose among them: a property of one holds for a part of the result only.
ADDITIONS = frozenset({
    "add", "complex", "concatenate", "dynamic_update_slice", "pad", "scatter", "scatter-add", "select_n", "stack", "sub",
})  # fmt: skip
#: Add up the derivatives of several uses of a value.
DERIVATIVE_SUMS = frozenset({"add_any"})
#: Have the numbers of their operand, maybe in another shape or type.
SPREADS = frozenset({"convert_element_type", "copy", "reshape", "squeeze"})
#: Add to their first operand, or subtract from it.
ADD_TO_FIRST = frozenset({"add", "scatter-add", "scatter_add", "sub"})
#: Add two operands, in any order.
COMMUTATIVE = frozenset({"add"})
#: Choose among their operands, but for the first.
SELECTS = frozenset({"select_n"})
#: Raise to the integer power `y`.
POWERS = frozenset({"integer_pow"})
#: Return their operands.
ONE_TO_ONE = frozenset({"optimization_barrier"})
#: Collectives with the same result on every replica, when they run over the whole axis.
MAKE_SAME = frozenset({"psum", "pmax", "pmin", "all_gather", "pbroadcast", "psum_invariant", "all_gather_invariant"})
#: Collectives that add up.
SUMS = frozenset({"psum", "psum_invariant"})
#: Name the replica axis, but reach no other replica. Whatever else names it is a collective.
LOCAL = frozenset({"axis_index", "pvary"})
#: Call a user's function on the host. `debug_print`, a primitive of its own since jax 0.11, calls none.
HOST_CALLBACKS = frozenset({"buffer_callback", "debug_callback", "io_callback", "pure_callback"})
#: Seen on the host as often as they run.
HOST_EFFECTS = HOST_CALLBACKS | {"debug_print"}
#: Make random numbers of a key, in a way that the key's type says.
RANDOM = frozenset({"random_bits", "random_fold_in", "random_gamma", "random_split"})
#: The same in a way of the device's.
DEVICE_RANDOM = frozenset({"rng_bit_generator"})
#: Draw random numbers.
DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})
#: Have the axes of their operands, each where it was.
KEEP_AXES = ELEMENTWISE | {
    "bitcast_convert_type", "concatenate", "cumsum", "dynamic_slice", "optimization_barrier", "pad", "rev", "slice", "sort",
}  # fmt: skip
TRANSPOSES = frozenset({"transpose"})
RESHAPES = frozenset({"reshape", "squeeze"})
#: Linear in all their operands, and as exact as these.
MOVES = frozenset({
    "broadcast_in_dim", "concatenate", "copy", "mirrored_mark", "neg", "reshape", "rev", "slice", "split", "squeeze", "stack",
    "transpose", "unstack",
})  # fmt: skip
#: Linear in both operands together.
ADDITIVE = frozenset({"add", "sub"})
#: Linear in the first operand, if the other is zero.
PADS = frozenset({"pad"})
#: Linear in each of two operands.
BILINEAR = frozenset({"dot_general", "mul"})
#: Add up along axes of their operands, as a sum over the replicas adds up along another one.
DOT_PRODUCTS = frozenset({"dot_general"})
CONVOLUTIONS = frozenset({"conv_general_dilated"})
SCATTER_SUMS = frozenset({"scatter-add", "scatter_add"})
AXIS_SUMS = frozenset({"reduce_sum"})
#: Linear in the first operand.
DIVISIONS = frozenset({"div"})
#: Show an array in another type.
CONVERSIONS = frozenset({"convert_element_type"})
#: Fill an array with the numbers of another one; `iota` counts.
BROADCASTS = frozenset({"broadcast_in_dim"})
FILLS = BROADCASTS | {"iota"}
