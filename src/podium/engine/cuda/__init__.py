"""Decoding on CUDA: slots over one cache, steps captured as graphs, prompts computed once a group."""
