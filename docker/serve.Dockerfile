# The serving node: NVIDIA's image, plus what the Python models of a repository import. No build tools of ours.
# It must be the image that built the engine: an engine runs on the TensorRT-LLM and TensorRT that made it, and a second
# TensorRT must not come in (triton-inference-server/tensorrtllm_backend#424, #531). Hence --no-deps and lower bounds:
# what NVIDIA ships is left as it is, and only what is missing is added.
#
#   docker build --file docker/serve.Dockerfile --tag trtpipe-serve:26.05 .
ARG BASE_IMAGE=nvcr.io/nvidia/tritonserver:26.05-trtllm-python-py3
FROM ${BASE_IMAGE}

COPY docker/repository-requirements.txt docker/healthcheck.py /opt/trtpipe/
RUN python3 -m pip install --no-cache-dir --no-deps --break-system-packages \
      --requirement /opt/trtpipe/repository-requirements.txt \
 && python3 -c "import numpy, tokenizers, jinja2, tensorrt_llm"

# 1000 is triton-server in NVIDIA's images (build.py of triton-inference-server/server): tritonserver, MPI and the
# Python backend need no root.
RUN install --directory --owner 1000 --group 1000 /home/trtpipe
ENV HOME=/home/trtpipe HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
USER 1000:1000
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
# Healthy is: a token came out. A large engine loads for minutes, so failures in the first half hour do not count.
HEALTHCHECK --interval=30s --timeout=30s --start-period=30m --start-interval=5s --retries=3 \
  CMD ["python3", "/opt/trtpipe/healthcheck.py"]
# Mount the repository at /models: its launch.sh knows ranks and flags. One that was not emitted by trtpipe has none.
CMD ["/bin/sh", "-c", "[ ! -f /models/launch.sh ] || exec /bin/sh /models/launch.sh; exec tritonserver --model-repository=/models --disable-auto-complete-config"]
