"""State: variables, the arrays behind them, and whether their copies are equal."""
