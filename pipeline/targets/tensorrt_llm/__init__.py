"""The GPU targets: engines by trtllm-build (`build`), and the LLM API, which needs none (`llmapi`)."""
