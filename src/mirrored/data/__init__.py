"""Input: reads datasets on the host, and brings their batches to the replicas."""

from .._errors import TFRecordError as TFRecordError
from ._dataset import DistributedDataset as DistributedDataset
from ._iterator import DistributedIterator as DistributedIterator
from ._records.example import make_example as make_example
from ._records.example import parse_example as parse_example
from ._records.feature import FixedLenFeature as FixedLenFeature
from ._records.feature import VarLenFeature as VarLenFeature
from ._records.tfrecord import tfrecord_dataset as tfrecord_dataset
from ._records.tfrecord import write_tfrecords as write_tfrecords
from ._sources.numpy_dataset import NumpyDataset as NumpyDataset
from ._sources.verbs import PerReplicaSpec as PerReplicaSpec

TFRecordError.__module__ = __name__  # tracebacks show the name that users write after `except`
