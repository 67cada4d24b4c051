# The same with GPU workers. No GPU has run this engine yet: scripts/gpu_check says what works on yours.
#   docker build -f configs/deploy/cuda.Dockerfile -t vllm-lite:cuda .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -v ~/models:/models:ro vllm-lite:cuda /models/a-checkpoint

FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04
# Kernels are compiled when they are first used: that takes CUDA's headers, too. Ubuntu 24.04 has Python 3.12.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv cuda-cudart-dev-13-0 cuda-nvrtc-13-0 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
ENV PATH=/opt/vllm-lite/bin:$PATH
# hadolint ignore=DL3013
RUN python3 -m venv /opt/vllm-lite \
    && pip install --no-cache-dir -c /wheels/constraints.txt "$(echo /wheels/*.whl)[hf,cuda13]" \
    && useradd --create-home --uid 10001 vllm-lite
USER 10001
WORKDIR /home/vllm-lite
# A volume that is mounted there belongs to this user.
RUN mkdir .cache
ENV VLLM_LITE_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm-lite", "serve"]
