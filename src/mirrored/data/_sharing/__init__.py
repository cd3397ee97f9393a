"""Which worker and replica gets which rows."""
