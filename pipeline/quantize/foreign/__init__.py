"""Checkpoints that another tool quantized: what their stored numbers mean, read with numpy alone."""
