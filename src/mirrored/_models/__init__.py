"""Models of other libraries inside a step. We import none of these libraries: a program that uses one has imported it."""
