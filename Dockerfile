# One image for every role: `headrace gateway`, `headrace discovery`, and each other command. It is installed from the hashed lock files, the
# relay is compiled, and nothing of compiler, pip's cache or sources is left in it.
FROM python:3.11.14-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY requirements/build.txt requirements/k8s.txt requirements/
RUN python -m venv /opt/headrace && python -m venv --without-pip tools \
    && pip --no-cache-dir --python /opt/headrace/bin/python install --no-compile --require-hashes --no-deps --requirement requirements/k8s.txt \
    && pip --no-cache-dir --python tools/bin/python install --require-hashes --no-deps --requirement requirements/build.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY gateway gateway
COPY headrace headrace
COPY k8s k8s
COPY router router
RUN tools/bin/python -m hatchling build -t wheel -d dist \
    && pip --no-cache-dir --python /opt/headrace/bin/python install --no-compile --no-deps dist/*.whl \
    && pip --python /opt/headrace/bin/python uninstall --yes pip setuptools \
    && /opt/headrace/bin/headrace --version
# Python compiles what is imported here, and so what is used when something starts, a quarter of all that there is.
RUN /opt/headrace/bin/python -c "import gateway.app, headrace.cli.discovery, headrace.cli.endpoints, headrace.cli.gateway, \
    headrace.workers.worker, kubernetes.aio.client, kubernetes.aio.config"

FROM python:3.11.14-slim-bookworm
LABEL org.opencontainers.image.title="headrace" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 8000 8001 9090
# No shell between: the gateway itself gets SIGTERM, drains, and ends.
ENTRYPOINT ["headrace"]
CMD ["--help"]
