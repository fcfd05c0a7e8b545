"""Spillway's plugins for NVIDIA GPUs, in lib/, where the package spillway looks for them. There is nothing to call."""
