"""What the exit code of a worker says to whoever started it: the table of docs/launch.md."""

#: An error of the user's program.
FAILED = 1
#: Another worker was lost, or all are stuck: start the job again.
RESTART = 75
#: The description of the cluster is wrong: starting again would not help.
BAD_CONFIGURATION = 76
#: Ctrl-C.
INTERRUPTED = 130
#: The machine was about to be taken away, and the state is saved: 128 + SIGTERM, as if the signal had ended it.
PREEMPTED = 143
