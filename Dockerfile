# Any Debian-like image with python3 (3.11 or newer), venv and ca-certificates; both stages need the same image.
ARG BASE=docker.io/library/python:3.13-slim-bookworm

FROM ${BASE} AS build
# Given, because the build context has no git data.
ARG VERSION="0.0.0"
WORKDIR /src
COPY . .
# The secrets `pip.conf` and `ca.crt` set a package index and a certificate authority; they are not in the image.
# Every package, including the build backend, is checked against its hash; the backend stays in this stage.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/etc/ssl/certs/ca-certificates.crt \
    export PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 \
    SETUPTOOLS_SCM_PRETEND_VERSION="${VERSION}" \
    && python3 -m venv /build \
    && /build/bin/pip install --quiet --require-hashes --no-deps --only-binary :all: \
        --requirement requirements/build.lock --requirement requirements/runtime.lock \
    && /build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python3 -m venv --without-pip /opt/imds-bridge \
    && /build/bin/pip --python /opt/imds-bridge/bin/python install --quiet --no-compile --require-hashes --no-deps \
        --only-binary :all: --requirement requirements/runtime.lock \
    && /build/bin/pip --python /opt/imds-bridge/bin/python install --quiet --no-compile --no-deps \
        --no-index --find-links /wheels imds-bridge \
    && cp infra/container/health.py infra/kubernetes/drain.py /opt/imds-bridge/ \
    # Compiled now, because the file system will be read-only; with hashes, so that builds are reproducible.
    && /opt/imds-bridge/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/imds-bridge \
    && install --directory --mode 0700 --owner 65532 --group 65532 /state

FROM ${BASE}
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="imds-bridge" \
      org.opencontainers.image.description="Publish every change of Azure VM Scheduled Events as CloudEvents" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/imds-bridge /opt/imds-bridge
COPY --from=build --chown=65532:65532 /state /var/lib/imds-bridge
ENV PATH=/opt/imds-bridge/bin:/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /
VOLUME /var/lib/imds-bridge
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s CMD ["python", "/opt/imds-bridge/health.py"]
ENTRYPOINT ["imds-bridge"]
CMD ["forward"]
