"""What becomes of a step after its proof: passes that change how it runs, and never what it computes."""
