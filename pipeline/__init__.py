"""trtpipe: from a Hugging Face checkpoint to a production Triton deployment.

Read `pipeline/stages.py` first. Importing this package loads nothing heavy.
"""

__version__ = "0.1.0"
