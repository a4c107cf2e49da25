# syntax=docker/dockerfile:1

# A release pins every base by digest: --build-arg PYTHON_TAG=3.13-slim-trixie@sha256:...
ARG PYTHON_TAG=3.13-slim-trixie
# The same Python, with a C compiler.
ARG COMPILER_TAG=3.13-trixie
ARG UV_TAG=0.13.8

FROM ghcr.io/astral-sh/uv:${UV_TAG} AS uv

FROM python:${COMPILER_TAG} AS build
COPY --from=uv /uv /usr/local/bin/uv
# Python trusts bytecode with UNCHECKED_HASH even if file times have changed, so starts stay fast.
ENV PYC_INVALIDATION_MODE=UNCHECKED_HASH \
    UV_CACHE_DIR=/var/cache/uv \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_PROJECT_ENVIRONMENT=/opt/app \
    UV_PYTHON_DOWNLOADS=never
WORKDIR /src
# Dependencies come first, so that their layer is rebuilt only if the lock file changes.
COPY pyproject.toml uv.lock ./
RUN --mount=type=cache,target=/var/cache/uv \
    uv sync --locked --no-dev --all-extras --group compile --no-install-project
COPY README.md LICENSE ./
COPY bridge ./bridge
# Compile the hot path with the locked tools that were installed above, then remove the tools.
RUN --mount=type=cache,target=/var/cache/uv \
    HATCH_BUILD_HOOKS_ENABLE=1 \
    uv sync --locked --no-dev --all-extras --no-editable --no-build-isolation

FROM python:${PYTHON_TAG}
# The base contains no bytecode of the standard library. With a read-only root, every start and every
# health check would compile it again.
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
# The root is read-only at run time. Only /tmp is writable.
ENV PATH=/opt/app/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONFAULTHANDLER=1 \
    PYTHONUNBUFFERED=1 \
    SMS_BRIDGE_REVISION=${REVISION}
# Numeric, so that Kubernetes can verify that it is not root.
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080 9090
STOPSIGNAL SIGTERM
# Asks the admin port of the process in Python, so that the image needs no shell and no curl.
HEALTHCHECK --interval=15s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:%s/livez' % os.environ.get('SMS_BRIDGE_ADMIN__PORT', '9090'), timeout=2)"]
# Exec form, so that the bridge is process 1 and receives signals.
ENTRYPOINT ["sms-bridge"]
CMD ["worker"]
