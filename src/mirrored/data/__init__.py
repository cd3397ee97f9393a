"""Input: datasets on the host, and their way to the replicas."""

from .._errors import TFRecordError as TFRecordError
from ._dataset import DistributedDataset as DistributedDataset
from ._example import make_example as make_example
from ._example import parse_example as parse_example
from ._feature import FixedLenFeature as FixedLenFeature
from ._feature import VarLenFeature as VarLenFeature
from ._iterator import DistributedIterator as DistributedIterator
from ._source import NumpyDataset as NumpyDataset
from ._tfrecord import tfrecord_dataset as tfrecord_dataset
from ._tfrecord import write_tfrecords as write_tfrecords
