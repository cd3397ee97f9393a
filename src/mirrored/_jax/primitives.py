"""The names of the JAX primitives that the mirror proof knows, in all tried versions of JAX.

`tests/_jax/test_primitives.py` lists those that only some versions have, and fails when JAX adds or removes a name.
"""

from __future__ import annotations

_ELEMENTWISE_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg nextafter not one_minus_square or polygamma
population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
sin sinh sqrt square sub tan tanh xor zeta
"""
#: Primitives that compute each element of their one result from scalars and from the operands' elements at the same place;
#: their parameters do not depend on the shape.
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
#: Pure functions of their operands, with any parameters; the proof also checks a jaxpr among the parameters.
PURE = ELEMENTWISE | frozenset(_OTHER_PURE_NAMES.split())
#: Primitives that run the only jaxpr among their parameters once, with all operands in order.
CALLS = frozenset({
    "closed_call", "composite", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "eval_jaxpr", "jit", "linear_call",
    "remat2", "remat_opt",
})  # fmt: skip
#: Calls that do nothing else, and may be inlined.
INLINE_CALLS = frozenset({"closed_call", "eval_jaxpr", "jit"})
#: Calls that compute something again when derivatives are taken.
AGAIN = frozenset({"remat2"})
#: Calls whose parameters, except the jaxpr, matter only to derivatives.
CUSTOM_DERIVATIVE = frozenset({"custom_jvp_call", "custom_vjp_call"})
#: Redundant parameters: the jaxpr, or the shapes of the loop, say the same; what else is in them has no meaning.
SAID_TWICE = frozenset({("reduce", "computation"), ("scan", "ft_in"), ("scan", "ft_out")})
#: Primitives that run jaxprs in other ways, which `jaxprs` knows.
CONTROL_FLOW = frozenset({"cond", "custom_linear_solve", "scan", "while"})
#: Primitives that run a jaxpr several times.
LOOPS = frozenset({"scan", "while"})
#: Sums, concatenations and choices of their operands: one operand's property holds only for a part of the result.
ADDITIONS = frozenset({
    "add", "complex", "concatenate", "dynamic_update_slice", "pad", "scatter", "scatter-add", "select_n", "stack", "sub",
})  # fmt: skip
#: The sums that add up the derivatives of a value's several uses.
DERIVATIVE_SUMS = frozenset({"add_any"})
#: Primitives whose result has the operand's numbers, perhaps in another shape or type.
SPREADS = frozenset({"convert_element_type", "copy", "name", "reshape", "squeeze", "stop_gradient"})
#: Primitives that add to their first operand, or subtract from it.
ADD_TO_FIRST = frozenset({"add", "scatter-add", "scatter_add", "sub"})
#: Additions of two operands, in any order.
COMMUTATIVE = frozenset({"add"})
#: Primitives that choose among all operands but the first.
SELECTS = frozenset({"select_n"})
#: Powers with an integer exponent `y`.
POWERS = frozenset({"integer_pow"})
#: Primitives that return their operands.
ONE_TO_ONE = frozenset({"optimization_barrier"})
#: Collectives that give every replica the same result if they run over the whole axis.
MAKE_SAME = frozenset({"psum", "pmax", "pmin", "all_gather", "pbroadcast", "psum_invariant", "all_gather_invariant"})
#: Collectives that add up, and those that compare.
SUMS = frozenset({"psum", "psum_invariant"})
COMPARE = frozenset({"pmax", "pmin"})
#: Primitives that name the replica axis, but do not communicate. All others that name it are collectives.
LOCAL = frozenset({"axis_index", "pvary"})
#: Primitives that call a user's function on the host. `debug_print`, a primitive of its own since jax 0.11, does not.
HOST_CALLBACKS = frozenset({"buffer_callback", "debug_callback", "io_callback", "pure_callback"})
#: Primitives whose every run the host sees.
HOST_EFFECTS = HOST_CALLBACKS | {"debug_print"}
#: Primitives that JAX keeps in order on one device only.
PRINTS = frozenset({"debug_callback", "debug_print"})
#: Primitives that run a function on the devices of a mesh.
DEVICE_MAPS = frozenset({"shard_map"})
#: Primitives that make random numbers from a key, as the key's type says.
RANDOM = frozenset({"random_bits", "random_fold_in", "random_gamma", "random_split"})
#: Primitives that make random numbers as the device does.
DEVICE_RANDOM = frozenset({"rng_bit_generator"})
#: Primitives that draw random numbers.
DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})
#: Primitives whose results have their operands' axes, in the same places.
KEEP_AXES = ELEMENTWISE | {
    "bitcast_convert_type", "concatenate", "cumsum", "dynamic_slice", "optimization_barrier", "pad", "rev", "slice", "sort",
}  # fmt: skip
TRANSPOSES = frozenset({"transpose"})
RESHAPES = frozenset({"reshape", "squeeze"})
#: Linear functions that do not round: they move, repeat or negate the operands' numbers.
MOVES = frozenset({
    "broadcast_in_dim", "concatenate", "copy", "mirrored_mark", "neg", "reshape", "rev", "slice", "split", "squeeze", "stack",
    "transpose", "unstack",
})  # fmt: skip
#: Functions that are linear in both operands together.
ADDITIVE = frozenset({"add", "sub"})
#: Functions that are linear in the first operand, if the other is zero.
PADS = frozenset({"pad"})
#: Functions that are linear in each of two operands.
BILINEAR = frozenset({"dot_general", "mul"})
#: Sums along axes of their operands; a sum over the replicas is one along another axis.
DOT_PRODUCTS = frozenset({"dot_general"})
CONVOLUTIONS = frozenset({"conv_general_dilated"})
SCATTER_SUMS = frozenset({"scatter-add", "scatter_add"})
AXIS_SUMS = frozenset({"reduce_sum"})
#: Functions that are linear in the first operand.
DIVISIONS = frozenset({"div"})
#: Conversions to another type.
CONVERSIONS = frozenset({"convert_element_type"})
#: Primitives that fill an array with another array's numbers.
BROADCASTS = frozenset({"broadcast_in_dim"})
FILLS = BROADCASTS | {"iota"}
#: Pure, without a jaxpr or the name of a mesh's axis among their parameters: most equations of a step, and our marks.
SIMPLE = KEEP_AXES | TRANSPOSES | RESHAPES | DOT_PRODUCTS | AXIS_SUMS | FILLS | {"mirrored_mark"}
