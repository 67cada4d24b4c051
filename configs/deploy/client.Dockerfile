# The commands that talk to a server (chat, complete, ...) and AsyncClient, without torch, numpy or a server:
#   docker build -f configs/deploy/client.Dockerfile -t vllm-lite:client .
#   docker run -it --network host vllm-lite:client chat --url http://127.0.0.1:8000

FROM python:3.12-alpine AS build
COPY . /src
# Native kernels are for workers.
RUN pip wheel --no-cache-dir --no-deps --config-settings wheel.cmake=false --wheel-dir /wheels /src
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-compile --no-deps --prefix /packages /wheels/*.whl \
    && pip install --no-cache-dir --no-compile --prefix /packages \
        msgspec pyzmq pyyaml tqdm tokenizers jinja2 llguidance regex rich httpx huggingface-hub

FROM python:3.12-alpine
COPY --from=build /packages /usr/local
RUN adduser -D -u 10001 vllm-lite
USER 10001
WORKDIR /home/vllm-lite
ENTRYPOINT ["vllm-lite"]
