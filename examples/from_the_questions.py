"""Every example of the four questions this project started from, ported, with what happens here.

    python examples/from_the_questions.py

Question 0: why does MirroredStrategy halve the second dimension?     (it does not; here shapes are whole)
Question 1: how can MirroredStrategy be used without Keras?           (a loop that equals one device)
Question 2: the page of MultiWorkerMirroredStrategy                   (the numbers of `reduce`)
Question 3: why do the copies of a variable differ, all but one zero? (here they cannot)
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored as mr


def question_0_shapes(strategy: mr.Strategy) -> dict[str, Any]:
    """Return the shapes that a user sees for a (4, 8) array, and the message for treating them as one array."""
    inputs = jnp.ones((4, 8))

    def identity(x: jax.Array) -> jax.Array:
        return x

    @mr.function
    def distributed_function(x: Any) -> Any:
        return strategy.run(identity, args=(x,))

    whole = distributed_function(inputs)  # every replica has all of it, and returns all of it
    [batch] = strategy.distribute_dataset([np.ones((4 * strategy.num_replicas_in_sync, 8), "float32")])
    split = distributed_function(batch)  # each replica has its rows
    try:
        split + 1
        message = ""
    except mr.PerReplicaError as error:
        message = str(error)
    return {
        "without a strategy": identity(inputs).shape,
        "run on an array": whole.shape,
        "run on a distributed batch, per replica": split.shape,
        "gathered": strategy.gather(split, axis=0).shape,
        "misread": message,
    }


def question_1_training(strategy: mr.Strategy, is_distributed: bool, num_steps: int = 20) -> tuple[list[float], np.ndarray]:
    """Train the linear model of the question; return the losses and the final weights.

    With `is_distributed` each replica gets its rows of the 64, and the loss is the sum over the rows divided
    by the global batch size. Without, as the question has it: every replica gets all rows, the losses are
    means and are added up.
    """
    generator = np.random.default_rng(0)
    images = generator.normal(size=(64, 784)).astype("float32")
    labels = np.eye(10, dtype="float32")[generator.integers(0, 10, size=64)]
    with strategy.scope():
        W = mr.Variable(0.05 * generator.normal(size=(784, 10)), dtype="float32", name="weights")
        b = mr.Variable(np.zeros((10,), "float32"), name="biases")
    optimizer = mr.Optimizer(optax.sgd(0.01), [W, b])  # outside the scope: the state goes where the variables are

    def loss_fn(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        per_example = optax.softmax_cross_entropy(y_pred, y_true)
        return per_example if is_distributed else jnp.mean(per_example)

    def train_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        def forward() -> jax.Array:
            logits = jnp.matmul(images, W) + b
            return loss_fn(labels, logits)

        loss, gradients = mr.value_and_grad(forward, [W, b])()
        optimizer.apply_gradients(zip(gradients, [W, b], strict=True))
        return loss

    @mr.function
    def distributed_train_step(images: Any, labels: Any) -> jax.Array:
        per_replica_losses = strategy.run(train_step, args=(images, labels))
        return strategy.reduce(mr.ReduceOp.SUM, per_replica_losses, axis=None)

    batch = (images, labels)
    if is_distributed:
        [batch] = strategy.distribute_dataset([batch])
    losses = [float(distributed_train_step(*batch)) for _ in range(num_steps)]
    return losses, W.numpy()


def question_2_reduce(strategy: mr.Strategy) -> dict[str, Any]:
    """Return what the page says of `reduce` on two replicas, under its TensorFlow 2.0 names."""
    rows = {"full": [[0, 1, 2, 3], [4, 5, 6, 7]], "partial": [[0, 1, 2, 3], [4, 5]]}
    full, partial = (
        strategy.distribute_values_from_function(lambda ctx, r=r: np.array(r[ctx.replica_id_in_sync_group], "float32"))
        for r in rows.values()
    )
    try:
        strategy.reduce(mr.ReduceOp.SUM, partial, axis=None)
        message = ""
    except mr.UnevenReplicasError as error:
        message = str(error)
    return {
        "sum": strategy.reduce(mr.ReduceOp.SUM, full, axis=None).tolist(),
        "sum over the batch": float(strategy.reduce(mr.ReduceOp.SUM, full, axis=0)),
        "mean of the partial batch": float(strategy.reduce(mr.ReduceOp.MEAN, partial, axis=0)),
        "partial without an axis": message,
    }


def question_2_dataset(strategy: mr.Strategy) -> list[int]:
    """Return the rows that each step sees, summed, from a dataset of eight rows in global batches of four."""
    dataset = strategy.make_numpy_dataset(np.arange(8)).batch(4)
    return [int(strategy.reduce("sum", strategy.run(jnp.sum, args=(x,)))) for x in strategy.distribute_dataset(dataset)]


def question_3_initialize(strategy: mr.Strategy) -> tuple[str, list[float]]:
    """Return why example 1 is refused, and the copies after the way it is written here."""
    with strategy.scope():
        mirrored_var = mr.Variable(jnp.zeros([1]), name="mirrored_var")

    def initialize_var(var: mr.Variable) -> None:
        if mr.get_replica_context().replica_id_in_sync_group == 0:
            var.assign(jnp.array([1.0]))

    try:
        strategy.run(initialize_var, args=(mirrored_var,))
        message = ""
    except mr.OneProgramError as error:
        message = str(error)
    mirrored_var.assign(jnp.array([1.0]))  # outside a step: all copies
    return message, [float(copy[0]) for copy in strategy.local_results(mirrored_var)]


def question_3_train(strategy: mr.Strategy, is_aggregated: bool) -> tuple[str, list[float]]:
    """Return the error and the copies after one step of example 2 (not aggregated) or 3 (aggregated)."""
    with strategy.scope():
        mirrored_var = mr.Variable(jnp.ones([1]), name="mirrored_var")
    data = strategy.distribute_values_from_function(lambda ctx: np.float32(1 + ctx.replica_id_in_sync_group))

    def train_step(data: jax.Array) -> None:
        gradients = mr.grad(lambda: jnp.sum(mirrored_var * data), mirrored_var)()
        if is_aggregated:
            gradients = strategy.reduce(mr.ReduceOp.MEAN, gradients, axis=None)
        mirrored_var.assign_sub(gradients)

    try:
        strategy.run(train_step, args=(data,))
        message = ""
    except mr.ReplicasDivergeError as error:
        message = str(error)
    return message, [float(copy[0]) for copy in strategy.local_results(mirrored_var)]


def main() -> None:
    """Show all of them on two replicas."""
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    one = mr.OneDeviceStrategy("cpu:0")

    print("Question 0. Shapes stay whole, and a PerReplica that is taken for one array says what to do:")
    for what, seen in question_0_shapes(strategy).items():
        print(f"  {what}: {seen}")

    print("\nQuestion 1. With the data distributed, two replicas train like one device:")
    losses, weights = question_1_training(strategy, is_distributed=True)
    losses_of_one, weights_of_one = question_1_training(one, is_distributed=True)
    print(f"  last loss {losses[-1]:.6f}, on one device {losses_of_one[-1]:.6f}")
    print(f"  largest difference of the weights {np.abs(weights - weights_of_one).max():.1e}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, _ = question_1_training(strategy, is_distributed=False)
    print(f"  as written, the first loss is {losses[0] / losses_of_one[0]:.2f} times too large, and this is said:")
    print(f"  {caught[0].category.__name__}: {caught[0].message}")

    print("\nQuestion 2. The numbers of the page:")
    for what, seen in question_2_reduce(strategy).items():
        print(f"  {what}: {seen}")
    print(f"  sums of the global batches: {question_2_dataset(strategy)}")

    print("\nQuestion 3. The copies cannot differ:")
    for name, (message, copies) in {
        "example 1": question_3_initialize(strategy),
        "example 2": question_3_train(strategy, is_aggregated=False),
        "example 3": question_3_train(strategy, is_aggregated=True),
    }.items():
        print(f"  {name}: copies {copies}{'; refused: ' + message if message else ''}")


if __name__ == "__main__":
    main()
