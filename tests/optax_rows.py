"""Each transformation and wrapper that optax exports, made for a small model: the rows of docs/optax.md."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from optax import contrib

#: Weights and their start: a matrix, so that factored and orthogonal updates have something to do, and a row.
START = {"w": np.cos(np.arange(12, dtype=np.float32)).reshape(4, 3), "b": np.full((1, 3), 0.5, np.float32)}


class Row(NamedTuple):
    """A transformation, and what it is given beside gradients.

    Attributes:
        make: returns the transformation.
        given: names of extra arguments of `apply_gradients`: `value`, `grad`, `value_fn`, `grad_fn`, `obj_fn`.
        moves: whether it changes the weights.
        start: the weights that it trains; those of `lookahead` are a pair of fast and slow values.
    """

    make: Callable[[], Any]
    given: tuple[str, ...] = ()
    moves: bool = True
    start: Any = START


LABELS = {"w": "one", "b": "other"}
ONLY_W = {"w": True, "b": False}
LOSS, SEARCH = ("value",), ("value", "grad", "value_fn")


def down(tx: Any, rate: float = 0.05) -> Any:
    """Make an optimizer of a transformation that scales gradients."""
    return optax.chain(tx, optax.scale(-rate))


def _norm(updates: Any) -> jax.Array:
    return optax.tree.norm(updates)


def _all_matrices(params: Any) -> Any:
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), params)


def _every_second(step: jax.Array, **_: Any) -> jax.Array:
    return step % 2 == 0


#: Optimizers that are made with a learning rate alone: rate -> names.
BY_RATE = {
    0.1: "optimistic_gradient_descent radam scale_by_learning_rate sm3 contrib.schedule_free_sgd",
    0.05: """adabelief adagrad adam adamax adamaxw adan amsgrad fromage lamb nadam nadamw novograd optimistic_adam
        optimistic_adam_v2 yogi contrib.adopt contrib.madgrad contrib.muon contrib.scale_by_madgrad
        contrib.schedule_free_adamw""",
    0.02: "rprop contrib.ademamix",
    0.01: "lion sign_sgd signum contrib.acprop",
    0.002: "contrib.simplified_ademamix",
    50.0: "adadelta",
}
#: Transformations without arguments that scale gradients, and the rates that make optimizers of them.
SCALING = {
    0.05: """centralize identity normalize_by_update_norm scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad
        scale_by_belief scale_by_lbfgs scale_by_lion scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm
        scale_by_param_block_rms scale_by_radam scale_by_rms scale_by_rss scale_by_sign scale_by_sm3 scale_by_trust_ratio
        scale_by_yogi zero_nans contrib.normalize contrib.scale_by_adopt""",
    0.02: "scale_by_stddev contrib.scale_by_ademamix",
    0.01: "contrib.scale_by_acprop",
    0.002: "contrib.scale_by_simplified_ademamix",
    50.0: "scale_by_adadelta",
}


def _named(name: str) -> Any:
    return operator.attrgetter(name)(optax)


ROWS: dict[str, Row] = {
    **{name: Row(lambda name=name, rate=rate: _named(name)(rate)) for rate, names in BY_RATE.items() for name in names.split()},
    **{
        name: Row(lambda name=name, rate=rate: down(_named(name)(), rate))
        for rate, names in SCALING.items()
        for name in names.split()
    },
    "adafactor": Row(lambda: optax.adafactor(0.1, min_dim_size_to_factor=1)),
    "adamw": Row(lambda: optax.adamw(optax.cosine_decay_schedule(0.05, 10))),
    "adaptive_grad_clip": Row(lambda: down(optax.adaptive_grad_clip(0.1))),
    "add_decayed_weights": Row(lambda: down(optax.add_decayed_weights(0.1))),
    "add_noise": Row(lambda: down(optax.add_noise(0.01, 0.5, jax.random.key(0)))),
    "apply_every": Row(lambda: optax.chain(optax.sgd(0.1), optax.apply_every(2))),
    "apply_if_finite": Row(lambda: optax.apply_if_finite(optax.sgd(0.1), 3)),
    "chain": Row(lambda: optax.chain(optax.clip(0.1), optax.adam(0.05))),
    "clip": Row(lambda: down(optax.clip(0.05))),
    "clip_by_block_rms": Row(lambda: down(optax.clip_by_block_rms(0.05), 0.5)),
    "clip_by_global_norm": Row(lambda: down(optax.clip_by_global_norm(0.1), 0.5)),
    "conditionally_mask": Row(lambda: optax.conditionally_mask(optax.sgd(0.1), _every_second)),
    "conditionally_transform": Row(lambda: down(optax.conditionally_transform(optax.clip(0.05), _every_second))),
    "ema": Row(lambda: down(optax.ema(0.9))),
    "flatten": Row(lambda: optax.flatten(optax.adam(0.05))),
    "freeze": Row(lambda: optax.chain(optax.sgd(0.1), optax.freeze({"w": False, "b": True}))),
    "inject_hyperparams": Row(lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.01, 5))),
    "inject_stateful_hyperparams": Row(lambda: optax.inject_stateful_hyperparams(optax.sgd)(learning_rate=0.1)),
    "keep_params_nonnegative": Row(lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative())),
    "lars": Row(lambda: optax.lars(1.0, trust_coefficient=0.1)),
    "lbfgs": Row(optax.lbfgs, SEARCH),
    "lookahead": Row(lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5), start=optax.LookaheadParams(START, START)),
    "masked": Row(lambda: optax.masked(optax.adam(0.05), ONLY_W)),
    "MultiSteps": Row(lambda: optax.MultiSteps(optax.sgd(0.2), 2)),
    "multi_transform": Row(lambda: optax.multi_transform({"one": optax.adam(0.05), "other": optax.sgd(0.1)}, LABELS)),
    "named_chain": Row(lambda: optax.named_chain(("clip", optax.clip(0.1)), ("sgd", optax.sgd(0.1)))),
    "noisy_sgd": Row(lambda: optax.noisy_sgd(0.05, key=jax.random.key(1))),
    "partition": Row(lambda: optax.partition({"one": optax.adam(0.05), "other": optax.set_to_zero()}, LABELS)),
    "polyak_sgd": Row(lambda: optax.polyak_sgd(0.1), LOSS),
    "rmsprop": Row(lambda: optax.rmsprop(0.02, momentum=0.9)),
    "scale": Row(lambda: optax.scale(-0.1)),
    "scale_by_backtracking_linesearch": Row(
        lambda: optax.chain(optax.sgd(0.5), optax.scale_by_backtracking_linesearch(5, store_grad=False)), SEARCH
    ),
    "scale_by_distance_over_gradients": Row(lambda: down(optax.scale_by_distance_over_gradients(reps_rel=0.1), 1.0)),
    "scale_by_factored_rms": Row(lambda: down(optax.scale_by_factored_rms(min_dim_size_to_factor=1))),
    "scale_by_polyak": Row(lambda: down(optax.scale_by_polyak(), 0.1), LOSS),
    "scale_by_rprop": Row(lambda: down(optax.scale_by_rprop(0.02), 1.0)),
    "scale_by_schedule": Row(lambda: optax.scale_by_schedule(lambda step: -0.1 / (1 + step))),
    "scale_by_zoom_linesearch": Row(lambda: optax.chain(optax.sgd(0.5), optax.scale_by_zoom_linesearch(5)), SEARCH),
    "selective_transform": Row(lambda: optax.selective_transform(optax.sgd(0.1), freeze_mask={"w": False, "b": True})),
    "set_to_zero": Row(optax.set_to_zero, moves=False),
    "sgd": Row(lambda: optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "snapshot": Row(lambda: optax.chain(optax.snapshot("norm", _norm), optax.sgd(0.1))),
    "stateless": Row(lambda: optax.stateless(lambda updates, _: jax.tree.map(lambda u: -0.1 * u, updates))),
    "stateless_with_tree_map": Row(lambda: optax.stateless_with_tree_map(lambda update, _: -0.1 * update)),
    "trace": Row(lambda: down(optax.trace(0.9))),
    "with_extra_args_support": Row(lambda: optax.with_extra_args_support(optax.scale(-0.1)), LOSS),
    "contrib.cocob": Row(contrib.cocob),
    "contrib.dadapt_adamw": Row(lambda: contrib.dadapt_adamw(estim_lr0=0.05)),
    "contrib.dog": Row(lambda: contrib.dog(1.0, ("distance", 0.05))),
    "contrib.dowg": Row(lambda: contrib.dowg(init_estim_sq_dist=0.05)),
    "contrib.galore": Row(lambda: contrib.galore(0.05, rank=2, update_proj_gap=2)),
    "contrib.hutchinson_estimator_diag_hessian": Row(
        lambda: down(contrib.hutchinson_estimator_diag_hessian(jax.random.key(2))), ("obj_fn",)
    ),
    "contrib.mechanize": Row(lambda: contrib.mechanize(optax.sgd(0.1), s_init=0.5)),
    "contrib.momo": Row(lambda: contrib.momo(0.1), LOSS),
    "contrib.momo_adam": Row(lambda: contrib.momo_adam(0.05), LOSS),
    "contrib.prodigy": Row(lambda: contrib.prodigy(estim_lr0=0.05)),
    "contrib.reduce_on_plateau": Row(lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(0.5, patience=1)), LOSS),
    "contrib.sam": Row(lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)),
    "contrib.sam, opaque": Row(lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.05), 2, opaque_mode=True), ("grad_fn",)),
    "contrib.scale_by_cocob": Row(contrib.scale_by_cocob),
    "contrib.scale_by_galore": Row(lambda: down(contrib.scale_by_galore(rank=2, update_proj_gap=2))),
    "contrib.scale_by_muon": Row(lambda: down(contrib.scale_by_muon(weight_dimension_numbers=_all_matrices))),
    "contrib.schedule_free": Row(lambda: contrib.schedule_free(optax.sgd(0.1), 0.1)),
    "contrib.sophia": Row(lambda: contrib.sophia(0.02, update_interval=2), ("obj_fn",)),
    "contrib.split_real_and_imaginary": Row(lambda: contrib.split_real_and_imaginary(optax.adam(0.05))),
}  # fmt: skip
#: Exported, but refused: they take the gradient of each example.
OF_EXAMPLES = ("contrib.differentially_private_aggregate", "contrib.dpsgd")
#: Exported, but refused: their state has another structure after an update.
CHANGE_STRUCTURE = {
    "monitor": lambda: optax.monitor({"norm": _norm}),
    "measure_with_ema": lambda: optax.monitor({"norm": optax.measure_with_ema(_norm, 0.9)}),
}
#: What optax exports besides: schedules, losses, functions of arrays, types.
NO_TRANSFORMATIONS = frozenset(
    """
    apply_updates bias_correction constant_schedule convex_kl_divergence cosine_decay_schedule cosine_distance
    cosine_onecycle_schedule cosine_similarity ctc_loss ctc_loss_with_forward_probs exponential_decay generalized_kl_divergence
    global_norm hinge_loss huber_loss incremental_update init_empty_state join_schedules kl_divergence l2_loss
    linear_onecycle_schedule linear_schedule log_cosh matrix_inverse_pth_root microbatch multi_normal nnls ntxent
    per_example_global_norm_clip per_example_layer_norm_clip periodic_update piecewise_constant_schedule
    piecewise_interpolate_schedule polynomial_schedule power_iteration safe_increment safe_int32_increment safe_norm
    safe_root_mean_squares safe_softmax_cross_entropy scale_gradient sgdr_schedule sigmoid_binary_cross_entropy
    sigmoid_focal_loss skip_large_updates skip_not_finite smooth_labels softmax_cross_entropy
    softmax_cross_entropy_with_integer_labels squared_error tree_map_params update_infinity_moment update_moment
    update_moment_per_elem_norm value_and_grad_from_state warmup_constant_schedule warmup_cosine_decay_schedule
    warmup_exponential_decay_schedule contrib.schedule_free_eval_params
    """.split()  # noqa: SIM905
)


def exported() -> set[str]:
    """Return the names of all functions and wrappers that optax exports, those of `optax.contrib` with `contrib.`."""
    found = {prefix + name for prefix, module in (("", optax), ("contrib.", contrib)) for name in dir(module) if name[0] != "_"
             and callable(getattr(module, name)) and not isinstance(getattr(module, name), type)}  # fmt: skip
    aliases = {"MaskOrFn", "OptState", "Params", "ScalarOrSchedule", "Schedule", "Updates"}
    return (found | {"MultiSteps"}) - aliases - NO_TRANSFORMATIONS
