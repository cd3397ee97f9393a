"""A worker that trains the nets of tests/parity/test_model_libraries.py; it writes its weights.

Arguments: a folder; the libraries.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np

import mirrored as mr

folder, *libraries = sys.argv[1:]
strategy = mr.MultiWorkerMirroredStrategy()
path = Path(__file__).parent.parent / "parity" / "test_model_libraries.py"
spec = importlib.util.spec_from_file_location(path.stem, path)
nets = importlib.util.module_from_spec(spec)
sys.path.insert(0, str(path.parent.parent))
spec.loader.exec_module(nets)
for library in libraries:
    weights = nets.LIBRARIES[library](strategy)
    np.savez(Path(folder) / f"{library}-{int(not strategy.is_chief)}.npz", *map(np.asarray, weights))
