# A rollout worker, which uses the Docker host whose socket is mounted, and needs neither torch nor a model; also the pages of runs.
ARG BASE_IMAGE=swerve/python-base:1

FROM ${BASE_IMAGE} AS packages
COPY constraints.txt pyproject.toml /build/
COPY infra/setup /build/infra/setup
COPY infra/docker /build/infra/docker
RUN sh /build/infra/docker/install.sh base,workers '' 'swebench multi-swe-bench swesmith'

FROM ${BASE_IMAGE}
COPY --from=packages /opt/swerve /opt/swerve
ENV PATH=/opt/swerve/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /app
COPY pipeline pipeline
COPY workers workers
COPY infra/__init__.py infra/
COPY infra/web infra/web
CMD ["python", "-m", "workers.run"]
