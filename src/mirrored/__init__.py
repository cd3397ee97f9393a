"""Synchronous data-parallel training for JAX with the programming model of tf.distribute.MirroredStrategy."""

import importlib as _importlib
import typing as _hints

from . import _tf_names

__version__ = "0.2.0"

if _hints.TYPE_CHECKING:
    from ._public import *
else:  # `mirrored launch` uses no public name, so it starts its workers without the time to import JAX

    def _load() -> dict[str, object]:
        """Load all public names into this module, where Python finds them without `__getattr__` from now on."""
        names = vars(_importlib.import_module("._public", __name__))
        names = {name: thing for name, thing in names.items() if not name.startswith("_")}
        globals().update(names)
        return names

    def __getattr__(name: str) -> object:
        if name == "__all__":
            return sorted(_load())
        if not name.startswith("_"):
            _load()
            if name in globals():  # a public name, or the module of one
                return globals()[name]
        raise _tf_names.missing("mirrored", name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_load()})
