"""The engine in a PyTorch loop: a model's blocks, their weights in and out, and what autograd must be told."""
