# mirrored and its examples, with the versions of requirements.lock:
#
#   docker build -t mirrored . && docker run --rm mirrored        # make demo
#   docker build -t mirrored --build-arg EXTRA='jax[cuda13]' .    # for NVIDIA's GPUs: docker run --gpus all
FROM python:3.14-slim
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /mirrored
COPY . .
ARG EXTRA=""
# The version of JAX stays that of the lock.
RUN make setup && if [ -n "$EXTRA" ]; then .venv/bin/pip install --no-cache-dir "$EXTRA" -c requirements.lock; fi
ENV PATH=/mirrored/.venv/bin:$PATH
CMD ["make", "demo"]
