"""What Keras does not promise is where we think it is. When this fails, look into _models/keras_parts.py first."""

import inspect

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from mirrored._models import keras_parts  # noqa: E402


def test_the_private_parts_are_where_we_look() -> None:
    variable = keras.Variable(np.ones(2), dtype="float32")
    assert keras_parts.imported_keras() is keras
    assert keras_parts.VALUE in vars(variable) and keras_parts.dtype_of(variable) == "float32"
    uninitialized = []
    with keras.StatelessScope(initialize_variables=False) as scope:
        assert keras_parts.innermost_scope(keras) is scope
        uninitialized.append(keras.Variable("ones", shape=(2,)))
    assert keras_parts.innermost_scope(keras) is None
    assert vars(uninitialized[0])[keras_parts.VALUE] is None
    with keras.StatelessScope():
        pass
    assert vars(uninitialized[0])[keras_parts.VALUE] is not None, "leaving a scope initializes what was made in others"
    for method in ("_direct_assign", "_initialize_layout"):
        assert method in vars(keras.Variable.__mro__[1]), method
    assert not keras_parts.is_shape_inference(keras)
    with keras.SymbolicScope():
        assert keras_parts.is_shape_inference(keras)


def test_the_methods_that_are_replaced_have_the_arguments_that_we_give() -> None:
    def arguments(function: object) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert keras_parts.BUILD in dir(keras.Model)
    layer = keras.layers.BatchNormalization()
    layer.build((None, 5, 3))
    assert list(keras_parts.reduction_axes_of(layer)) == [0, 1]
    assert arguments(getattr(layer, keras_parts.MOMENTS)) == ["inputs", "mask"]
    optimizer = keras.optimizers.SGD()
    optimizer.build([layer.gamma])
    assert keras_parts.trained_by(optimizer) == [layer.gamma] or keras_parts.trained_by(optimizer)[0] is layer.gamma
    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        assert arguments(kind.apply) == ["self", "grads", "trainable_variables"]
    assert arguments(keras.random.SeedGenerator.next) == ["self", "ordered"]
    assert isinstance(keras_parts.adapter_base(), type)
