"""The step with TensorFlow's MirroredStrategy: one `tf.function`, Adam by hand on each replica (no Keras in between)."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import _peers
from _workloads import LEARNING_RATE, WORKLOADS

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def _linear(params: Any, x: Any) -> Any:
    return tf.matmul(x, params["w"]) + params["b"]


def _mlp(params: Any, x: Any) -> Any:
    for i in range(2):
        x = tf.nn.relu(tf.matmul(x, params[f"w{i}"]) + params[f"b{i}"])
    return tf.matmul(x, params["w2"]) + params["b2"]


def _conv(params: Any, x: Any) -> Any:
    for i, stride in enumerate((1, 2, 2)):
        x = tf.nn.relu(tf.nn.conv2d(x, params[f"w{i}"], stride, "SAME") + params[f"b{i}"])
    return tf.matmul(tf.reduce_mean(x, (1, 2)), params["w"]) + params["b"]


LOGITS = {"W1": _linear, "W2": _mlp, "W3": _conv}


def main(name: str, num_replicas: int) -> None:
    workload = WORKLOADS[name]
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
    with strategy.scope():
        params = {key: tf.Variable(array, name=key) for key, array in workload.parameters().items()}
        first, second = ([tf.Variable(tf.zeros_like(p)) for p in params.values()] for _ in range(2))
        power1, power2 = tf.Variable(BETA1), tf.Variable(BETA2)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, LOGITS[name](params, x))
            loss = tf.reduce_sum(losses) / workload.batch
        gradients = tape.gradient(loss, list(params.values()))
        summed = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        for p, m, v, gradient in zip(params.values(), first, second, summed, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=p.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=power1.read_value(),
                beta2_power=power2.read_value(),
                lr=LEARNING_RATE,
                beta1=BETA1,
                beta2=BETA2,
                epsilon=EPSILON,
                grad=gradient,
            )
        for power, beta in ((power1, BETA1), (power2, BETA2)):
            tf.raw_ops.AssignVariableOp(resource=power.handle, value=power.read_value() * beta)
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.run(replica_step, args=(x, y))

    def distributed(array: Any) -> Any:
        size = workload.batch // num_replicas
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(array[context.replica_id_in_sync_group * size :][:size])
        )

    batches = itertools.cycle([(distributed(x), distributed(y)) for x, y in workload.batches()])

    def run(num_steps: int) -> float:
        for x, y in itertools.islice(batches, num_steps):
            losses = step(x, y)
        return sum(map(float, strategy.experimental_local_results(losses)))

    _peers.serve(run)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
