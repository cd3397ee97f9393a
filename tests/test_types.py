"""What type checkers say of users' programs: pyright and mypy accept what is right, and point at what is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from parameters import nightly

_BIN = Path(sys.executable).parent

_BEGIN = """
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored as mr

strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    w = mr.Variable(np.zeros((3, 1)), name="w")
    seen = mr.Variable(0, synchronization="on_read", aggregation="sum")
    params = mr.Variable({"w": np.zeros(3)})
    optimizer = mr.Optimizer(optax.adam(0.1), [w])
"""

RIGHT = """
def train_step(x: jax.Array, y: jax.Array) -> jax.Array:
    def loss() -> jax.Array:
        return mr.losses.compute_average_loss(jnp.sum((x @ w - y) ** 2, axis=-1))

    value, gradients = mr.value_and_grad(loss, [w])()
    assert_type(value, jax.Array)
    optimizer.apply_gradients(gradients)
    seen.assign_add(x.shape[0])
    ctx = mr.get_replica_context()
    assert_type(ctx.all_gather(y, axis=0), jax.Array)
    return ctx.all_reduce("sum", value)


def eval_step(x: jax.Array) -> None:
    seen.assign_add(x.shape[0])


@mr.function
def train(batch: tuple[mr.PerReplica, mr.PerReplica], *, times: int = 1) -> jax.Array:
    return strategy.reduce("sum", strategy.run(train_step, args=batch))


def two_losses(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return x @ w, {"x": x}


x = np.ones((256, 3), "float32")
batches = strategy.distribute_dataset(strategy.make_numpy_dataset((x, x)).shuffle(seed=0).batch(32))
for batch in batches:
    loss = strategy.reduce("sum", strategy.run(train_step, args=batch))
    print(float(loss))
    assert_type(train(batch, times=2), jax.Array)
    print(strategy.gather(batch[0], axis=0).shape)
assert_type(strategy.run(eval_step, args=(x,)), None)
assert_type(strategy.gather(x, axis=0), jax.Array)
assert_type(mr.value_and_grad(two_losses, [w], has_aux=True)(jnp.ones(3))[0][0], jax.Array)
mr.grad(two_losses, [w], has_aux=True)(x=jnp.ones(3))
mr.MirroredStrategy(num_replicas=4, schedule="one_by_one")
mr.CommunicationOptions(implementation="nccl")
assert_type(strategy.reduce("mean", w), jax.Array)
assert_type(w, mr.Variable)
assert_type(w + 1, jax.Array)
assert_type(w @ x, jax.Array)
assert_type(jnp.ones(3) @ w, jax.Array)
assert_type(w[0], jax.Array)
assert_type(w.value, jax.Array)
assert_type(w.assign(3), mr.Variable)
print(jnp.sum(w), float(w), w.T.shape, w.at[0].set(1), w.numpy().tolist(), params.value, jax.tree.map(jnp.sum, params))
"""

#: Each is wrong.
WRONG = """
mr.Variable(1.0, nam="w")
mr.Variable(1.0, aggregation="summ")
mr.Variable()
w.asign(3)
strategy.scop()
strategy.run(3)
strategy.reduce("summ", w)
mr.get_replica_context().all_reduce("avg", w)
optimizer.apply_gradient([w])
mr.InputOptions(auto_shard_policy="files")
mr.MirroredStrategy(num_replicas=4, schedule="in_turn")
mr.CommunicationOptions(implementation="tcp")
mr.function(lambda x: x)(1, 2)
mr.grad(lambda x: w[0] * x, [w])(1, 2)
mr.value_and_grad(lambda x: w[0] * x, [w])(1)[0].values
"""


_MYPY = "mypy", "--ignore-missing-imports"
_PYRIGHT = "basedpyright", "--level=error", "--pythonpath", sys.executable


@pytest.mark.slow
@pytest.mark.parametrize("command", [_PYRIGHT, *nightly((_MYPY,))], ids=["pyright", "mypy"])
def test_a_right_program_is_accepted_and_each_wrong_line_is_found(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    right, wrong = _BEGIN + RIGHT, WRONG.strip()
    (tmp_path / "program.py").write_text(right + wrong)
    options = {"cwd": tmp_path, "env": {**os.environ, "MYPY_CACHE_DIR": str(tmp_path / "cache")}}
    said = subprocess.run([_BIN / command[0], *command[1:], "program.py"], **options, capture_output=True, text=True).stdout
    found = sorted({int(line) for line in re.findall(r"program\.py:(\d+)(?::\d+)?:? (?:- )?error", said)})
    first = right.count("\n") + 1
    assert found == list(range(first, first + len(wrong.splitlines()))), said
