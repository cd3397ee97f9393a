"""Run the tests that Keras and Optax have in their packages, with a strategy around them: nothing may become different.

Keras' run in a scope of three replicas, Optax' with each `jax.jit` as a step on them:

    python tests/foreign/run.py keras layers/rnn optimizers/sgd_test.py
    python tests/foreign/run.py optax -k accumulation
    python tests/foreign/run.py keras --replicas 0 layers/rnn

Without paths all of them are run, which takes Keras more than an hour on two cores. `--replicas 0` runs them as they are: what
fails then too, such as what needs TensorFlow, is no fault of ours. All other options are pytest's.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

_PLUGINS = {"keras": "keras_in_scope", "optax": "optax_in_steps"}
_HERE = Path(__file__).parent


def command(library: str, paths: list[str], options: list[str], is_plain: bool = False) -> list[str]:
    """Return the command that runs the tests in some files or folders of a library's package."""
    [package] = importlib.util.find_spec(library).submodule_search_locations
    root = Path(package) / "src" if library == "keras" else Path(package)
    given = [root / path for path in paths or ["."]]
    files = sorted({file for path in given for file in (path.rglob("*_test.py") if path.is_dir() else [path])})
    plugin = [] if is_plain else ["-p", _PLUGINS[library]]
    apart = ["-c", os.devnull, "--rootdir", str(root), "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "ignore", "-q"]
    return [sys.executable, "-m", "pytest", *apart, *plugin, *options, *map(str, files)]


def environment(num_replicas: int = 3) -> dict[str, str]:
    """Return the environment in which these tests run."""
    devices = f"--xla_force_host_platform_device_count={max(num_replicas, 1)}"
    own = {"KERAS_BACKEND": "jax", "XLA_FLAGS": devices, "REPLICAS": str(num_replicas), "PYTHONPATH": str(_HERE)}
    return {**os.environ, **own}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=_PLUGINS)
    parser.add_argument("paths", nargs="*", help="files or folders in the package")
    parser.add_argument("--replicas", type=int, default=3)
    arguments, options = parser.parse_known_args()
    run = command(arguments.library, arguments.paths, options, is_plain=arguments.replicas == 0)
    return subprocess.run(run, env=environment(arguments.replicas), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
