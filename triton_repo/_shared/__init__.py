"""Code that several models of the repository need; copied beside each model.py when a repository is emitted.

It runs in the interpreter of Triton's Python backend: numpy, tokenizers and jinja2 only.
"""
