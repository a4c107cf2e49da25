# syntax=docker/dockerfile:1

# A release build pins all by digest: --build-arg PYTHON_TAG=3.13-slim-trixie@sha256:...
ARG PYTHON_TAG=3.13-slim-trixie
# The same Python, with a C compiler beside it.
ARG COMPILER_TAG=3.13-trixie
ARG UV_TAG=0.13.8

FROM ghcr.io/astral-sh/uv:${UV_TAG} AS uv

FROM python:${COMPILER_TAG} AS build
COPY --from=uv /uv /usr/local/bin/uv
# What is compiled is trusted without a look at times: rewriting them must cost no start.
ENV PYC_INVALIDATION_MODE=UNCHECKED_HASH \
    UV_CACHE_DIR=/var/cache/uv \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_PROJECT_ENVIRONMENT=/opt/app \
    UV_PYTHON_DOWNLOADS=never
WORKDIR /src
# Dependencies come first: their layer is built again only when the lock file changes.
COPY pyproject.toml uv.lock ./
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --locked --no-dev --all-extras --group compile --no-install-project
COPY README.md LICENSE ./
COPY bridge ./bridge
# The hot path is compiled with what is installed above, as locked, and then that is taken out again.
RUN --mount=type=cache,target=/var/cache/uv \
    HATCH_BUILD_HOOKS_ENABLE=1 \
    uv sync --locked --no-dev --all-extras --no-editable --no-build-isolation

FROM python:${PYTHON_TAG}
# The base brings Python's own modules uncompiled: under a read-only root every start and every
# health check would compile them anew.
RUN python3 -m compileall -f -q -x site-packages --invalidation-mode unchecked-hash \
    "$(python3 -c 'import os; print(os.path.dirname(os.__file__))')"
ARG PYTHON_TAG
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
ARG SOURCE_URL=
ARG BASE_DIGEST=
LABEL org.opencontainers.image.title="sms-bridge" \
      org.opencontainers.image.description="The bridge between RabbitMQ and an SMS service" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.vendor="The sms-bridge authors" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE_URL}" \
      org.opencontainers.image.url="${SOURCE_URL}" \
      org.opencontainers.image.documentation="${SOURCE_URL}" \
      org.opencontainers.image.base.name="docker.io/library/python:${PYTHON_TAG}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"
COPY --from=build /opt/app /opt/app
# The root is read-only where it runs: nothing is compiled there, and only /tmp is written.
ENV PATH=/opt/app/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONFAULTHANDLER=1 \
    PYTHONUNBUFFERED=1 \
    SMS_BRIDGE_REVISION=${REVISION}
# Numeric, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080 9090
STOPSIGNAL SIGTERM
# No shell, no curl: the program of the image asks, of the port that the process would take.
HEALTHCHECK --interval=15s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:%s/livez' % os.environ.get('SMS_BRIDGE_ADMIN__PORT', '9090'), timeout=2)"]
# Exec form: the bridge is process 1 and gets the signals itself.
ENTRYPOINT ["sms-bridge"]
CMD ["worker"]
