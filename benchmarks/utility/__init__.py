"""Utility of the allocation policies at equal ε, on real data: python -m benchmarks.utility --help."""
