# One image for everything: experiments, the server and the nodes of a fleet (examples/docker/compose.yaml).
#   docker build -t incofl .
#   docker run --rm -v "$PWD/runs:/app/runs" incofl run demo --out runs/demo
# A smaller image without CUDA: --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL=""
ARG EXTRAS=flower
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /opt/incofl
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN PIP_EXTRA_INDEX_URL="$PIP_EXTRA_INDEX_URL" pip install -c constraints.txt ".[$EXTRAS]" \
    && useradd --create-home --uid 1000 incofl \
    && install -d -o incofl -g incofl /app /app/runs /keys /state /flwr
COPY examples/flower-deployment /opt/incofl/deployment

USER 1000
WORKDIR /app
ENTRYPOINT ["incofl"]
CMD ["--help"]
