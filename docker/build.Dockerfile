# The build node: trtpipe, ModelOpt and trtllm-build in one image, in two Python environments.
# TensorRT-LLM pins modelopt 0.37, transformers 4.57 and setuptools < 80, ModelOpt 0.47 wants setuptools >= 80: they do
# not resolve together. So the image's own Python keeps TensorRT-LLM as NVIDIA ships it, /opt/trtpipe holds the rest,
# and the two meet as processes: trtpipe finds trtllm-build on PATH.
#
#   docker build --file docker/build.Dockerfile --tag trtpipe-build:26.05 .
ARG BASE_IMAGE=nvcr.io/nvidia/tritonserver:26.05-trtllm-python-py3
FROM ${BASE_IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The entry point of NVIDIA's images checks the driver and execs its arguments; it is kept.

# Without ensurepip (Ubuntu's python3-venv is not in the image): the image's pip installs into the new environment.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv --without-pip /opt/trtpipe

WORKDIR /opt/trtpipe/src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY pipeline ./pipeline
COPY triton_repo ./triton_repo
# Versions are those of requirements.lock; names that only other Pythons or the tests need are not pulled in.
# The editable install keeps triton_repo/ where the package looks for it.
RUN python3 -m pip --python /opt/trtpipe/bin/python install --constraint requirements.lock "setuptools>=80" \
 && python3 -m pip --python /opt/trtpipe/bin/python install --constraint requirements.lock \
      --no-build-isolation --editable ".[quantize,client]" \
 && /opt/trtpipe/bin/trtpipe --help > /dev/null \
 # A link and not PATH: scripts of the image that start with "env python3" must get the image's Python.
 && ln -s /opt/trtpipe/bin/trtpipe /usr/local/bin/trtpipe \
 && command -v trtllm-build

# 1000 is triton-server in NVIDIA's images (build.py of triton-inference-server/server). Run with --user to own what is
# built on a bind mount. Root is not needed: MPI and TensorRT build as any user.
RUN install --directory --owner 1000 --group 1000 /home/trtpipe /workspace
ENV HOME=/home/trtpipe HF_HOME=/home/trtpipe/.cache/huggingface
WORKDIR /workspace
USER 1000:1000
CMD ["trtpipe", "doctor"]
