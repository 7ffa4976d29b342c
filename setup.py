"""Says which files a wheel holds; everything else about the package is in pyproject.toml.

triton_repo/ lies beside the package, because it is a model repository and not part of it; a wheel carries it
inside the package, where `pipeline.triton.repository.templates` looks second.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["pipeline", "pipeline.*"]), "pipeline.triton_repo"],
    package_dir={"pipeline.triton_repo": "triton_repo"},
    package_data={
        "pipeline": ["**/*.toml", "**/*.jsonl", "**/*.md", "**/LICENSE.*", "py.typed"],
        "pipeline.triton_repo": ["**/*.py", "**/*.pbtxt"],
    },
)
