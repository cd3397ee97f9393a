"""TensorFlow's tutorials "Custom training with tf.distribute.Strategy" and "Distributed training with Keras", imports changed.

Beside the imports: the data, and `mr.value_and_grad` in the place of `tf.GradientTape`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mirrored as mr

keras = pytest.importorskip("keras")
pytest.importorskip("sklearn")
import digits as program  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def create_model() -> Any:
    regularizer = keras.regularizers.L2(1e-5)
    return keras.Sequential(
        [
            keras.layers.Conv2D(8, 3, activation="relu", kernel_regularizer=regularizer),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu", kernel_regularizer=regularizer),
            keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


@pytest.mark.slow  # its parts are tested alone
def test_custom_training(tmp_path: Path) -> None:
    images, labels = program.digits()
    train_images, train_labels, test_images, test_labels = images[:250], labels[:250], images[250:300], labels[250:300]
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    GLOBAL_BATCH_SIZE = 32 * strategy.num_replicas_in_sync
    EPOCHS = 3
    train_dataset = strategy.make_numpy_dataset((train_images, train_labels)).shuffle(seed=0).batch(GLOBAL_BATCH_SIZE)
    test_dataset = strategy.make_numpy_dataset((test_images, test_labels)).batch(GLOBAL_BATCH_SIZE)
    train_dist_dataset = strategy.distribute_dataset(train_dataset)
    test_dist_dataset = strategy.distribute_dataset(test_dataset)

    with strategy.scope():
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

        def compute_loss(labels: Any, predictions: Any, model_losses: Any) -> Any:
            per_example_loss = loss_object(labels, predictions)
            loss = mr.losses.compute_average_loss(per_example_loss)
            if model_losses:
                loss += mr.losses.scale_regularization_loss(sum(model_losses))
            return loss

    with strategy.scope():
        test_loss = keras.metrics.Mean(name="test_loss")
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = create_model()  # not built: it does not know the shape of its input
        optimizer = keras.optimizers.Adam(learning_rate=0.01)

    def train_step(inputs: Any) -> Any:
        images, labels = inputs

        def forward() -> Any:
            predictions = model(images, training=True)
            return compute_loss(labels, predictions, model.losses), predictions

        (loss, predictions), gradients = mr.value_and_grad(forward, model.trainable_variables, has_aux=True)()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs: Any) -> None:
        images, labels = inputs
        predictions = model(images, training=False)
        t_loss = loss_object(labels, predictions)
        test_loss.update_state(t_loss)
        test_accuracy.update_state(labels, predictions)

    @mr.function
    def distributed_train_step(dataset_inputs: Any) -> Any:
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(mr.ReduceOp.SUM, per_replica_losses, axis=None)

    @mr.function
    def distributed_test_step(dataset_inputs: Any) -> Any:
        return strategy.run(test_step, args=(dataset_inputs,))

    results = []
    for _ in range(EPOCHS):
        total_loss, num_batches = 0.0, 0
        for x in train_dist_dataset:
            total_loss += distributed_train_step(x)
            num_batches += 1
        for x in test_dist_dataset:
            distributed_test_step(x)
        results.append(
            (total_loss / num_batches, *map(float, (train_accuracy.result(), test_loss.result(), test_accuracy.result())))
        )
        test_loss.reset_state()
        train_accuracy.reset_state()
        test_accuracy.reset_state()
    assert results[-1][0] < results[0][0] and results[-1][1] > 0.3 and results[-1][3] > 0.3, results
    assert len(model.layers[0].kernel.value.devices()) == 2

    with mr.Checkpoint(tmp_path, optimizer=optimizer, model=model) as checkpoint:
        checkpoint.save(1)
    with strategy.scope():
        new_model, new_optimizer = create_model(), keras.optimizers.Adam()
        new_model.build((None, 8, 8, 1))
        new_optimizer.build(new_model.trainable_variables)
    with mr.Checkpoint(tmp_path, optimizer=new_optimizer, model=new_model) as checkpoint:
        checkpoint.restore_latest()
    assert all(map(np.array_equal, new_model.get_weights(), model.get_weights()))


@pytest.mark.slow  # test_keras_fit.py does the same for less
def test_distributed_training_with_keras(tmp_path: Path) -> None:
    images, labels = program.digits()
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    BATCH_SIZE = 16 * strategy.num_replicas_in_sync
    train_dataset = strategy.distribute_dataset(
        strategy.make_numpy_dataset((images[:200], labels[:200])).shuffle(seed=0).batch(BATCH_SIZE)
    )
    eval_dataset = strategy.distribute_dataset(strategy.make_numpy_dataset((images[200:264], labels[200:264])).batch(BATCH_SIZE))
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = create_model()
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.Adam(learning_rate=0.01),
            metrics=["accuracy"],
        )

    def decay(epoch: int) -> float:
        return 1e-2 if epoch < 3 else 1e-3

    seen = []

    class PrintLR(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(float(model.optimizer.learning_rate))

    prefix = str(tmp_path / "ckpt_{epoch}.weights.h5")
    callbacks = [
        keras.callbacks.ModelCheckpoint(filepath=prefix, save_weights_only=True),
        keras.callbacks.LearningRateScheduler(decay),
        PrintLR(),
    ]
    model.fit(train_dataset, epochs=4, callbacks=callbacks, verbose=0)
    assert seen == pytest.approx([1e-2, 1e-2, 1e-2, 1e-3])
    model.load_weights(tmp_path / "ckpt_4.weights.h5")
    eval_loss, eval_acc = model.evaluate(eval_dataset, verbose=0)
    assert eval_acc > 0.3 and len(model.layers[0].kernel.value.devices()) == 2

    model.save(tmp_path / "my_model.keras")
    unreplicated_model = keras.models.load_model(tmp_path / "my_model.keras")
    assert unreplicated_model.evaluate(images[200:264], labels[200:264], verbose=0) == pytest.approx(
        [eval_loss, eval_acc], rel=1e-4
    )
    with strategy.scope():
        replicated_model = keras.models.load_model(tmp_path / "my_model.keras")
    assert replicated_model.evaluate(eval_dataset, verbose=0) == pytest.approx([eval_loss, eval_acc], rel=1e-4)
    assert len(replicated_model.layers[0].kernel.value.devices()) == 2
