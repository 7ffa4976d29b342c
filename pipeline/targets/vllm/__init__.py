"""The target vllm: a checkpoint that vLLM loads, for Triton's vLLM backend. Nothing is compiled."""
