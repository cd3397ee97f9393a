"""The command `mirrored`, as a script that processes.py can start."""

import sys

from mirrored.launch import main

sys.exit(main())
