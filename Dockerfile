# megalite in a container; docs/docker.md says how to build and run it.
#   docker build -t megalite .
#   docker build -t megalite:cuda --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 --build-arg PIP_EXTRA_INDEX_URL= .

# Debian 12 or Ubuntu 24.04: both come with a Python that megalite runs on.
ARG BASE=debian:bookworm-20250520-slim
FROM ${BASE}

ARG DEBIAN_FRONTEND=noninteractive
# Python, and a compiler: torch.compile needs one when it runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The exact versions of requirements.txt, before the code: a change of the code installs nothing again. The index has
# torch's CPU builds; without it pip takes the CUDA build, which is several gigabytes.
WORKDIR /megalite
COPY pyproject.toml README.md requirements.txt requirements-wandb.txt requirements-tensorboard.txt requirements-s3.txt ./
COPY scripts/setup.sh scripts/
# The package's metadata asks for its version and for a folder conf.
COPY megalite/__init__.py megalite/
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG PIP_NO_CACHE_DIR=1
RUN mkdir conf && bash -c '. scripts/setup.sh requirements.txt requirements-wandb.txt requirements-tensorboard.txt requirements-s3.txt'
COPY . .
RUN .venv/bin/python -m pip install --quiet --no-deps --editable .

# Nobody trains as root. Whoever the container is started as (--user) may put files into these folders, the working folder
# among them, and may change nothing that is there.
RUN useradd --uid 10001 --create-home megalite \
    && mkdir -p /cache runs \
    && chmod 1777 . /cache runs /home/megalite
ENV PATH=/megalite/.venv/bin:$PATH \
    HOME=/home/megalite \
    USER=megalite \
    XDG_CACHE_HOME=/cache \
    PYTHONDONTWRITEBYTECODE=1
USER megalite

ENTRYPOINT ["megalite"]
CMD ["train"]
