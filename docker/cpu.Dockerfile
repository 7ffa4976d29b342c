# Serves a repository of the openvino target on a machine without a GPU, with the Triton of the nvidia-pytriton wheel.
#
#   docker build --file docker/cpu.Dockerfile --tag trtpipe-cpu:local .
ARG BASE_IMAGE=docker.io/library/python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1
FROM ${BASE_IMAGE}

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/trtpipe/src
COPY docker/cpu-requirements.txt ./
RUN python -m venv /opt/trtpipe \
 && /opt/trtpipe/bin/pip install --no-deps --requirement cpu-requirements.txt

COPY pyproject.toml README.md LICENSE ./
COPY pipeline ./pipeline
COPY triton_repo ./triton_repo
COPY docker/healthcheck.py /opt/trtpipe/healthcheck.py
RUN /opt/trtpipe/bin/pip install --no-deps --no-build-isolation --editable . \
 && useradd --uid 1000 --create-home trtpipe

ENV PATH=/opt/trtpipe/bin:$PATH
USER 1000:1000
WORKDIR /home/trtpipe
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=30s --start-period=5m --start-interval=2s --retries=3 \
  CMD ["python", "/opt/trtpipe/healthcheck.py"]
# Inside the container on every address: what is published, and where, the compose file or `docker run -p` decides.
CMD ["trtpipe", "serve", "/models", "--host", "0.0.0.0", "--log-file", "/tmp/triton.log"]
