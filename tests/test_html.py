"""What a notebook shows: short, escaped, and never a reason to fail."""

import jax
import numpy as np
import pytest
from strategies import variable

import mirrored as mr
from mirrored._html import Html, copies, element, table


def test_texts_are_escaped_and_html_is_not() -> None:
    assert element("a", "<b>", class_='x"y', data_n=1) == '<a class="x&quot;y" data-n="1">&lt;b&gt;</a>'
    assert "<td>&amp;</td><td><i></td>" in table(("x", "y"), [("&", Html("<i>"))])


@pytest.mark.parametrize("strategy", [1, 3], indirect=True)
def test_a_variable_shows_equal_copies_once(strategy: mr.MirroredStrategy) -> None:
    count = strategy.num_replicas_in_sync
    w = variable(np.full(3, 7.5, "float32"), strategy, name="<w>")
    seen = variable(1.0, strategy, synchronization="on_read", aggregation="sum")
    key = variable(jax.random.key(0), strategy)
    text = w._repr_html_()
    assert ("1 copy" if count == 1 else f"{count} equal copies") in text
    assert text.count("7.5") == 3 and "<w>" not in text
    assert "one value for each replica" in seen._repr_html_() and seen._repr_html_().count("<tr>") == count + 1
    assert "cop" in key._repr_html_()
    assert "traced" in strategy.run(lambda: w._repr_html_())


def test_copies_that_differ_are_all_shown() -> None:
    zeros = [np.float32([0.0]), np.float32([-0.0])]
    assert "copies that differ" in copies("w", list(enumerate(zeros)), False)
    assert "2 equal copies" in copies("w", list(enumerate([np.float32([np.nan])] * 2)), False)


def test_a_per_replica_is_a_row_for_each_replica(strategy3: mr.MirroredStrategy) -> None:
    uneven = strategy3.distribute_values_from_function(lambda ctx: np.ones(ctx.replica_id_in_sync_group))
    text = uneven._repr_html_()
    assert "PerReplica of 3 replicas, shape (None,)" in text and text.count("<tr>") == 4 and "(0,)" in text
    assert "PerReplica" in jax.tree.map(lambda array: None, uneven)._repr_html_()
    assert "PerReplica" in jax.eval_shape(lambda x: x, uneven)._repr_html_()


def test_a_strategy_and_its_datasets_say_what_they_are(strategy2: mr.MirroredStrategy) -> None:
    rows = strategy2.make_numpy_dataset(np.ones(10**6)).shuffle(seed=3).batch(4).repeat(2)
    assert len(rows._repr_html_()) < 300 and "1000000 rows" in rows._repr_html_() and "seed 3" in rows._repr_html_()
    batches = strategy2.distribute_dataset(rows)
    assert "cut into 2" in batches._repr_html_()
    assert "<b>MirroredStrategy: 2 replicas" in strategy2._repr_html_() and "dataset NumpyDataset" in strategy2._repr_html_()
    assert mr.OneDeviceStrategy("cpu:0")._repr_html_().startswith("<b>OneDeviceStrategy: 1 replica (cpu:0)</b>")
    with pytest.raises(AttributeError):
        strategy2._repr_markdown_()
