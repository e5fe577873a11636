"""Judges every operator of every backend by the float64 oracle."""
