# Engine, CPU workers and HTTP server:
#   docker build -f configs/deploy/cpu.Dockerfile -t vllm-lite:cpu .
#   docker run -p 127.0.0.1:8000:8000 -v ~/models:/models:ro vllm-lite:cpu /models/a-checkpoint

FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.12-slim-bookworm
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c /wheels/constraints.txt \
        "$(echo /wheels/*.whl)[hf]" \
    && useradd --create-home --uid 10001 vllm-lite
USER 10001
WORKDIR /home/vllm-lite
# A volume that is mounted there belongs to this user.
RUN mkdir .cache
ENV VLLM_LITE_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm-lite", "serve"]
