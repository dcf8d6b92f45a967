# The server in a container, for processors:
#
#     docker build --tag transect .
#     docker run --rm --publish 8000:8000 --volume transect:/cache transect
#
# and for NVIDIA GPUs, where the published PyTorch brings its CUDA libraries:
#
#     docker build --tag transect-cuda \
#         --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg PIP_EXTRA_INDEX_URL= .
#     docker run --rm --gpus all --ipc host --publish 8000:8000 --volume transect:/cache transect-cuda serve MODEL
#
# The model and the compiled kernels stay in the volume. Options go behind `serve`, or into the environment:
# `--env TRANSECT_SERVE_MAX_MODEL_LEN=4096`, `--env TRANSECT_API_KEY=...`.
ARG BASE=ubuntu:24.04
FROM ${BASE}

# A C++ compiler and Python's headers: the processor's kernels and Triton's launchers are compiled at the first start.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/transect
ENV PATH=/opt/transect/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# PyTorch first, in a layer that only a new version of it makes again.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY constraints.txt ./
RUN pip install -c constraints.txt torch

COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src ./src
RUN pip install -c constraints.txt '.[otel]'

RUN useradd --create-home --uid 10001 transect && mkdir /cache && chown transect /cache
USER 10001
WORKDIR /home/transect
ENV TRANSECT_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    TRANSECT_SERVE_HOST=0.0.0.0
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=600s CMD \
    ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["transect"]
CMD ["serve", "smollm2-135m"]
