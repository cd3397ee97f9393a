"""Decides which worker and replica gets which rows."""
