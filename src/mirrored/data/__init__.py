"""Input: datasets on the host, and their way to the replicas."""

from ._dataset import DistributedDataset as DistributedDataset
from ._source import NumpyDataset as NumpyDataset
