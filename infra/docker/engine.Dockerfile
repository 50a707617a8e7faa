# An SGLang engine on the CPU. For GPUs, compose uses SGLang's published image instead.
ARG BASE_IMAGE=swerve/python-base:1

FROM ${BASE_IMAGE} AS packages
COPY constraints.txt pyproject.toml /build/
COPY infra/setup /build/infra/setup
COPY infra/docker /build/infra/docker
RUN sh /build/infra/docker/install.sh '' infra/setup/engine.txt sglang

FROM ${BASE_IMAGE}
COPY --from=packages /opt/swerve /opt/swerve
ENV PATH=/opt/swerve/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /app
COPY infra/__init__.py infra/ports.py infra/
COPY infra/serving infra/serving
COPY pipeline pipeline
ENTRYPOINT ["python", "-m", "infra.serving.engine", "--host", "0.0.0.0"]
