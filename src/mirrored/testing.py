"""Tools to test your training: count programs, compare copies, simulate input, train on any number of replicas."""

from ._testing.copies import assert_equal_copies as assert_equal_copies
from ._testing.copies import copies as copies
from ._testing.inputs import InputOfWorkers as InputOfWorkers
from ._testing.inputs import input_of_workers as input_of_workers
from ._testing.programs import ProgramCount as ProgramCount
from ._testing.programs import assert_compiles as assert_compiles
from ._testing.programs import count_programs as count_programs
from ._testing.replicas import assert_same_on_any_replicas as assert_same_on_any_replicas
