"""What a traced function reads and writes instead of variables' arrays."""

import jax

import mirrored as mr


def test_a_body_reads_what_was_written_before_it(strategy2: mr.Strategy) -> None:
    """JAX keeps the trace of a body by the function's identity, and with it the value that the variable had then."""
    with strategy2.scope():
        w = mr.Variable(1.0)
    body = jax.jit(lambda x: x + w)

    def step() -> list[jax.Array]:
        seen = []
        for _ in range(3):
            seen.append(body(0.0))
            w.assign(w * 2)
        return seen

    assert [float(x) for x in strategy2.run(step)] == [1, 2, 4]
    assert [float(x) for x in strategy2.run(step)] == [8, 16, 32]
