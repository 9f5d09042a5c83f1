"""Speed and memory on a GPU; ``python benchmarks/run_gpu.py`` runs it."""
